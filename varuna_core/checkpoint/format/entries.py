"""Describe the tensors that a rank adds to a checkpoint, and write them to a file.

Replicas divide the writing equally. Each byte of a file is written once, checksummed on the way,
and synced to the disk at the end."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import (
    BLOCK_BYTES,
    Box,
    count_block_rows,
    split_range,
    whole,
)
from varuna_core.checkpoint.format.document import READABLE, crc_text
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.format.manifest import (
    BUFFER,
    WEIGHT,
    HeldFile,
    Piece,
    TrainingState,
)
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES, lay_out

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
MOST_BLOCKS = 512
"""Blocks per write call; the kernel accepts 1024 at once."""


def name_dtype(dtype: torch.dtype, name: str) -> str:
    if dtype not in _WORDS:
        raise TypeError(f"{name!r} has type {dtype}, which safetensors does not support")
    return _WORDS[dtype]


class Entry(NamedTuple):
    """A tensor, or the piece of it that this rank holds."""

    kind: str
    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """The part of the tensor that this entry holds."""
    dtype: str
    load: Callable[[], Tensor]
    """Function that returns the piece, on any device; called when the piece is written."""

    @property
    def num_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]

    def cut(self, part: Box) -> Entry:
        """Return an entry for a part of this one; `part` is in the entry's own coordinates."""
        if part == whole(self.box.extent):
            return self
        load = self.load
        return self._replace(box=part.inside(self.box), load=lambda: load()[part.slices])


def make_entry(
    kind: str,
    name: str,
    tensor: Tensor,
    box: Box | None = None,
    shape: Sequence[int] | None = None,
) -> Entry:
    """Make an entry of a whole tensor, or of the piece `box` of a tensor with shape `shape`; raise
    an error that names the tensor if it cannot be stored."""
    extent = tuple(tensor.shape)
    full = extent if shape is None else tuple(shape)
    is_piece = box is not None
    box = box or whole(full)
    if box.extent != extent or (is_piece and not box.fits(full)):
        raise ValueError(
            f"{kind} {name!r}: a shard of {list(tensor.shape)} is not {box} of {list(full)}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        hint = "; register_buffer(..., persistent=False) excludes it" if kind == BUFFER else ""
        raise TypeError(f"{kind} {name!r} is not a plain dense tensor: {tensor.layout}{hint}")
    dtype = name_dtype(tensor.dtype, name)
    return Entry(kind, name, full, box, dtype, tensor.detach)


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """All that one rank adds to a checkpoint."""

    iteration: int
    segments: Mapping[int, Sequence[Entry]]
    """The entries that this rank writes, by segment between cuts. Each element of a tensor is
    written by one rank: replicas with equal tensors divide these (`deal`), or one replica writes
    all."""
    shared: bool = False
    """True if other ranks write parts of these segments too, to files of their own."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Result of `take_state` for every parameter for which this rank has state tensors."""
    own: Any = None
    """Random states and other state that only this rank has."""
    state: TrainingState | None = None
    """State that all ranks agree on; set on rank 0 only."""


def deal(
    segments: Mapping[int, Sequence[Entry]], num_shares: int, share: int
) -> dict[int, list[Entry]]:
    """Return share number `share` of equal bytes, for one of `num_shares` replicas with equal
    tensors.

    All bytes are laid end to end and cut at equal distances: a share has at most one cut tensor at
    each end, and most segments stay whole.
    """
    total = sum(entry.num_bytes for entries in segments.values() for entry in entries)
    low, high = total * share // num_shares, total * (share + 1) // num_shares
    dealt: dict[int, list[Entry]] = {}
    at = 0
    for segment, entries in segments.items():
        for entry in entries:
            held = dealt.setdefault(segment, [])
            if not entry.num_bytes:
                held += [entry] if share == 0 else []
            else:
                held += _cut_run(entry, low - at, high - at)
            at += entry.num_bytes
    return {segment: entries for segment, entries in dealt.items() if entries}


def _cut_run(entry: Entry, low: int, high: int) -> Iterator[Entry]:
    """Yield the elements between two byte offsets; an element counts where its last byte is."""
    item = ITEM_BYTES[entry.dtype]
    count = prod(entry.box.extent)
    start, stop = (min(max(place, 0) // item, count) for place in (low, high))
    for box in split_range(entry.box.extent, start, stop):
        yield entry.cut(box)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor of any type, which lives as long as the view;
    numpy is not used because torch may be installed without it."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor
    return memoryview(memory).cast("B")


def key_of(entry: Entry) -> str:
    """Return the entry's key in the safetensors header: the plain name, for other tools."""
    plain = entry.kind in (WEIGHT, BUFFER)
    part = "" if entry.box == whole(entry.shape) else str(entry.box)
    return (entry.name if plain else f"{entry.kind}/{entry.name}") + part


def write_file(
    path: Path, entries: Sequence[Entry], notes: dict[str, str], beside: Executor
) -> Future[HeldFile]:
    """Write a new file of these entries; `beside` computes the checksums and syncs the file.

    Small tensors are checksummed and written many at a time. At most one tensor and two such
    batches are copied to CPU memory; contiguous CPU tensors are not copied.
    """
    # Each kind by itself, as they are read.
    entries = sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.kind))
    head, starts = lay_out([(key_of(e), e.dtype, e.box.extent) for e in entries], notes)
    all_rows = [count_block_rows(e.box.extent, ITEM_BYTES[e.dtype]) for e in entries]
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, READABLE)
    except FileExistsError as error:
        raise CheckpointError(
            f"{path} already exists: two ranks write it (set shared=True in both), or an "
            "earlier start had the same job name"
        ) from error
    try:
        with _named(path):
            _write_all(fd, [memoryview(head)])
            counts, begun = _write_tensors(fd, entries, all_rows, beside)
            size = os.fstat(fd).st_size
    except BaseException:
        os.close(fd)
        raise

    def land() -> HeldFile:
        try:
            with _named(path):
                os.fsync(fd)
        finally:
            os.close(fd)
        checks = iter([check for batch in begun for check in batch.result()])
        pieces = tuple(
            Piece(
                e.kind, e.name, e.dtype, e.shape, e.box, start, rows, tuple(islice(checks, count))
            )
            for e, start, rows, count in zip(entries, starts, all_rows, counts, strict=True)
        )
        return HeldFile(size=size, head=crc_text(head), pieces=pieces)

    return beside.submit(land)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def _write_tensors(
    fd: int, entries: Sequence[Entry], all_rows: Sequence[int], beside: Executor
) -> tuple[list[int], list[Future[list[str]]]]:
    """Write the tensors; return the number of checksums of each, and all checksums in batches."""
    counts: list[int] = []
    begun: list[Future[list[str]]] = []
    batch: list[memoryview] = []

    def write() -> None:
        if begun[1:]:
            begun[-2].result()
        begun.append(beside.submit(_compute_checks, tuple(batch)))
        _write_all(fd, batch)

    size = 0
    for entry, rows in zip(entries, all_rows, strict=True):
        data = view_bytes(_take(entry))
        step = rows * prod(entry.box.extent[1:]) * ITEM_BYTES[entry.dtype]
        counts.append(-(-len(data) // max(1, step)))
        for low in range(0, len(data), max(1, step)):
            batch.append(data[low : low + step])
            size += len(batch[-1])
            if size >= BLOCK_BYTES or len(batch) == MOST_BLOCKS:
                write()
                size = 0
    write()
    return counts, begun


def _take(entry: Entry) -> Tensor:
    tensor = entry.load().detach().cpu().contiguous()
    if tensor.shape != entry.box.extent or tensor.element_size() != ITEM_BYTES[entry.dtype]:
        raise CheckpointError(
            f"{entry.kind} {entry.name!r} has changed its shape since the save began"
        )
    return tensor


def _compute_checks(blocks: Sequence[memoryview]) -> list[str]:
    return [crc_text(block) for block in blocks]


def _write_all(fd: int, blocks: list[memoryview]) -> None:
    """Write all blocks, and remove them from the list."""
    while blocks:
        written = os.writev(fd, blocks)
        while blocks and written >= len(blocks[0]):
            written -= len(blocks.pop(0))
        if written:
            blocks[0] = blocks[0][written:]
