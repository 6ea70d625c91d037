"""Join the outputs of micro-batches into those of a replica and of a whole step.

The requested outputs are collected in the forward that computes the loss, once for each
micro-batch, and joined at the end of the step. Single numbers are reduced over the global batch:

    a fraction       the mean over the samples
    a whole number   the sum
    a TokenMean      the mean over its count (such as tokens)

All other outputs stay local to the replica, joined by `join_outputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.agreement import compute_mean
from varuna_core.runtime.comm.values import map_leaves
from varuna_core.runtime.comm.words import HOLE, broadcast, gather
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import TokenMean, add_means

Names = Sequence[str | int]
"""Keys, attribute names or indices of outputs."""


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], dims: Iterable[int]) -> Any:
    """Join the outputs of micro-batches that have `sizes` samples; keep order and structure.

    A tensor is concatenated along the dimension whose size equals the micro-batch's size in every
    micro-batch; if several dimensions qualify, one in `dims` (the inputs' batch dimensions) is
    preferred. A floating-point scalar (a loss) is averaged over the samples, and TokenMeans are
    summed. Other tensors are stacked by micro-batch, or returned as a list if their shapes differ.
    Values that are not tensors are returned once if they are all equal, else as a list.
    """
    if not outputs:
        return None
    spec, columns = _line_up(outputs)
    order = [*dict.fromkeys(dims)]
    joined = [_join_leaf(leaves, sizes, order) for leaves in columns]
    return pytree.tree_unflatten(joined, spec)


def is_mean(value: Any) -> bool:
    return isinstance(value, TokenMean)


def _join_leaf(leaves: Sequence[Any], sizes: Sequence[int], order: Sequence[int]) -> Any:
    first = leaves[0]
    if all(is_mean(leaf) for leaf in leaves):
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
    """Return True if `dim` has the size of each micro-batch and all other dimensions agree."""
    if any(leaf.dim() <= dim for leaf in leaves):
        return False
    rest = {(*leaf.shape[:dim], *leaf.shape[dim + 1 :]) for leaf in leaves}
    return len(rest) == 1 and [leaf.shape[dim] for leaf in leaves] == list(sizes)


def spread(value: Any, group: Any, source: int, device: torch.device) -> Any:
    """Broadcast a value from rank `source` to all ranks of a group; put tensors on `device`."""
    if group is None:
        return value
    is_source = dist.get_rank() == source
    leaves, spec = pytree.tree_flatten(value) if is_source else ([], None)
    described, shown = broadcast(
        [[_describe(leaf) for leaf in leaves], example_of(spec)], source, group
    )
    got = []
    for place, (is_tensor, sent) in enumerate(described):
        if not is_tensor:
            got.append(sent)
            continue
        shape, dtype = sent
        held = leaves[place].detach().cpu().contiguous() if is_source else None
        held = torch.empty(shape, dtype=dtype) if held is None else held
        if held.numel():
            dist.broadcast(held.reshape(-1).view(torch.uint8), source, group=group)
        got.append(leaves[place] if is_source else held.to(device))
    spec = spec_of_example(shown)
    assert spec is not None
    return pytree.tree_unflatten(got, spec)


def example_of(spec: Any) -> Any:
    """Return the structure in the form sent to other ranks, with a placeholder for each leaf."""
    return None if spec is None else [pytree.tree_unflatten([HOLE] * spec.num_leaves, spec)]


def spec_of_example(shown: Any) -> Any:
    return None if shown is None else pytree.tree_structure(shown[0])


def _describe(leaf: Any) -> tuple[bool, Any]:
    """Return (True, shape and type) for a tensor, or (False, value) for any other leaf."""
    if isinstance(leaf, Tensor):
        return True, (tuple(leaf.shape), leaf.dtype)
    return False, leaf


# Of a step.


@dataclass(frozen=True, kw_only=True)
class Number:
    """A single number computed from some samples, to be reduced over all samples."""

    total: Any
    """The sum; for a TokenMean, its rows of (sum, count)."""

    weight: float | None
    """The number of samples over which a fraction is averaged; None for a sum."""

    dtype: torch.dtype


class StepOutputs:
    """The requested outputs of one step, on ranks that hold the last stage."""

    def __init__(self, names: Names) -> None:
        if isinstance(names, str):
            raise TypeError(
                f"outputs={names!r}: expected a sequence of names, such as ({names!r},)"
            )
        self.names = names
        self._kept: dict[int, dict[str | int, Any]] = {}

    def check(self, output: Any) -> None:
        """Raise an error if the dry run's output shows that a requested name does not exist."""
        if isinstance(output, (Mapping, tuple, list)):
            for name in self.names:
                take_part(output, name)

    def keep(self, number: int, output: Any) -> None:
        """Store the requested outputs of a micro-batch, detached from their graphs."""
        parts = {name: take_part(output, name) for name in self.names}
        self._kept[number] = map_leaves(lambda x: x.detach() if isinstance(x, Tensor) else x, parts)

    def join(
        self, sizes: Sequence[int], dims: Iterable[int], device: torch.device, replicas: Any
    ) -> dict[str | int, Any]:
        """Return the outputs of the whole step. `sizes` holds the micro-batches' sizes, and
        `replicas` is the group over which single numbers are reduced."""
        numbers = sorted(self._kept)
        sizes, order = [sizes[number] for number in numbers], [*dict.fromkeys(dims)]
        spec, columns = _line_up([self._kept.pop(number) for number in numbers])
        mine = [_read_number(column, sizes) for column in columns]
        gathered = [
            (spec_of_example(shown), held)
            for shown, held in _gather((example_of(spec), mine), replicas)
        ]
        spec = next((spec for spec, _ in gathered if spec is not None), None)
        if spec is None:  # no replica was given a sample
            return dict.fromkeys(self.names)
        if any(other not in (None, spec) for other, _ in gathered):
            raise SplitError("the model returns outputs of other structure on some replicas")
        joined: list[Any] = []
        for place in range(spec.num_leaves):
            held = [numbers[place] for _, numbers in gathered if numbers]
            if any(held):
                joined.append(_add_up([number for number in held if number], device))
            else:  # the replica's own, if it was given samples
                joined.append(_join_leaf(columns[place], sizes, order) if columns else None)
        made: dict[str | int, Any] = pytree.tree_unflatten(joined, spec)
        return made


def take_part(output: Any, name: str | int) -> Any:
    """Return a part of a model's output by key, attribute or index."""
    try:
        if isinstance(output, Mapping) and name in output:
            return output[name]
        if isinstance(name, int) and isinstance(output, (tuple, list)):
            return output[name]
        if isinstance(name, str) and not isinstance(output, Tensor):
            return getattr(output, name)
    except (IndexError, AttributeError):
        pass
    raise SplitError(
        f"outputs requests {name!r}, but the model returns {describe_parts(output)}: name keys of "
        "a dict, attributes, or indices of a tuple"
    )


def describe_parts(output: Any) -> str:
    """Describe the output names that a user can request."""
    if isinstance(output, Mapping):
        return "a dict with " + ", ".join(map(repr, output))
    if isinstance(output, (tuple, list)):
        fields = getattr(output, "_fields", None)
        return f"{len(output)} values" + (f" ({', '.join(fields)})" if fields else "")
    return f"a {type(output).__name__}"


def _line_up(outputs: Sequence[Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the structure common to all outputs, and each leaf's values across the outputs."""
    flat = [pytree.tree_flatten(output, is_leaf=is_mean) for output in outputs]
    if not flat:
        return None, []
    (_, spec), *others = flat
    if any(other != spec for _, other in others):
        raise SplitError("the model returns outputs of other structure for some micro-batches")
    return spec, [*zip(*(leaves for leaves, _ in flat), strict=True)]


def _read_number(leaves: Sequence[Any], sizes: Sequence[int]) -> Number | None:
    """Combine leaves that hold one number for each micro-batch; return None for other leaves."""
    first = leaves[0]
    if all(is_mean(leaf) for leaf in leaves):
        rows = torch.stack([leaf.totals() for leaf in leaves]).sum(0)
        dtype = first.terms[0][0].dtype
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return Number(total=rows.cpu(), weight=None, dtype=dtype)
    if not all(isinstance(leaf, Tensor) and not leaf.dim() for leaf in leaves):
        return None
    if first.is_complex():
        return None
    values = torch.stack(list(leaves))
    if first.is_floating_point():
        weights = torch.tensor(sizes, dtype=torch.float64, device=values.device)
        total = (values.double() * weights).sum().cpu()
        return Number(total=total, weight=float(sum(sizes)), dtype=first.dtype)
    dtype = torch.int64 if first.dtype == torch.bool else first.dtype
    return Number(total=values.sum().cpu(), weight=None, dtype=dtype)


def _gather(mine: Any, group: Any) -> list[Any]:
    if group is None:
        return [mine]
    return gather(mine, group)


def _add_up(held: Sequence[Number], device: torch.device) -> Tensor:
    total = torch.stack([number.total for number in held]).sum(0)
    if total.dim():
        total = compute_mean(total)
    elif held[0].weight is not None:
        total = total / sum(number.weight or 0.0 for number in held)
    return total.to(device, held[0].dtype)
