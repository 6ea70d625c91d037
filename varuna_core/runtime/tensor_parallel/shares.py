"""Describe a rank's shard of a tensor, as boxes of the whole tensor, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import Tensor

from varuna_core.checkpoint.format.box import Box, TensorShare, whole
from varuna_core.checkpoint.format.entries import Entry
from varuna_core.checkpoint.format.errors import CheckpointError
from varuna_core.checkpoint.store.reader import WantedTensor


def compute_share(shape: Sequence[int], dim: int, held: Sequence[int]) -> TensorShare:
    """Return the shard that consists of the indices `held` along one dimension, in rank order."""
    shape = tuple(shape)

    def box(start: int, count: int, size: int) -> Box:
        full = whole((*shape[:dim], size, *shape[dim + 1 :]))
        offset = (*full.offset[:dim], start, *full.offset[dim + 1 :])
        return Box(offset, (*shape[:dim], count, *shape[dim + 1 :]))

    pieces, at = [], 0
    for start, count in _list_runs(held):
        pieces.append((box(start, count, shape[dim]), box(at, count, len(held))))
        at += count
    extent = (*shape[:dim], len(held), *shape[dim + 1 :])
    return TensorShare(shape=shape, extent=extent, pieces=tuple(pieces))


def _list_runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of consecutive indices."""
    start = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[start], at - start
            start = at


def _load(entry: Entry, part: Box) -> Tensor:
    return entry.load()[part.slices]


class Shares:
    """Shards of one rank, keyed by the tensor's name, of several the first; other tensors are
    not sharded."""

    def __init__(
        self,
        shares: Mapping[str, TensorShare] = MappingProxyType({}),
        leads: Mapping[str, str] = MappingProxyType({}),
        tensor_rank: int = 0,
    ) -> None:
        self.by_name, self.tensor_rank = shares, tensor_rank
        self._leads = leads

    def find(self, name: str) -> TensorShare | None:
        """Return the shard of a tensor; None if each of the T ranks holds the whole tensor."""
        share = self.by_name.get(self._leads.get(name, name))
        return None if share is None or share.is_whole else share

    # To a checkpoint.

    def place(self, segments: Mapping[int, Sequence[Entry]]) -> dict[int, list[Entry]]:
        """Return the entries that this rank writes: shards and, on the first rank, whole ones."""
        placed = {
            segment: [part for entry in entries for part in self._cut(entry)]
            for segment, entries in segments.items()
        }
        return {segment: entries for segment, entries in placed.items() if entries}

    def _cut(self, entry: Entry) -> list[Entry]:
        share = self.find(entry.name)
        if share is not None and entry.shape != share.extent and entry.box.volume > 1:
            raise CheckpointError(
                f"{entry.kind} of {entry.name!r} has shape {list(entry.shape)}, not a single "
                "number's or the weight's own: it cannot be saved for a sharded weight"
            )
        if share is None or entry.shape != share.extent:
            return [] if self.tensor_rank else [entry]
        return [
            entry._replace(shape=share.shape, box=outer, load=partial(_load, entry, inner))
            for outer, inner in share.pieces
        ]

    # From a checkpoint.

    def list_wanted(self, name: str, out: Tensor) -> list[WantedTensor]:
        share = self.find(name)
        if share is None:
            return [WantedTensor(name=name, out=out)]
        out = out.detach()
        return [WantedTensor(name=name, out=out[i.slices], box=outer) for outer, i in share.pieces]
