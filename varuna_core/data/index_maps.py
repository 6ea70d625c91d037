"""Build and check the three index maps of a GPT data set by Megatron's rules, in vectorised numpy.

    documents of the split, tiled over e epochs, shuffled     document index   d7 d2 d9 d4 ...
    their tokens end to end, cut every `sequence` tokens      sample index     (document, offset)
    the order in which samples are taken                      shuffle index    s4 s0 s7 ...

Sample i is the sequence + 1 tokens from row shuffle[i] to row shuffle[i] + 1 inclusive: neighbours
share a token, the label of one and the input of the next. If less than 80 % of the last epoch's
samples are needed, this epoch is shuffled separately, so that it is not mixed with the earlier
epochs. One RandomState shuffles documents first, then samples.

On disk they have the names that Megatron gave them until May 2023:
`PREFIX_train_indexmap_1600ns_1024sl_1234s_doc_idx.npy` and so on. Existing maps are checked against
the data set and used; missing ones are built, and written if the folder is writable. A build takes
well under a second, so every rank that finds no maps builds its own, without waiting for another
rank's files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError

Array = npt.NDArray[Any]
SEPARATE_BELOW = 0.80


@dataclass(frozen=True, eq=False)
class IndexMaps:
    document: Array
    sample: Array
    """Begin of each sample as (index into `document`, offset in that document), and the end of the
    last."""
    shuffle: Array

    @property
    def num_samples(self) -> int:
        """The number of samples, possibly more than asked for: the last epoch is not cut."""
        return len(self.shuffle)

    def digest(self) -> str:
        """Return a checksum of the order of documents and samples."""
        found = zlib.crc32(np.ascontiguousarray(self.document).data)
        return f"{zlib.crc32(np.ascontiguousarray(self.shuffle).data, found):08x}"


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Number of passes over the documents, and the samples that they give."""

    count: int
    tokens: int
    """Tokens in one epoch."""
    num_samples: int
    """Samples in all epochs."""
    num_before_last: int | None
    """Samples before the last epoch if that epoch is shuffled separately, else None."""


def count_epochs(tokens: int, num_samples: int, sequence: int) -> Epochs:
    """Return the fewest epochs that hold `num_samples` samples."""
    if tokens < 1:
        raise DataError("there are no tokens in these documents")
    count = max(1, -(-(num_samples * sequence + 1) // tokens))
    apart = None
    if count > 1:
        before = ((count - 1) * tokens - 1) // sequence
        per_epoch = (tokens - 1) // sequence
        if num_samples - before < int(SEPARATE_BELOW * per_epoch):
            apart = before
    total = (count * tokens - 1) // sequence
    return Epochs(count=count, tokens=tokens, num_samples=total, num_before_last=apart)


def build_maps(
    lengths: Array, documents: range, *, num_samples: int, sequence: int, seed: int
) -> IndexMaps:
    """Build the maps for `num_samples` samples of `sequence` + 1 tokens.

    `lengths` has all sequences of the file; `documents` are indices of sequences in it.
    """
    epochs = count_epochs(_count_tokens(lengths, documents), num_samples, sequence)
    numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
    random = np.random.RandomState(seed)
    document = build_document_index(
        numbers, epochs.count, random, is_last_apart=epochs.num_before_last is not None
    )
    sample = build_sample_index(lengths, document, sequence, epochs.num_samples)
    first = epochs.num_samples if epochs.num_before_last is None else epochs.num_before_last
    return IndexMaps(document, sample, build_shuffle_index(first, epochs.num_samples, random))


def _count_tokens(lengths: Array, documents: range) -> int:
    return int(lengths[documents.start : documents.stop].sum(dtype=np.int64))


def build_document_index(
    documents: Array, num_epochs: int, random: np.random.RandomState, *, is_last_apart: bool
) -> Array:
    if is_last_apart and num_epochs > 1:
        first = build_document_index(documents, num_epochs - 1, random, is_last_apart=False)
        last = build_document_index(documents, 1, random, is_last_apart=False)
        return np.concatenate((first, last))
    tiled: Array = np.tile(documents, num_epochs)
    random.shuffle(tiled)
    return tiled


def build_sample_index(lengths: Array, document: Array, sequence: int, num_samples: int) -> Array:
    """Build rows (document with token k * sequence, offset of that token in the document)."""
    starts = np.zeros(len(document) + 1, np.int64)
    np.cumsum(lengths[document], out=starts[1:])
    # int32 where Megatron has it: unless a number of documents does not fit.
    dtype = np.int32 if len(document) <= np.iinfo(np.int32).max else np.int64
    rows = np.empty((num_samples + 1, 2), dtype)
    positions = np.arange(num_samples + 1, dtype=np.int64) * sequence
    found = np.searchsorted(starts, positions, side="right") - 1
    found[0] = 0  # the first row is (0, 0) even if the first documents are empty
    rows[:, 0] = found
    np.subtract(positions, starts[found], out=rows[:, 1], casting="same_kind")
    return rows


def build_shuffle_index(num_first: int, num_samples: int, random: np.random.RandomState) -> Array:
    """Shuffle 0 ... num_samples - 1, separately within the first `num_first` and the rest."""
    dtype = np.int64 if num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    shuffle = np.arange(num_samples, dtype=dtype)
    random.shuffle(shuffle[:num_first])
    if num_first < num_samples:
        random.shuffle(shuffle[num_first:])
    return shuffle


def find_fault(
    maps: IndexMaps, lengths: Array, documents: range, *, num_samples: int, sequence: int
) -> str:
    """Return the reason why these maps do not belong to this data set; empty if they do.

    The maps may have been shuffled by other rules, so they are not compared with our own: the
    document index must hold every document equally often, the sample index must cut the tokens
    evenly, and the shuffle index must name every sample once.
    """
    document, sample, shuffle = maps.document, maps.sample, maps.shuffle
    if document.ndim != 1 or sample.ndim != 2 or sample.shape[1:] != (2,) or shuffle.ndim != 1:
        return "the arrays do not have the shapes of index maps"
    if any(array.dtype.kind not in "iu" for array in (document, sample, shuffle)):
        return "the arrays do not hold whole numbers"
    epochs = count_epochs(_count_tokens(lengths, documents), num_samples, sequence)
    if len(document) != epochs.count * len(documents):
        return (
            f"the document index has {len(document):,} entries, but {epochs.count:,} epochs of "
            f"{len(documents):,} documents are needed"
        )
    low, high = documents.start, documents.stop - 1
    if int(document.min()) < low or int(document.max()) > high:
        return f"the document index has documents outside {low} to {high}, those of this split"
    if np.any(np.bincount(document - low, minlength=high - low + 1) != epochs.count):
        return "the document index does not hold every document once per epoch"
    if len(sample) != epochs.num_samples + 1 or len(shuffle) != epochs.num_samples:
        return (
            f"there are {len(sample) - 1:,} samples and {len(shuffle):,} places in their order, "
            f"but these documents give {epochs.num_samples:,}"
        )
    starts = np.concatenate(([0], np.cumsum(lengths[document], dtype=np.int64)))
    rows = sample.astype(np.int64)
    if int(rows[:, 0].min()) < 0 or int(rows[:, 0].max()) >= len(document):
        return "the sample index points outside the document index"
    wanted = np.arange(len(rows), dtype=np.int64) * sequence
    if np.any(starts[rows[:, 0]] + rows[:, 1] != wanted):
        return f"the sample index does not cut the tokens of these documents every {sequence:,}"
    if len(shuffle) and (
        int(shuffle.min()) < 0
        or int(shuffle.max()) >= len(shuffle)
        or np.any(np.bincount(shuffle.astype(np.int64)) != 1)
    ):
        return "the shuffle index does not name every sample once"
    return ""


log = logging.getLogger(__name__)
PARTS = ("doc_idx", "sample_idx", "shuffle_idx")


def name_maps(
    prefix: str, part: str, *, num_samples: int, sequence: int, seed: int
) -> tuple[Path, Path, Path]:
    """Return the paths of a part's (train, valid, test) document, sample and shuffle index."""
    stem = f"{prefix}_{part}_indexmap_{num_samples}ns_{sequence}sl_{seed}s"
    document, sample, shuffle = (Path(f"{stem}_{kind}.npy") for kind in PARTS)
    return document, sample, shuffle


def load_or_build(
    prefix: str,
    part: str,
    lengths: Array,
    documents: range,
    *,
    num_samples: int,
    sequence: int,
    seed: int,
    may_write: bool = True,
) -> IndexMaps:
    """Read the maps of a part of the data set `prefix`, or build and, if possible, write them."""
    paths = name_maps(prefix, part, num_samples=num_samples, sequence=sequence, seed=seed)
    if all(path.is_file() for path in paths):
        maps = IndexMaps(*(_read(path) for path in paths))
        fault = find_fault(maps, lengths, documents, num_samples=num_samples, sequence=sequence)
        if fault:
            raise DataError(
                f"{paths[0]} and its two companions are not the index maps of {prefix} with "
                f"this split: {fault}. Remove the three files, so that they are built again"
            )
        return maps
    maps = build_maps(lengths, documents, num_samples=num_samples, sequence=sequence, seed=seed)
    if may_write:
        _write_all(paths, maps)
    return maps


def _read(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}. Remove it to build it again") from None
    return array


def _write_all(paths: tuple[Path, Path, Path], maps: IndexMaps) -> None:
    """Write the maps; ranks that do so at once write the same. A failed write is only logged."""
    try:
        for path, array in zip(paths, (maps.document, maps.sample, maps.shuffle), strict=True):
            write_array(path, array)
    except OSError as error:
        log.warning("index maps are not stored: %s: %s", error.filename or paths[0], error.strerror)


def write_array(path: Path, array: Array) -> None:
    """Write an .npy file that appears whole or not at all."""
    fd, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
