"""What a model returned for each micro-batch: the loss in it, and all joined for all stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.split.cut import SplitError


def find_loss(output: Any) -> Tensor:
    """The loss in what the model returns: itself, under "loss", `.loss`, or the first of several.

    It must be one number, the mean over the samples.
    """
    loss = output
    if isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    elif isinstance(getattr(output, "loss", None), Tensor):
        loss = output.loss
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise SplitError(
            f"the model returns {shown}, not its loss: return one number (the mean over the "
            'samples), a dict with "loss", or a tuple that begins with it'
        )
    return loss.reshape(())


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], dims: Iterable[int]) -> Any:
    """Of micro-batches of `sizes` samples, in their order, in the structure that each of them has.

    A tensor is joined along the dimension that has the micro-batch's size, in each of them; where
    several have, one of `dims`, the inputs', before others. A single fraction (a loss) becomes the
    mean over the samples. Other tensors are stacked, one entry a micro-batch, or listed if their
    shapes differ; what is no tensor comes once if it is always the same, else as a list.
    """
    if not outputs:
        return None
    flat = [pytree.tree_flatten(output) for output in outputs]
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


def _join_leaf(leaves: Sequence[Any], sizes: Sequence[int], order: Sequence[int]) -> Any:
    first = leaves[0]
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
    """In this dimension each has its micro-batch's size, in the others all are alike."""
    if any(leaf.dim() <= dim for leaf in leaves):
        return False
    rest = {(*leaf.shape[:dim], *leaf.shape[dim + 1 :]) for leaf in leaves}
    return len(rest) == 1 and [leaf.shape[dim] for leaf in leaves] == list(sizes)


def spread(value: Any, group: Any, source: int, device: torch.device) -> Any:
    """From the rank `source` to all of a group, tensors on `device`."""
    if group is None:
        return value
    is_source = dist.get_rank() == source
    leaves, spec = pytree.tree_flatten(value) if is_source else ([], None)
    head: list[Any] = [[_describe(leaf) for leaf in leaves], spec]
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
    """Whether it is a tensor; what it is."""
    if isinstance(leaf, Tensor):
        return True, (tuple(leaf.shape), leaf.dtype)
    return False, leaf
