"""Tensors as a rank gives them to a checkpoint, and how replicas share the writing of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from varuna_core.checkpoint.format.box import Box, split_range, whole
from varuna_core.checkpoint.format.manifest import TrainingState
from varuna_core.checkpoint.format.tensorfile import ITEM_BYTES

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


def name_dtype(dtype: torch.dtype, name: str) -> str:
    if dtype not in _WORDS:
        raise TypeError(f"{name!r} is {dtype}, which safetensors files do not hold")
    return _WORDS[dtype]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor, or the piece of it that this rank holds."""

    kind: str
    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which part of it this is."""
    dtype: str
    load: Callable[[], Tensor]
    """The piece itself, on any device; called when it is written."""

    @property
    def num_bytes(self) -> int:
        return self.box.volume * ITEM_BYTES[self.dtype]

    def cut(self, part: Box) -> Entry:
        """A part of it, counted from its own corner."""
        if part == whole(self.box.extent):
            return self
        load = self.load
        return replace(self, box=part.inside(self.box), load=lambda: load()[part.slices])


def make_entry(
    kind: str,
    name: str,
    tensor: Tensor,
    box: Box | None = None,
    shape: Sequence[int] | None = None,
) -> Entry:
    """Of a whole tensor, or of the piece `box` of one of `shape`; names its faults."""
    full = tuple(tensor.shape if shape is None else shape)
    box = box or whole(full)
    if box.extent != tuple(tensor.shape) or not box.fits(full):
        raise ValueError(
            f"{kind} {name!r}: a piece of {list(tensor.shape)} is not {box} of {list(full)}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{kind} {name!r} is not a plain dense tensor: {tensor.layout}")
    dtype = name_dtype(tensor.dtype, name)
    held = tensor.detach()
    return Entry(kind=kind, name=name, shape=full, box=box, dtype=dtype, load=lambda: held)


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """All that one rank adds to a checkpoint."""

    iteration: int
    segments: Mapping[int, Sequence[Entry]]
    """What it writes of each segment between cuts. Each element of each tensor is written by one
    rank: replicas that hold the same deal it out (`deal`), or one of them gives it."""
    shared: bool = False
    """Other ranks write parts of these segments too, in files of their own."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Of `take_state`, for every parameter that this rank gives state tensors of."""
    own: Any = None
    """Random states, and what else only this rank has."""
    state: TrainingState | None = None
    """On rank 0."""


def deal(
    segments: Mapping[int, Sequence[Entry]], num_shares: int, share: int
) -> dict[int, list[Entry]]:
    """The part of equal bytes that falls to one of `num_shares` replicas, which hold the same.

    All bytes in a row, cut at equal distances: at most a tensor at each end is cut in pieces, and
    most segments stay whole.
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
    """What lies between two places in its bytes; an element belongs to where its last byte is."""
    item = ITEM_BYTES[entry.dtype]
    count = prod(entry.box.extent)
    start, stop = (min(max(place, 0) // item, count) for place in (low, high))
    for box in split_range(entry.box.extent, start, stop):
        yield entry.cut(box)
