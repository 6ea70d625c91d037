"""Split values that cross a cut into tensors and the structure to rebuild the values from."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The shape and type of a tensor, without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_inexact(dtype: torch.dtype) -> bool:
    """Return True for floating-point and complex types, which may have gradients and be NaN."""
    return dtype.is_floating_point or dtype.is_complex


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if tensor.layout == torch.strided else (),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
    )


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Positions of the tensors among all values that cross a cut."""

    tree: Any
    leaves: tuple[Any, ...]
    """The values that are not tensors; None at the tensors' positions."""

    places: tuple[int, ...]
    """Indices of the tensors among the leaves."""

    is_flat: bool = False
    """True if every value is a tensor: the usual case, which is faster."""

    learning: tuple[bool, ...] | None = None
    """For each tensor, True if it requires grad at the sender; None means as in the dry run."""

    def show(self, hole: Any) -> Any:
        """Return the values with `hole` for each tensor; if flat, only the number of values."""
        if self.is_flat:
            return len(self.places)
        return self.join([hole] * len(self.places))

    @staticmethod
    def of(shown: Any, hole: Any, learning: tuple[bool, ...] | None) -> Structure:
        """Build the structure that `show(hole)` gave as `shown`; `hole` stands for each tensor."""
        if isinstance(shown, int):
            return _build_flat(shown, learning)
        leaves, tree = pytree.tree_flatten(shown)
        places = tuple(i for i, leaf in enumerate(leaves) if leaf is hole)
        rest = tuple(None if leaf is hole else leaf for leaf in leaves)
        return Structure(tree=tree, leaves=rest, places=places, learning=learning)

    def with_learning(self, learning: tuple[bool, ...]) -> Structure:
        if self.is_flat:
            return _build_flat(len(self.places), learning)
        return replace(self, learning=learning)

    def join(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        if self.is_flat:
            return tuple(tensors)
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        values: tuple[Any, ...] = pytree.tree_unflatten(leaves, self.tree)
        return values


class Crossing(NamedTuple):
    """Tensors that a stage sends to the next one, with their structure."""

    tensors: tuple[Tensor, ...]
    structure: Structure | None
    """The structure; None means the structure that the receiver's own forward found."""


def as_crossing(values: Crossing | Sequence[Tensor]) -> Crossing:
    return values if isinstance(values, Crossing) else Crossing(tuple(values), None)


def take_apart(values: tuple[Any, ...]) -> Crossing:
    """Split a CutPoint's values into tensors and other values."""
    structure = structure_of(values)
    if structure.is_flat:
        return Crossing(values, structure)
    return Crossing(tuple(tensors_of(values)), structure)


def structure_of(values: tuple[Any, ...]) -> Structure:
    if all(isinstance(value, Tensor) for value in values):
        return _build_flat(len(values))
    leaves, tree = pytree.tree_flatten(values)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Structure(tree=tree, leaves=rest, places=places)


@cache
def _build_flat(count: int, learning: tuple[bool, ...] | None = None) -> Structure:
    nothing = (None,) * count
    tree, places = pytree.tree_structure(nothing), tuple(range(count))
    return Structure(tree=tree, leaves=nothing, places=places, is_flat=True, learning=learning)


def is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, PLAIN)


def map_leaves(make: Callable[[Any], Any], value: Any) -> Any:
    return pytree.tree_map(make, value)


def leaves_of(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def sign(value: Any) -> Any:
    """Return a key of nested inputs, made of the shape and dtype of tensors, of ints, bools and
    strings, and of the types of other objects. The key determines the shapes of a forward."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, dict):
        return tuple((key, sign(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(sign, value))
    if value is None or isinstance(value, (bool, int, str)):
        return (type(value), value)
    return type(value)
