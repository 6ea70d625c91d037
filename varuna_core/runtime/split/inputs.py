"""Handle inputs and crossing tensors that a model changes in place.

A micro-batch's forward may run more than once on the same inputs: each stage runs the code before
the stage, and a recompute runs the stage again. So inputs that the dry run saw modified are copied
for each forward, and the batch stays unchanged. Two cases are errors: an input that a stage reads
after a change made outside the stage, and modified tensors that share memory and cross a cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime.comm.values import tensors_of


@dataclass(frozen=True, kw_only=True)
class Touch:
    """A read or a write of an input's memory."""

    segment: int
    call: int | None
    """Index of the innermost module call around the access."""

    is_write: bool
    through: frozenset[int]
    """Cuts that the tensor had crossed before; after a cut, a stage receives a copy."""


def storage_of(tensor: Tensor) -> int:
    """Return the id of a tensor's storage, which views and `.data` share, unlike the version."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else -id(tensor)


def name_leaves(inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return all input leaves with their name or path: `x`, `more['shift']`."""
    leaves, _ = pytree.tree_flatten_with_path(dict(inputs))
    return [(name_path(path), leaf) for path, leaf in leaves]


def name_path(path: Sequence[Any]) -> str:
    return f"{path[0].key}{pytree.keystr(tuple(path[1:]))}"


@dataclass(kw_only=True)
class InputTrace:
    """In-place changes, seen in a dry run, to inputs and to tensors that cross cuts."""

    touches: dict[str, list[Touch]] = field(default_factory=dict)
    """Reads and writes of each input, in order, starting at the first write to any input."""

    received: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """For each cut and tensor index, the later segments that write into the tensor."""

    twins: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each cut, the pairs of tensor indices that share memory."""

    changes_containers: bool = False
    """True if a dict or list among the inputs is itself modified."""

    _of_input: dict[int, tuple[list[str], frozenset[int]]] = field(default_factory=dict)
    _crossed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    _leaves: list[tuple[str, Any]] = field(default_factory=list)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._leaves = name_leaves(inputs)
        for name, leaf in self._leaves:
            if isinstance(leaf, Tensor):
                self._of_input.setdefault(storage_of(leaf), ([], frozenset()))[0].append(name)

    def end(self, inputs: Mapping[str, Any], output: Any, segment: int) -> None:
        self.read(tensors_of(output), segment, None)
        now = name_leaves(inputs)
        same = len(now) == len(self._leaves) and all(
            name == other and leaf is before
            for (name, leaf), (other, before) in zip(now, self._leaves, strict=True)
        )
        self.changes_containers = not same
        self._of_input, self._crossed, self._alive, self._leaves = {}, {}, [], []

    def write(self, written: Iterable[Tensor], segment: int, call: int | None) -> None:
        for tensor in written:
            key = storage_of(tensor)
            for place in self._crossed.get(key, ()):
                self.received.setdefault(place, set()).add(segment)
            self._note(key, segment, call, True)

    def read(self, tensors: Iterable[Tensor], segment: int, call: int | None) -> None:
        if self.touches:  # what was read before the first write does not matter
            for tensor in tensors:
                self._note(storage_of(tensor), segment, call, False)

    def _note(self, key: int, segment: int, call: int | None, is_write: bool) -> None:
        names, through = self._of_input.get(key, ((), frozenset[int]()))
        touch = Touch(segment=segment, call=call, is_write=is_write, through=through)
        for name in names:
            if is_write or name in self.touches:
                self.touches.setdefault(name, []).append(touch)

    def cross(self, values: tuple[Any, ...], cut: int, segment: int) -> tuple[Any, ...]:
        """Record the values that cross the cut, and return them with copies of the inputs."""
        tensors = tensors_of(values)
        self.read(tensors, segment, None)
        for b, second in enumerate(tensors):
            for a, first in enumerate(tensors[:b]):
                if share_memory(first, second):
                    self.twins.setdefault(cut, set()).add((a, b))
        leaves, tree = pytree.tree_flatten(values)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for place, index in enumerate(places):
            tensor = leaves[index]
            known = self._of_input.get(storage_of(tensor))
            if known is not None:
                leaves[index] = tensor = tensor.clone()
                self._of_input[storage_of(tensor)] = known[0], known[1] | {cut}
            self._crossed.setdefault(storage_of(tensor), []).append((cut, place))
            self._alive.append(tensor)  # so that no new tensor has its storage
        left: tuple[Any, ...] = pytree.tree_unflatten(leaves, tree)
        return left

    def list_written(self, cut: int, segments: range) -> set[int]:
        """Return the indices of tensors that cross `cut` and that these segments later modify."""
        return {
            place
            for (number, place), written in self.received.items()
            if number == cut and not written.isdisjoint(segments)
        }

    def find_unseen(self, held: range, skipped: Iterable[int | None]) -> tuple[str, Touch] | None:
        """Return the first input that a stage of these segments reads but does not itself change,
        with the change. `skipped` are the calls replaced by the stage's stubs, or within those."""
        skipped, entry = set(skipped), held.start - 1
        for name, touches in self.touches.items():
            not_here: Touch | None = None
            not_there: Touch | None = None
            for touch in touches:
                if touch.segment >= held.stop:
                    break
                is_skipped = touch.call in skipped
                is_received = entry in touch.through and touch.segment >= held.start
                if touch.is_write:
                    if is_skipped or is_received:
                        not_here = touch
                    elif held.start and touch.segment >= held.start:
                        not_there = touch
                elif not is_skipped and (not_there if is_received else not_here) is not None:
                    found = not_there if is_received else not_here
                    assert found is not None
                    return name, found
        return None


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if the tensors have a memory location in common."""
    if storage_of(a) != storage_of(b) or not a.numel() or not b.numel():
        return False
    if a.layout != torch.strided or a.dtype != b.dtype:
        return True
    seen = torch.zeros(max(map(_compute_end, (a, b))), dtype=torch.bool, device="cpu")
    seen.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(seen.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _compute_end(tensor: Tensor) -> int:
    """Return the storage offset after the tensor's last element."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((n - 1) * step for n, step in steps)


# In training.


class FreshInputs:
    """Creates the inputs of one forward, with copies of the inputs that it modifies."""

    def __init__(self, traces: Sequence[InputTrace]) -> None:
        self.names = {name for trace in traces for name in trace.touches}
        self.is_needed = bool(self.names) or any(trace.changes_containers for trace in traces)

    def make(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        leaves, tree = pytree.tree_flatten_with_path(dict(inputs))
        names = [name_path(path) for path, _ in leaves]
        values = [leaf for _, leaf in leaves]
        keys = [storage_of(leaf) if isinstance(leaf, Tensor) else None for leaf in values]
        changed = {key for name, key in zip(names, keys, strict=True) if name in self.names}
        storages: dict[int, Any] = {}
        for place, key in enumerate(keys):
            if key is None or key not in changed:
                continue
            leaf = values[place]
            if keys.count(key) == 1 or leaf.requires_grad or leaf.layout != torch.strided:
                values[place] = leaf.clone()
                continue
            # Tensors of one memory change together.
            if key not in storages:
                storages[key] = leaf.untyped_storage().clone()
            values[place] = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
                storages[key], leaf.storage_offset(), leaf.shape, leaf.stride()
            )
        made: dict[str, Any] = pytree.tree_unflatten(values, tree)
        return made


def note_versions(inputs: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    """Return the tensors among the inputs with their version counters."""
    return [
        (name, leaf, leaf._version)
        for name, leaf in name_leaves(inputs)
        if isinstance(leaf, Tensor) and not leaf.is_inference()
    ]


def refuse_unforeseen(noted: Iterable[tuple[str, Tensor, int]]) -> None:
    """Raise an error if an input was modified since: results computed from it are invalid."""
    for name, tensor, version in noted:
        if tensor._version != version:
            raise RuntimeError(
                f"input {name!r} was changed in place in this step but not in the dry run, which "
                "determines what is copied: give dummy_inputs with which the model changes it "
                f"too, or change a copy ({name.partition('[')[0]} = ....clone())"
            )
