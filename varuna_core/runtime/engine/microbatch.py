"""A replica's batch cut into micro-batches, and what the model returned for them joined again.

Which inputs hold one entry a sample is learnt from the dummy inputs: tensors whose first dimension
is that of the first tensor, or, where a function makes batches of any size, whatever dimension
grows with the size. The rest goes whole to each micro-batch; the last one is smaller when the batch
does not divide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.values import map_leaves
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import TokenMean, add_means

GetBatch = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The inputs of one pass through the pipeline."""

    inputs: Mapping[str, Any]
    size: int
    first_sample: int
    """Its place in the global batch."""


def deal_samples(batch_size: int, chunk_size: int, num_replicas: int) -> list[range]:
    """The samples of each replica: whole micro-batches, so that these are the same in any layout.

    The first replicas get one more when they do not divide; the last micro-batch may be smaller.
    """
    chunks = -(-batch_size // chunk_size)
    each, more = divmod(chunks, num_replicas)
    begins = [r * each + min(r, more) for r in range(num_replicas + 1)]
    bounds = [min(begin * chunk_size, batch_size) for begin in begins]
    return [range(bounds[r], bounds[r + 1]) for r in range(num_replicas)]


def find_first(
    size: int, batch_size: int, samples: range, replica: int, num_replicas: int, *, bounded: bool
) -> int:
    """The place of a replica's batch in the global one: its even share, or the one dealt to it."""
    too_large = size > len(samples)
    if size * num_replicas == batch_size or (too_large and not bounded):
        return replica * size
    if too_large:
        raise ValueError(
            f"a batch of {size} samples: replica {replica} of {num_replicas} takes "
            f"{len(samples)} of {batch_size} (model.samples says which)"
        )
    return samples.start


class BatchSplitter:
    """Splits batches, by the dimension of each input that grows with the batch."""

    def __init__(self, dims: dict[Any, int | None]) -> None:
        self.dims = dims
        """Of each tensor among the dummy inputs; None for one that goes whole."""

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
        """The dimensions that hold samples, each once."""
        return [*dict.fromkeys(dim for dim in self.dims.values() if dim is not None)]

    def count(self, inputs: Mapping[str, Any]) -> int:
        """The samples in this batch."""
        sizes = {}
        for path, leaf in _flatten(inputs):
            dim = self.dims.get(path)
            if dim is not None:
                sizes[pytree.keystr(path)] = leaf.shape[dim]
        if not sizes:
            raise ValueError(f"none of the inputs {list(inputs)} has a sample in each entry")
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"the inputs do not hold the same number of samples: {listed}")
        return next(iter(sizes.values()))

    def count_places(self, inputs: Mapping[str, Any]) -> int:
        """The elements of the largest input of whole numbers: about as many tokens."""
        held = [leaf for path, leaf in _flatten(inputs) if self.dims.get(path) is not None]
        return max((x.numel() for x in held if not x.is_floating_point()), default=0)

    def split(
        self, inputs: Mapping[str, Any], chunk_size: int, first_sample: int, device: torch.device
    ) -> list[MicroBatch]:
        size = self.count(inputs)
        moved = map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(inputs))
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
    """A batch of `size`, and the splitter learnt from it."""
    if isinstance(dummy_inputs, Mapping):
        return dummy_inputs, BatchSplitter.from_inputs(dummy_inputs)
    return dummy_inputs(size), BatchSplitter.from_function(dummy_inputs, size)


# Outputs.


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], dims: Iterable[int]) -> Any:
    """Join the outputs of micro-batches of `sizes` samples, in their order and structure.

    A tensor is joined along the dimension that has the micro-batch's size, in each of them; where
    several have, one of `dims`, the inputs', before others. A single fraction (a loss) becomes the
    mean over the samples, and TokenMeans are added up. Other tensors are stacked, one entry a
    micro-batch, or listed if their shapes differ; what is no tensor comes once if it is always the
    same, else as a list.
    """
    if not outputs:
        return None
    flat = [pytree.tree_flatten(output, is_leaf=_is_mean) for output in outputs]
    (_, spec), *others = flat
    if any(other != spec for _, other in others):
        raise SplitError(
            "the model returns other structures for some micro-batches than for others"
        )
    order = [*dict.fromkeys(dims)]
    joined = [
        _join_leaf(leaves, sizes, order)
        for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(joined, spec)


def _is_mean(value: Any) -> bool:
    return isinstance(value, TokenMean)


def _join_leaf(leaves: Sequence[Any], sizes: Sequence[int], order: Sequence[int]) -> Any:
    first = leaves[0]
    if all(_is_mean(leaf) for leaf in leaves):
        return add_means(leaves)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        same = all(type(leaf) is type(first) and leaf == first for leaf in leaves[1:])
        return first if same else list(leaves)
    if all(not leaf.dim() for leaf in leaves) and first.is_floating_point():
        weights = torch.tensor(sizes, dtype=torch.float64, device=first.device) / sum(sizes)
        return (torch.stack(list(leaves)).double() * weights).sum().to(first.dtype)
    for dim in (*order, *range(first.dim())):
        if _grows(leaves, sizes, dim):
            return torch.cat(list(leaves), dim)
    alike = len({leaf.shape for leaf in leaves}) == 1
    return torch.stack(list(leaves)) if alike else list(leaves)


def _grows(leaves: Sequence[Tensor], sizes: Sequence[int], dim: int) -> bool:
    """True if each has its micro-batch's size in this dimension, and all agree in the others."""
    if any(leaf.dim() <= dim for leaf in leaves):
        return False
    rest = {(*leaf.shape[:dim], *leaf.shape[dim + 1 :]) for leaf in leaves}
    return len(rest) == 1 and [leaf.shape[dim] for leaf in leaves] == list(sizes)


def spread(value: Any, group: Any, source: int, device: torch.device) -> Any:
    """Broadcast a value from the rank `source` to all of a group, tensors on `device`."""
    if group is None:
        return value
    is_source = dist.get_rank() == source
    leaves, spec = pytree.tree_flatten(value) if is_source else ([], None)
    head: list[Any] = [[_describe(leaf) for leaf in leaves], spec]
    with warnings.catch_warnings():
        # Of torch 2.13's own reading of the structure, on each rank.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        dist.broadcast_object_list(head, source, group=group, device=torch.device("cpu"))
    described, spec = head
    got = []
    for place, (is_tensor, told) in enumerate(described):
        if not is_tensor:
            got.append(told)
            continue
        shape, dtype = told
        held = leaves[place].detach().cpu().contiguous() if is_source else None
        held = torch.empty(shape, dtype=dtype) if held is None else held
        if held.numel():
            dist.broadcast(held.reshape(-1).view(torch.uint8), source, group=group)
        got.append(leaves[place] if is_source else held.to(device))
    assert spec is not None
    return pytree.tree_unflatten(got, spec)


def _describe(leaf: Any) -> tuple[bool, Any]:
    """A flag for tensors, and the shape and type of one, or the value itself."""
    if isinstance(leaf, Tensor):
        return True, (tuple(leaf.shape), leaf.dtype)
    return False, leaf
