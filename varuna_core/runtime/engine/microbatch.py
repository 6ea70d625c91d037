"""Cut a replica's batch into micro-batches.

The dummy inputs show which inputs have a sample dimension: tensors whose first dimension equals the
first tensor's or, if a function makes batches of any size, the dimension that grows with that size.
Other inputs are passed whole to each micro-batch. The last micro-batch is smaller if the batch size
is not divisible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.values import map_leaves

GetBatch = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The inputs of one pass through the pipeline."""

    inputs: Mapping[str, Any]
    size: int
    first_sample: int
    """Index of the micro-batch's first sample in the global batch."""


def deal_samples(batch_size: int, chunk_size: int, num_replicas: int) -> list[range]:
    """Return each replica's samples, in whole micro-batches that are the same in every layout.

    The first replicas may get one more micro-batch, and the last micro-batch may be smaller.
    """
    chunks = -(-batch_size // chunk_size)
    each, more = divmod(chunks, num_replicas)
    begins = [r * each + min(r, more) for r in range(num_replicas + 1)]
    bounds = [min(begin * chunk_size, batch_size) for begin in begins]
    return [range(bounds[r], bounds[r + 1]) for r in range(num_replicas)]


def compute_first(
    size: int, batch_size: int, samples: range, replica: int, num_replicas: int, *, bounded: bool
) -> int:
    """Return the index of a replica's first sample, in its assigned share or in an even share.

    A batch with the assigned size is assumed to be the assigned share, `model.samples`.
    """
    if size == len(samples):
        return samples.start
    too_large = size > len(samples)
    if size * num_replicas == batch_size or (too_large and not bounded):
        return replica * size
    if too_large:
        raise ValueError(
            f"the batch has {size} samples, but replica {replica} of {num_replicas} takes "
            f"{len(samples)} of {batch_size}: model.samples lists its samples"
        )
    return samples.start


class BatchSplitter:
    """Splits batches along the dimension of each input that grows with the batch."""

    def __init__(self, dims: dict[Any, int | None]) -> None:
        self.dims = dims
        """Sample dimension of each tensor in the dummy inputs; None for a tensor passed whole."""

    @staticmethod
    def from_inputs(inputs: Mapping[str, Any]) -> BatchSplitter:
        flat = [(path, leaf) for path, leaf in _flatten(inputs) if leaf.dim()]
        size = flat[0][1].shape[0] if flat else None
        whole = dict.fromkeys((path for path, _ in _flatten(inputs)), None)
        return BatchSplitter(whole | {p: 0 for p, leaf in flat if leaf.shape[0] == size})

    @staticmethod
    def from_function(get_batch: GetBatch, size: int) -> BatchSplitter:
        one, two = dict(_flatten(get_batch(size))), dict(_flatten(get_batch(size + 1)))
        dims: dict[Any, int | None] = {}
        for path, leaf in one.items():
            grown = [d for d in range(leaf.dim()) if leaf.shape[d] != two[path].shape[d]]
            dims[path] = grown[0] if grown else None
        return BatchSplitter(dims)

    def list_dims(self) -> list[int]:
        """Return the distinct batch dimensions, in which an input holds its samples."""
        return [*dict.fromkeys(dim for dim in self.dims.values() if dim is not None)]

    def count(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of samples in a batch."""
        sizes = {}
        for path, leaf in _flatten(inputs):
            dim = self.dims.get(path)
            if dim is not None:
                sizes[pytree.keystr(path)] = leaf.shape[dim]
        if not sizes:
            raise ValueError(f"none of the inputs {list(inputs)} has a dimension of samples")
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"the inputs do not hold the same number of samples: {listed}")
        return next(iter(sizes.values()))

    def count_places(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of elements of the largest integer input, roughly the tokens."""
        held = [leaf for path, leaf in _flatten(inputs) if self.dims.get(path) is not None]
        return max((x.numel() for x in held if not x.is_floating_point()), default=0)

    def split(
        self, inputs: Mapping[str, Any], chunk_size: int, first_sample: int, device: torch.device
    ) -> list[MicroBatch]:
        size = self.count(inputs)
        to_gpu = device.type == "cuda"  # of pinned memory the host need not wait for the copy

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=to_gpu) if isinstance(leaf, Tensor) else leaf

        moved = map_leaves(move, dict(inputs))
        return [
            MicroBatch(
                inputs=self._take(moved, size, begin, min(chunk_size, size - begin)),
                size=min(chunk_size, size - begin),
                first_sample=first_sample + begin,
            )
            for begin in range(0, size, chunk_size)
        ]

    def _take(self, inputs: Any, total: int, begin: int, size: int) -> Mapping[str, Any]:
        def narrow(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            dim = self.dims.get(path)
            if path not in self.dims and leaf.dim() and leaf.shape[0] == total:
                dim = 0  # an input that the dummy inputs lacked
            return leaf if dim is None else leaf.narrow(dim, begin, size)

        taken: Mapping[str, Any] = pytree.tree_map_with_path(narrow, inputs)
        return taken


def _flatten(inputs: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs))
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def read_dummies(
    dummy_inputs: Mapping[str, Any] | GetBatch, size: int
) -> tuple[Mapping[str, Any], BatchSplitter]:
    """Return a batch of `size`, and the splitter derived from it."""
    if isinstance(dummy_inputs, Mapping):
        return dummy_inputs, BatchSplitter.from_inputs(dummy_inputs)
    return dummy_inputs(size), BatchSplitter.from_function(dummy_inputs, size)
