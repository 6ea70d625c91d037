"""Describe pieces of tensors as boxes: an offset and an extent in each dimension. Plain
arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

BLOCK_BYTES = 1 << 20
"""Approximate size of the block under one checksum: slices are read and checked in whole blocks."""


class Box(NamedTuple):
    """The elements of a tensor from `offset` on, `extent` of them in each dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + e) for o, e in zip(self.offset, self.extent, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes; None if they do not overlap."""
        if self == other:
            return self if all(self.extent) else None
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(min(a.stop, b.stop) for a, b in zip(self.slices, other.slices, strict=True))
        extent = tuple(h - o for o, h in zip(low, high, strict=True))
        return Box(low, extent) if all(e > 0 for e in extent) else None

    def seen_from(self, outer: Box) -> Box:
        """Return the same elements in coordinates that start at the corner of `outer`."""
        moved = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(moved, self.extent)

    def inside(self, outer: Box) -> Box:
        """Convert a box relative to the corner of `outer` to the coordinates in which `outer` is
        given."""
        moved = tuple(a + b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(moved, self.extent)

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.offset) == len(self.extent) and all(
            o >= 0 and e >= 0 and o + e <= size
            for o, e, size in zip(self.offset, self.extent, shape, strict=True)
        )

    def __str__(self) -> str:
        """Return the box as numpy writes it: [0:4,8:16]."""
        return "[" + ",".join(f"{s.start}:{s.stop}" for s in self.slices) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, kw_only=True)
class TensorShare:
    """A rank's share of a tensor, held as a tensor of its own."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    extent: tuple[int, ...]
    """Extent of the rank's own tensor."""

    pieces: tuple[tuple[Box, Box], ...]
    """Boxes of the whole tensor, each with its box in the rank's own tensor."""

    @property
    def is_whole(self) -> bool:
        return self.extent == self.shape


def split_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield elements start..stop of the flattened tensor as boxes, in order; each box is
    contiguous.

    There are at most two boxes for each dimension: the rest of a row, whole rows, the start of a
    row.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _within_row(shape, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _within_row(shape, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if stop % row:
        yield from _within_row(shape, last, 0, stop % row)


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in split_range(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.extent))


def count_block_rows(extent: Sequence[int], item_bytes: int) -> int:
    """Return the number of rows (of dimension 0) under one checksum."""
    return max(1, BLOCK_BYTES // max(1, prod(extent[1:]) * item_bytes))


def list_blocks(extent: Sequence[int], rows: int) -> list[Box]:
    """Return the blocks of a piece in its own coordinates; an empty list if it has no elements."""
    if not prod(extent):
        return []
    if not extent:
        return [Box((), ())]
    rest = tuple(extent[1:])
    return [
        Box((low, *(0,) * len(rest)), (min(rows, extent[0] - low), *rest))
        for low in range(0, extent[0], rows)
    ]


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return the reason why the boxes do not cover the tensor exactly once; None if they do."""
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return None
    for box in boxes:
        if not box.fits(shape):
            return f"{box} is outside a tensor of {list(shape)}"
    if not boxes:
        return "no rank wrote it"
    if not shape or not prod(shape):
        return None if len(boxes) == 1 else f"{len(boxes)} ranks wrote it"
    reaching: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        reaching = [other for other in reaching if other.slices[0].stop > box.offset[0]]
        for other in reaching:
            if box.intersect(other):
                return f"{other} and {box} were both written, but they overlap"
        reaching.append(box)
    missing = prod(shape) - sum(box.volume for box in boxes)
    return f"{missing} of its {prod(shape)} elements were written by no rank" if missing else None
