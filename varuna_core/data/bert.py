"""Read samples for a BERT: two parts of sentences, masked tokens, and a label that says if the
second part follows the first.

    [CLS] first part [SEP] second part [SEP] [PAD] ...        types 0 ... 0 1 ... 1 0 ...

Sample k depends only on (files, split, sequence, seed) and k: it is a row of the epoch's order,
with random numbers of its own stream. RandomState, whose streams numpy has frozen, is used
throughout, so that a newer numpy continues in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError
from varuna_core.data.indexed import TokenFile, open_tokens
from varuna_core.data.split import check_order, split_documents
from varuna_core.data.vocabulary import read_vocab_lines

Array = npt.NDArray[Any]
SHORT_SHARE = 0.1
"""The share of samples that are packed to a random shorter length, as in BERT."""
MASK_SHARE = 0.15
LONGEST_SENTENCE = 512
"""Documents with a longer sentence are skipped, as in Megatron: they are tables and lists."""
NO_LABEL = -1
_ORDER, _SAMPLE = 1, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The tokens of a WordPiece vocabulary that masking needs."""

    size: int
    cls: int
    sep: int
    mask: int
    pad: int


def read_pieces(path: Path) -> Pieces:
    """Read the tokens that masking needs from BERT's vocab.txt."""
    words = read_vocab_lines(path)
    missing = [name for name in ("[CLS]", "[SEP]", "[MASK]", "[PAD]") if name not in words]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)}, so it is not a BERT vocabulary")
    return Pieces(
        size=max(words.values()) + 1,
        cls=words["[CLS]"],
        sep=words["[SEP]"],
        mask=words["[MASK]"],
        pad=words["[PAD]"],
    )


def build_pairs(tokens: TokenFile, documents: range, *, room: int, seed: int) -> Array:
    """Cut documents into runs of two or more sentences: rows (first sentence, end, target length).

    A run ends when it has reached its target and two or more sentences are left for the next, or
    with its document (Megatron's rule). Documents of one sentence have no pair.
    """
    random = np.random.RandomState(_words(seed, _ORDER))
    starts = np.concatenate(([0], np.cumsum(tokens.lengths, dtype=np.int64)))
    num_long = np.concatenate(([0], np.cumsum(tokens.lengths > LONGEST_SENTENCE)))
    borders = tokens.documents[documents.start : documents.stop + 1].tolist()
    rows: list[tuple[int, int, int]] = []
    for begin, end in pairwise(borders):
        if end - begin < 2 or num_long[end] > num_long[begin]:
            continue
        while begin < end:
            is_short = random.random_sample() < SHORT_SHARE
            target = int(random.randint(2, room + 1)) if is_short else room
            reached = bisect_left(starts, starts[begin] + target, begin, end)
            stop = max(reached, begin + 2)
            if end - stop < 2:
                stop = end
            rows.append((begin, stop, target))
            begin = stop
    return np.array(rows, np.int64).reshape(-1, 3)


class BertSamples:
    """Samples of one part of a data set made with --split-sentences, in training order; endless."""

    def __init__(
        self,
        tokens: TokenFile,
        part: str,
        documents: range,
        pieces: Pieces,
        *,
        sequence: int,
        seed: int,
    ) -> None:
        if sequence < 8:
            raise DataError(
                f"sequence length {sequence} is too short for two segments and three special tokens"
            )
        self.tokens = tokens
        self.part = part
        self.documents = documents
        self.pieces = pieces
        self.sequence = sequence
        self.seed = seed
        self.rows = build_pairs(tokens, documents, room=sequence - 3, seed=seed)
        if len(self.rows) < 2:
            raise DataError(
                f"{tokens.prefix} ({part}) has too few documents: its {len(documents):,} give "
                f"{len(self.rows)} pairs of sentences, but two are needed. Was it prepared with "
                "--split-sentences?"
            )
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def read(self, number: int) -> dict[str, Array]:
        """Return text, types, labels (-1 for tokens not to predict), padding_mask, is_random."""
        random = np.random.RandomState(_words(self.seed, _SAMPLE, number))
        row = self._locate_row(number)
        begin, end, target = self.rows[row].tolist()
        middle = int(random.randint(begin + 1, end))
        first = self._read_run(begin, middle)
        is_random = bool(random.randint(2))
        if is_random:
            other = (row + int(random.randint(1, len(self.rows)))) % len(self.rows)
            other_begin, other_end, _ = self.rows[other].tolist()
            second = self._read_run(int(random.randint(other_begin + 1, other_end)), other_end)
        else:
            second = self._read_run(middle, end)
        first, second = _trim(first, second, max(target, 2), random)
        return self._lay_out(first, second, is_random, random)

    def _locate_row(self, number: int) -> int:
        epoch, place = divmod(number, len(self.rows))
        if epoch != self._epoch:
            random = np.random.RandomState(_words(self.seed, _ORDER, epoch))
            self._order, self._epoch = random.permutation(len(self.rows)), epoch
        return int(self._order[place])

    def _read_run(self, begin: int, end: int) -> Array:
        return np.concatenate([self.tokens.read(i) for i in range(begin, end)]).astype(np.int64)

    def _lay_out(
        self, first: Array, second: Array, is_random: bool, random: np.random.RandomState
    ) -> dict[str, Array]:
        pieces, size = self.pieces, self.sequence
        marks = np.array([pieces.cls]), np.array([pieces.sep])
        joined = np.concatenate((marks[0], first, marks[1], second, marks[1]))
        length, border = len(joined), len(first) + 2
        text = np.full(size, pieces.pad, np.int64)
        text[:length] = joined
        types = np.zeros(size, np.int64)
        types[border:length] = 1
        labels = np.full(size, NO_LABEL, np.int64)
        places = np.concatenate((np.arange(1, border - 1), np.arange(border, length - 1)))
        wanted = max(1, round(MASK_SHARE * len(places)))
        chosen = np.sort(random.permutation(places)[:wanted])
        labels[chosen] = text[chosen]
        draw = random.random_sample(len(chosen))
        text[chosen[draw < 0.8]] = pieces.mask
        changed = chosen[draw >= 0.9]
        text[changed] = random.randint(0, pieces.size, len(changed))
        padding = np.zeros(size, np.int64)
        padding[:length] = 1
        return {
            "text": text,
            "types": types,
            "labels": labels,
            "padding_mask": padding,
            "is_random": np.array(int(is_random), np.int64),
        }

    def read_batch(self, numbers: Iterable[int]) -> dict[str, Array]:
        """Return the arrays of several samples, with one row for each sample."""
        rows = [self.read(number) for number in numbers]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]} if rows else {}

    def state(self) -> dict[str, Any]:
        """Return the settings that fix the order of samples, as JSON values for a checkpoint."""
        return {
            "part": self.part,
            "sequence": self.sequence,
            "seed": self.seed,
            "documents": [self.documents.start, self.documents.stop],
            "lengths": self.tokens.digest(),
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raise an error if a checkpoint was made with another order of samples."""
        check_order(f"{self.tokens.prefix} ({self.part})", saved, self.state())


def _trim(first: Array, second: Array, room: int, random: np.random.RandomState) -> Any:
    """Shorten two parts, the longer one first, at randomly chosen ends, until both fit."""
    size_first = min(len(first), max(room - len(second), (room + 1) // 2))
    size_second = min(len(second), room - size_first)
    return _cut(first, size_first, random), _cut(second, size_second, random)


def _cut(part: Array, size: int, random: np.random.RandomState) -> Array:
    begin = int(random.binomial(len(part) - size, 0.5))
    return part[begin : begin + size]


def _words(*numbers: int) -> list[int]:
    """Split numbers of 64 bits into the 32-bit words that seed a stream."""
    return [word for n in numbers for word in (n & 0xFFFFFFFF, (n >> 32) & 0xFFFFFFFF)]


def open_bert(
    prefix: str,
    part: str,
    vocab: Path,
    *,
    split: str,
    sequence: int,
    seed: int,
) -> BertSamples:
    """Open one part of a data set, split by documents."""
    tokens = open_tokens(prefix)
    documents = split_documents(split, tokens.num_documents)[part]
    pieces = read_pieces(vocab)
    largest = int(tokens.tokens.max()) if len(tokens.tokens) else 0
    if largest >= pieces.size:
        raise DataError(f"{prefix} has token {largest}, but {vocab} has only {pieces.size} tokens")
    return BertSamples(tokens, part, documents, pieces, sequence=sequence, seed=seed)
