"""Convert text to a `.bin/.idx` pair: one reader, many encoders, one writer, restartable anywhere.

The output depends only on the inputs and the settings, not on the number of processes, the borders
of blocks or interruptions.

An incomplete data set is kept in the folder `PREFIX_text_document.part/`:

    tokens.bin   lengths.i4   counts.i4      tokens, tokens per sequence, sequences per document
    journal.json                             valid size of these files, position in the input
    vocab.json   merges.txt                  if the vocabulary is trained here

The journal is written after the files are synced. Bytes that a kill or a full disk left after the
journal's position are cut off when the same work continues; other work starts from the beginning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from varuna_core.data import text
from varuna_core.data.errors import DataError
from varuna_core.data.indexed import bin_path, idx_path, write_index
from varuna_core.data.text import Block, TextPosition
from varuna_core.data.vocabulary import (
    Encoder,
    Kind,
    VocabularyFiles,
    open_encoder,
    train_bpe,
    train_whitespace,
)
from varuna_core.data.workers import Encoded, EncodingTask, encode_blocks
from varuna_core.records.files import read_json, write_json

FILES = ("tokens.bin", "lengths.i4", "counts.i4")
JOURNAL = "journal.json"
PUBLIC_FILE = 0o644


@dataclass(kw_only=True)
class Journal:
    """Progress of the work, as stored on disk."""

    key: str
    """Digest of everything that the output depends on."""
    file: int = 0
    """Index of the input file to continue with."""
    place: TextPosition = TextPosition()  # noqa: RUF009 - frozen
    sizes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Valid bytes of the three files."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of documents, tokens and so on, for the summary."""


class PartFolder:
    """Folder of unfinished output; `commit` makes data permanent, `finish` renames the files."""

    def __init__(self, prefix: str, key: str) -> None:
        self.prefix = prefix
        self.path = Path(f"{prefix}.part")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take()
        found = _read_journal(self.path / JOURNAL, key)
        if found is None:
            self._empty()
        self.is_resumed = found is not None
        self.journal = found or Journal(key=key)
        sizes = self.journal.sizes
        self._files = [self._open(name, good) for name, good in zip(FILES, sizes, strict=True)]
        write_json(self.path / JOURNAL, asdict(self.journal), PUBLIC_FILE)

    def _take(self) -> int:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DataError(
                f"{self.path} is in use: another `prepare` writes {self.prefix}"
            ) from None
        except OSError:
            pass  # a file system without locks
        return fd

    def _empty(self) -> None:
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _open(self, name: str, size: int) -> BinaryIO:
        file = open(self.path / name, "ab")  # noqa: SIM115 - closed by close()
        file.truncate(size)
        return file

    def append(
        self,
        data: tuple[bytes, bytes, bytes],
        file: int,
        place: TextPosition,
        counts: dict[str, int],
    ) -> None:
        """Append to the three files; the one assignment at the end makes this safe from Ctrl-C."""
        for handle, more in zip(self._files, data, strict=True):
            handle.write(more)
        sizes = [old + len(more) for old, more in zip(self.journal.sizes, data, strict=True)]
        self.journal = Journal(
            key=self.journal.key, file=file, place=place, sizes=sizes, counts=dict(counts)
        )

    def commit(self) -> None:
        """Make the data so far permanent; interrupted work continues from here."""
        for handle in self._files:
            handle.flush()
            os.fsync(handle.fileno())
        write_json(self.path / JOURNAL, asdict(self.journal), PUBLIC_FILE)

    def close(self) -> None:
        """Close the files; bytes that were not committed may be torn, and are cut off later."""
        for handle in self._files:
            with contextlib.suppress(OSError):
                handle.close()
        os.close(self._lock)

    def finish(self, dtype: np.dtype[Any], others: dict[str, Path]) -> None:
        """Rename everything to its final name; `others` maps files of this folder to their targets.

        The old index is removed first and the new one comes last, since a reader needs both files.
        """
        lengths = np.fromfile(self.path / FILES[1], "<i4")
        counts = np.fromfile(self.path / FILES[2], "<i4")
        documents = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        index = self.path / "index"
        with open(index, "wb") as file:
            write_index(file, dtype, lengths, documents)
            file.flush()
            os.fsync(file.fileno())
        idx_path(self.prefix).unlink(missing_ok=True)
        for name, path in others.items():
            os.replace(self.path / name, path)
        os.replace(self.path / FILES[0], bin_path(self.prefix))
        os.replace(index, idx_path(self.prefix))
        _sync_folder(self.path.parent)
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def discard(self) -> None:
        """Delete the folder and everything in it."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _read_journal(path: Path, key: str) -> Journal | None:
    found = read_json(path)
    try:
        journal = Journal(**{**found, "place": TextPosition(**found["place"])})
        sizes = [(path.parent / name).stat().st_size for name in FILES]
    except (TypeError, KeyError, OSError):
        return None
    is_whole = all(there >= good for there, good in zip(sizes, journal.sizes, strict=True))
    return journal if journal.key == key and is_whole else None


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(fd)
    finally:
        os.close(fd)


FORMAT = 1
"""Format of the part folder; work in another format starts anew."""
COMMIT_EVERY_S = 10.0
NAMED_BAD = 5
Show = Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Inputs and options of a preparation."""

    inputs: tuple[Path, ...]
    output: str
    """Prefix of the output; `_KEY_document` or `_KEY_sentence` is added."""
    kind: Kind
    vocab: Path | None = None
    merges: Path | None = None
    train: int | None = None
    """Size of the vocabulary to train, instead of a given one."""
    train_bytes: int = 1_000_000_000
    """Bytes of text to train on, in equal shares from the start of each input."""
    key: str = "text"
    append_eod: bool = False
    split_sentences: bool = False
    keep_newlines: bool = False
    skip_bad: bool = False
    again: bool = False
    num_processes: int = 1
    block_bytes: int = text.BLOCK_BYTES

    @property
    def prefix(self) -> str:
        level = "sentence" if self.split_sentences else "document"
        return f"{self.output}_{self.key}_{level}"

    @property
    def trained(self) -> dict[str, Path]:
        """Final paths of the files of a vocabulary trained here."""
        if self.train is None:
            return {}
        names = ("vocab.json", "merges.txt") if self.kind == "bpe" else ("vocab.json",)
        return {name: Path(f"{self.output}-{name}") for name in names}


def prepare(settings: Settings, say: Callable[[str], None], show: Show) -> dict[str, Any]:
    """Make the .bin/.idx pair, and return a summary. `say` gets notes, `show` the bytes done and a
    note."""
    sizes = _check(settings)
    part = PartFolder(settings.prefix, _make_key(settings))
    try:
        if part.is_resumed and part.journal.sizes[0]:
            at = f"{settings.inputs[part.journal.file]}, line {part.journal.place.line:,}"
            say(f"going on from {at}")
        files = _choose_vocabulary(settings, part, say)
        encoder = open_encoder(files)
        counts = _encode_all(settings, files, part, sizes, say, show)
    except OSError as error:
        _leave(part)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{part.path}: {error.strerror}. Free some space, then run the same command: it "
            "continues from there"
        ) from None
    except BaseException:
        _leave(part)
        raise
    if not counts["documents"]:
        part.discard()
        raise DataError(f"there is no document in {_list(settings.inputs)}")
    try:
        part.finish(encoder.dtype, settings.trained)
    except OSError as error:
        part.close()
        raise DataError(
            f"{error.filename or part.path}: {error.strerror}; run the same command to continue"
        ) from None
    return _summarise(settings, counts, encoder)


def _check(settings: Settings) -> list[int]:
    """Refuse unusable settings before anything is written; return the sizes of the inputs."""
    if not settings.inputs:
        raise DataError("give at least one input file")
    sizes = []
    for path in settings.inputs:
        if path.is_dir():
            raise DataError(f"{path} is a folder; give its files, such as {path}/*.jsonl")
        try:
            sizes.append(path.stat().st_size)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None
        if not path.is_file():
            raise DataError(f"{path} is not a regular file: after a stop it cannot be read again")
    if (settings.vocab is None) == (settings.train is None):
        raise DataError("give either --vocab FILE or --train N")
    if settings.train is not None and settings.kind.startswith("wordpiece"):
        raise DataError("--train makes bpe and whitespace vocabularies; wordpiece needs --vocab")
    if settings.keep_newlines and not settings.split_sentences:
        raise DataError("--keep-newlines is about sentences: it needs --split-sentences")
    if not settings.again:
        finals = (idx_path(settings.prefix), bin_path(settings.prefix), *settings.trained.values())
        for path in finals:
            if path.exists():
                raise DataError(f"{path} already exists; --again replaces it")
    return sizes


def _make_key(settings: Settings) -> str:
    """Return a digest of everything that the output depends on."""
    stats = [(str(path.absolute()), path.stat()) for path in settings.inputs]
    given = settings.vocab and VocabularyFiles(
        kind=settings.kind, vocab=settings.vocab, merges=settings.merges
    )
    parts = [
        FORMAT,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        settings.kind,
        given.digest() if given else [settings.train, settings.train_bytes],
        settings.key,
        settings.append_eod,
        settings.split_sentences,
        settings.keep_newlines,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _choose_vocabulary(
    settings: Settings, part: PartFolder, say: Callable[[str], None]
) -> VocabularyFiles:
    """Return the given vocabulary files, or those trained in the part folder now or earlier."""
    if settings.vocab is not None:
        return VocabularyFiles(kind=settings.kind, vocab=settings.vocab, merges=settings.merges)
    assert settings.train is not None
    work = part.path / "training"
    paths = [part.path / name for name in settings.trained]
    if not all(path.exists() for path in paths):
        say(f"training a vocabulary of {settings.train:,}")
        work.mkdir(exist_ok=True)
        train = train_bpe if settings.kind == "bpe" else train_whitespace
        train(_read_texts(settings), settings.train, work)
        for path in paths:
            (work / path.name).replace(path)
        work.rmdir()
    merges = part.path / "merges.txt" if settings.kind == "bpe" else None
    return VocabularyFiles(kind=settings.kind, vocab=part.path / "vocab.json", merges=merges)


def _read_texts(settings: Settings) -> Iterator[str]:
    """Yield documents to train on; invalid lines are skipped here and reported later."""
    share = settings.train_bytes // len(settings.inputs)
    for path in settings.inputs:
        form = text.guess_format(path)
        for block in text.read_blocks(path, block_bytes=settings.block_bytes):
            yield from text.read_documents(block, form, settings.key).texts
            if block.end.byte >= share:
                break


def _encode_all(
    settings: Settings,
    files: VocabularyFiles,
    part: PartFolder,
    sizes: Sequence[int],
    say: Callable[[str], None],
    show: Show,
) -> dict[str, int]:
    """Append every block after the journal's position; commit regularly and at the end."""
    names = ("documents", "sequences", "token_bytes", "bad", "blank", "empty")
    counts = dict.fromkeys(names, 0) | part.journal.counts
    work = EncodingTask(
        formats=tuple(text.guess_format(path) for path in settings.inputs),
        key=settings.key,
        files=files,
        append_eod=settings.append_eod,
        split_sentences=settings.split_sentences,
        keep_newlines=settings.keep_newlines,
    )
    before = [sum(sizes[:number]) for number in range(len(sizes))]
    # A worker takes longer to start than a block to encode.
    num_blocks = -(-sum(sizes) // settings.block_bytes)
    num_processes = max(1, min(settings.num_processes, num_blocks))
    blocks = _read_all(settings, part.journal.file, part.journal.place)
    last = time.monotonic()
    stream = encode_blocks(work, blocks, num_processes)
    try:
        for number, block, encoded in stream:
            _look_at_bad(settings, block, encoded, counts["bad"], say)
            _count(counts, encoded)
            data = (encoded.tokens, encoded.lengths, encoded.counts)
            part.append(data, number, block.end, counts)
            show(before[number] + block.raw_bytes, f"{counts['documents']:,} documents")
            if time.monotonic() - last > COMMIT_EVERY_S:
                part.commit()
                last = time.monotonic()
    finally:
        stream.close()  # an error must not leave the workers to the garbage collector
        part.commit()
    return counts


def _count(counts: dict[str, int], encoded: Encoded) -> None:
    counts["documents"] += len(encoded.counts) // 4
    counts["sequences"] += len(encoded.lengths) // 4
    counts["token_bytes"] += len(encoded.tokens)
    counts["bad"] += len(encoded.bad)
    counts["blank"] += encoded.num_blank
    counts["empty"] += encoded.num_empty


def _read_all(settings: Settings, first: int, place: TextPosition) -> Iterator[tuple[int, Block]]:
    for number in range(first, len(settings.inputs)):
        start = place if number == first else TextPosition()
        for block in text.read_blocks(settings.inputs[number], start, settings.block_bytes):
            yield number, block


def _look_at_bad(
    settings: Settings,
    block: Block,
    encoded: Encoded,
    num_before: int,
    say: Callable[[str], None],
) -> None:
    for number, (line, reason) in enumerate(encoded.bad, num_before):
        if not settings.skip_bad:
            raise DataError(
                f"{block.path}:{line}: {reason}. --skip-bad skips such lines and counts them"
            )
        if number < NAMED_BAD:
            say(f"{block.path}:{line}: skipped: {reason}")


def _leave(part: PartFolder) -> None:
    """Close the part folder, and delete it if there is nothing to continue from."""
    if part.journal.sizes[0] or any(part.path.glob("vocab.json")):
        part.close()
    else:
        part.discard()


def _summarise(settings: Settings, counts: dict[str, int], encoder: Encoder) -> dict[str, Any]:
    return {
        "prefix": settings.prefix,
        "documents": counts["documents"],
        "sequences": counts["sequences"],
        "tokens": counts["token_bytes"] // encoder.dtype.itemsize,
        "dtype": encoder.dtype.name,
        "vocabulary_size": encoder.size,
        "vocabulary": [str(path) for path in settings.trained.values()]
        or [str(path) for path in (settings.vocab, settings.merges) if path],
        "bad_lines": counts["bad"],
        "blank_lines": counts["blank"],
        "empty_documents": counts["empty"],
    }


def _list(paths: Sequence[Path]) -> str:
    shown = ", ".join(map(str, paths[:3]))
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
