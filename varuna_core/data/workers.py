"""Encode blocks of text to token bytes in other processes, keeping the order of the blocks.

Workers are spawned, since the tokenizer's threads do not survive a fork. Each holds the read end of
a pipe whose other end is the parent's: when that end closes, because the work is done or the parent
was killed, workers exit at once. Only the parent handles Ctrl-C.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from varuna_core.data.errors import DataError
from varuna_core.data.indexed import MAX_SEQUENCE
from varuna_core.data.text import Block, Format, read_documents, split_sentences
from varuna_core.data.vocabulary import Encoder, VocabularyFiles, open_encoder

AHEAD = 3
"""Number of blocks for each process that may be waiting or in work, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class EncodingTask:
    """Options for encoding blocks, pickled to the workers."""

    formats: tuple[Format, ...]
    """The format of each input."""
    key: str
    files: VocabularyFiles
    append_eod: bool
    split_sentences: bool
    keep_newlines: bool


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The tokens of a block, with counts."""

    tokens: bytes
    lengths: bytes
    """The number of tokens of each sequence, as int32."""
    counts: bytes
    """The number of sequences of each document, as int32."""
    bad: list[tuple[int, str]]
    num_blank: int
    num_empty: int
    """The number of documents without a token."""


class BlockEncoder:
    def __init__(self, work: EncodingTask) -> None:
        self.work = work
        self.encoder: Encoder = open_encoder(work.files)
        self.end = b""
        if work.append_eod:
            if self.encoder.end is None:
                raise DataError(f"--append-eod: {work.files.vocab} has no <|endoftext|>")
            self.end = np.array(self.encoder.end, self.encoder.dtype).tobytes()

    def encode(self, number: int, block: Block) -> Encoded:
        found = read_documents(block, self.work.formats[number], self.work.key)
        sequences, counts = self._encode_texts(found.texts)
        item = self.encoder.dtype.itemsize
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences)) // item
        if len(lengths) and int(lengths.max()) > MAX_SEQUENCE:
            raise DataError(f"{block.path}: a document has more than {MAX_SEQUENCE:,} tokens")
        return Encoded(
            tokens=b"".join(sequences),
            lengths=lengths.astype("<i4").tobytes(),
            counts=np.array(counts, "<i4").tobytes(),
            bad=found.bad,
            num_blank=found.num_blank,
            num_empty=len(found.texts) - len(counts),
        )

    def _encode_texts(self, texts: list[str]) -> tuple[list[bytes], list[int]]:
        """Return the sequences with tokens, and their number in each document that has any."""
        if not self.work.split_sentences:
            found = self.encoder.encode(texts)
            sequences = [tokens + self.end for tokens in found if tokens]
            return sequences, [1] * len(sequences)
        keep = self.work.keep_newlines
        parts = [split_sentences(text, keep_newlines=keep) for text in texts]
        encoded = iter(self.encoder.encode([one for sentences in parts for one in sentences]))
        sequences, counts = [], []
        for sentences in parts:
            mine = [tokens for tokens in (next(encoded) for _ in sentences) if tokens]
            if mine:
                mine[-1] += self.end
                sequences += mine
                counts.append(len(mine))
        return sequences, counts


_mine: BlockEncoder | DataError | None = None


def _start(work: EncodingTask, parent: Connection) -> None:
    global _mine
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.set_threshold(100_000)  # a block makes many lists and hardly a cycle
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        _mine = BlockEncoder(work)
    except DataError as error:  # an initializer that raises breaks the pool without a word
        _mine = error


def _leave_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def _encode(number: int, block: Block) -> Encoded:
    if isinstance(_mine, DataError):
        raise _mine
    assert _mine is not None
    return _mine.encode(number, block)


def encode_blocks(
    work: EncodingTask, blocks: Iterable[tuple[int, Block]], num_processes: int
) -> Generator[tuple[int, Block, Encoded], None, None]:
    """Yield each block with its tokens, in order; one process means the present one."""
    if num_processes == 1:
        encoder = BlockEncoder(work)
        for number, block in blocks:
            yield number, block, encoder.encode(number, block)
        return
    spawn: Any = multiprocessing.get_context("spawn")
    held, ours = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(num_processes, spawn, _start, (work, held))
    waiting: deque[tuple[int, Block, Future[Encoded]]] = deque()
    try:
        for number, block in blocks:
            waiting.append((number, block, pool.submit(_encode, number, block)))
            if len(waiting) >= AHEAD * num_processes:
                yield _take(waiting)
        while waiting:
            yield _take(waiting)
        pool.shutdown()
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps because memory ran out: use fewer "
            "--processes; the same command continues from here"
        ) from None
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        held.close()


def _take(waiting: deque[tuple[int, Block, Future[Encoded]]]) -> tuple[int, Block, Encoded]:
    number, block, future = waiting.popleft()
    return number, block, future.result()
