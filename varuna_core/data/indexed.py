"""Read and write Megatron's `.bin/.idx` pairs (version 1), through memory maps.

prepare.py writes a pair under temporary names; this module has the byte layout. The older TNTIDX
layout, other versions and files shorter than their index says are refused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from varuna_core.data.errors import DataError

MAGIC = b"MMIDIDX\0\0"
OLD_MAGIC = b"TNTIDX"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Types by their codes in the header. Codes 6 and 7 are floats, which cannot be tokens."""
SMALL_VOCABULARY = 65500
"""Below this vocabulary size, Megatron stores uint16."""
MAX_SEQUENCE = 2**31 - 1

Array = npt.NDArray[Any]


def choose_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the token type that Megatron chooses for a vocabulary of this size."""
    return DTYPES[8] if vocabulary_size < SMALL_VOCABULARY else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def write_index(file: BinaryIO, dtype: np.dtype[Any], lengths: Array, documents: Array) -> None:
    """Write an `.idx` file.

    `documents` holds the index of each document's first sequence, and the number of sequences.
    """
    (code,) = (code for code, known in DTYPES.items() if known == dtype)
    offsets = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1].astype(np.int64) * dtype.itemsize, out=offsets[1:])
    file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
    for array, kind in ((lengths, "<i4"), (offsets, "<i8"), (documents, "<i8")):
        file.write(np.ascontiguousarray(array, kind).data)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open .bin/.idx pair: sequence i is `lengths[i]` tokens from byte `offsets[i]` on."""

    prefix: str
    dtype: np.dtype[Any]
    lengths: Array
    offsets: Array
    documents: Array
    """Index of each document's first sequence, then the number of sequences."""
    tokens: Array

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def digest(self) -> str:
        """Return a checksum of the lengths, which differ for a data set of other text."""
        return hashlib.sha256(self.lengths.data).hexdigest()[:16]

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> Array:
        """Return tokens `start` to `stop` of a sequence, as a view of the file."""
        first = int(self.offsets[sequence]) // self.dtype.itemsize
        length = int(self.lengths[sequence])
        stop = length if stop is None else min(stop, length)
        view: Array = self.tokens[first + start : first + stop]
        return view


def open_tokens(prefix: str | Path) -> TokenFile:
    """Map `prefix`.bin and .idx, and check that they match."""
    bin_file, idx_file = bin_path(prefix), idx_path(prefix)
    if not idx_file.exists() and str(prefix).endswith((".bin", ".idx")):
        raise DataError(f"{prefix}: give the path without .bin or .idx: {str(prefix)[:-4]}")
    for path in (idx_file, bin_file):
        if not path.is_file():
            raise DataError(f"{path} does not exist; `vjob data prepare` makes it from text")
    code, num_sequences, num_entries = _read_header(idx_file)
    dtype = DTYPES[code]
    raw = np.memmap(idx_file, mode="r")
    lengths_end = HEADER.size + 4 * num_sequences
    offsets_end = lengths_end + 8 * num_sequences
    lengths = raw[HEADER.size : lengths_end].view("<i4")
    offsets = raw[lengths_end:offsets_end].view("<i8")
    documents = raw[offsets_end : offsets_end + 8 * num_entries].view("<i8")
    size = bin_file.stat().st_size
    _check_contents(idx_file, bin_file, size, dtype, lengths, offsets, documents)
    tokens = np.memmap(bin_file, mode="r") if size else np.zeros(0, np.uint8)
    whole = size // dtype.itemsize * dtype.itemsize
    return TokenFile(str(prefix), dtype, lengths, offsets, documents, tokens[:whole].view(dtype))


def _read_header(path: Path) -> tuple[int, int, int]:
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(OLD_MAGIC):
        raise DataError(
            f"{path} has the lazy/cached layout of old Megatron (TNTIDX), which no current program "
            "reads; prepare the text again (there: --dataset-impl mmap)"
        )
    if not head.startswith(MAGIC[: len(head)]) or not head:
        raise DataError(f"{path} is not a token index: it begins with {head[:9]!r}, not {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(f"{path} is cut short: {len(head)} bytes, not even a header; copy it again")
    _, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path} has version {version}; this program reads version {VERSION}")
    if code not in DTYPES:
        kind = "floating point numbers" if code in (6, 7) else f"unknown code {code}"
        raise DataError(f"{path} has tokens of type {kind}, but whole numbers are needed")
    needed = HEADER.size + 12 * num_sequences + 8 * num_entries
    size = path.stat().st_size
    if size < needed:
        raise DataError(
            f"{path} is cut short: {num_sequences:,} sequences and {num_entries:,} document "
            f"entries need {needed:,} bytes, but it has {size:,}; copy it again"
        )
    return code, num_sequences, num_entries


def _check_contents(
    idx_file: Path,
    bin_file: Path,
    size: int,
    dtype: np.dtype[Any],
    lengths: Array,
    offsets: Array,
    documents: Array,
) -> None:
    """Raise an error for a truncated copy, or for two files that do not match."""
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths):
        raise DataError(f"{idx_file} is damaged: its documents do not cover its sequences")
    if np.any(documents[1:] < documents[:-1]):
        raise DataError(f"{idx_file} is damaged: its documents are out of order")
    if not len(lengths):
        return
    if int(lengths.min()) < 0 or int(offsets.min()) < 0 or np.any(offsets % dtype.itemsize):
        raise DataError(f"{idx_file} is damaged: it has impossible lengths or offsets")
    needed = int((offsets + lengths.astype(np.int64) * dtype.itemsize).max())
    if size < needed:
        raise DataError(
            f"{bin_file} is cut short: {idx_file.name} needs {needed:,} bytes of it, but it has "
            f"{size:,}. Either it was not copied whole, or the two files do not belong together: "
            "copy or prepare both again"
        )
