"""Split a model with CutPoints into stages.

    split = split_model(model, dummy_inputs, num_stages=4, partition="3-4-4-1")
    stage = split.make_stage(2)
    sent = stage.forward(inputs, received)

The model itself is only read: a stage is a copy that holds only its own parameters (the others take
no memory). Each parameter and buffer belongs to the stages whose segments use it. Errors name a
tensor that crosses a cut twice, a value that bypasses a cut, and a buffer that two stages change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from varuna_core.facts.partition import Partition
from varuna_core.records.rank_map import balance
from varuna_core.runtime.comm.values import leaves_of, map_leaves
from varuna_core.runtime.split.check import PoisonCheck
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.kept import NOTHING_KEPT, KeptModules
from varuna_core.runtime.split.record import Record, tensor_names
from varuna_core.runtime.split.rehearsal import Rehearsal, copy_model, rehearse
from varuna_core.runtime.split.replay import Replay
from varuna_core.runtime.split.stage import Stage, plan_stubs
from varuna_core.runtime.split.weights import Weights

# Where each parameter and buffer lies.


@dataclass(frozen=True, kw_only=True)
class TiedWeight:
    """A parameter that has several names, or that several stages hold."""

    names: tuple[str, ...]
    """Names in the model's order; the first one determines the initial values."""

    stages: tuple[int, ...]
    """Stages that hold the parameter, whose gradients are summed."""


def group_names(
    model: nn.Module, shared_weights: Sequence[Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter name, all names of its tensor: tied, or passed as shared."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    order = {name: place for place, name in enumerate(parameters)}
    groups = {name: {name} for name in parameters}

    def join(names: Sequence[str]) -> None:
        joined = set().union(*(groups[name] for name in names))
        for name in joined:
            groups[name] = joined

    for names in tensor_names(model).values():
        join([name for name in names if name in parameters])
    for pair in shared_weights:
        for name in pair:
            if name not in parameters:
                raise SplitError(f"shared_weights names {name!r}, which is not a parameter")
            if parameters[name].shape != parameters[pair[0]].shape:
                raise SplitError(
                    f"shared weights {pair[0]!r} {list(parameters[pair[0]].shape)} and "
                    f"{name!r} {list(parameters[name].shape)} differ in shape"
                )
        join(pair)
    return {name: tuple(sorted(group, key=order.__getitem__)) for name, group in groups.items()}


def assign_segments(
    model: nn.Module,
    record: Record,
    groups: Mapping[str, tuple[str, ...]],
    may_vary: bool = False,
) -> dict[str, frozenset[int]]:
    """Return the segments that use each parameter and buffer; unused ones stay with their module.

    If `may_vary`, other batches may use other parameters: parameters that the dry run did not use,
    and whose module's segment is unknown, are held by all stages, as shared weights.
    """
    seen = {name: {segment for segment, _ in uses} for name, uses in record.uses.items()}
    found: dict[str, frozenset[int]] = {}
    last = 0
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for name in names:
        used = set().union(*(seen.get(other, set()) for other in groups.get(name, (name,))))
        used = used or _segments_of_module(record, name)
        if not used and may_vary and name in groups:
            found[name] = frozenset(range(len(record.cuts) + 1))
            continue
        used = used or {last}
        found[name], last = frozenset(used), max(used)
    return found


def _segments_of_module(record: Record, name: str) -> set[int]:
    """Return the segments of the nearest enclosing called module; empty if a call spans several."""
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        calls = [call for call in record.calls if call.module == path and call.end >= 0]
        if calls:
            within = all(call.begin == call.end for call in calls)
            return {call.begin for call in calls} if within else set()
    return set()


def list_owners(model: nn.Module) -> set[str]:
    """Return the names of modules that own parameters."""
    return {name for name, m in model.named_modules() if name and any(True for _ in m.parameters())}


def list_frozen(
    model: nn.Module, record: Record, groups: Mapping[str, tuple[str, ...]]
) -> frozenset[str]:
    """Return parameters that never change: without gradient, and not written in the forward."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(
        name
        for name, names in groups.items()
        if not any(parameters[other].requires_grad or other in record.changes for other in names)
    )


def is_read_before(record: Record, names: Iterable[str], first: int, stubbed: set[int]) -> bool:
    """Return True if code that is not stubbed reads the tensor before segment `first`."""
    return any(
        segment < first and not record.is_within(call, stubbed)
        for name in names
        for segment, call in record.uses.get(name, ())
    )


def hold_frozen(
    record: Record,
    groups: Mapping[str, tuple[str, ...]],
    stages: Sequence[range],
    segments: Mapping[str, frozenset[int]],
    owners: set[str],
    frozen: frozenset[str],
) -> dict[str, frozenset[int]]:
    """Add frozen parameters to each stage in which code outside stubs reads them before the stage.

    The results of such code are equal in all stages, so every stage may use them.
    """
    held = dict(segments)
    for stage in stages:
        _, stubbed = plan_stubs(record, stage.start, owners)
        for name in frozen if stage else ():
            if is_read_before(record, groups[name], stage.start, stubbed):
                held[name] |= {stage.start}
    return held


def refuse_changes(
    record: Record,
    stages: Sequence[range],
    segments: Mapping[str, frozenset[int]],
    groups: Mapping[str, tuple[str, ...]],
    owners: set[str],
) -> None:
    """Raise an error if two stages change a tensor, or a stage reads it but misses a change."""

    def stages_of(found: Iterable[int]) -> list[int]:
        return sorted({next(i for i, held in enumerate(stages) if s in held) for s in found})

    for name, changed in record.changes.items():
        where = stages_of(changed)
        readers = [i for i in stages_of(segments[name]) if i not in where]
        kind = "parameter" if name in groups else "buffer"
        remedy = "choose a partition that keeps it in one stage, or create one for each stage"
        if len(where) > 1:
            raise SplitError(
                f"{kind} {name!r} is changed in stage {where[0]} and in stage {where[-1]}, each "
                f"of which would have its own copy: {remedy}"
            )
        for reader in readers:
            _, stubbed = plan_stubs(record, stages[reader].start, owners)
            calls = [call for segment, call in record.uses.get(name, ()) if segment in changed]
            unseen = reader < where[0] or any(record.is_within(call, stubbed) for call in calls)
            if unseen or kind == "parameter":
                raise SplitError(
                    f"{kind} {name!r} is changed in stage {where[0]} and read in stage {reader}, "
                    f"which does not see the change: {remedy}"
                )


def refuse_sparse(model: nn.Module) -> None:
    """Raise an error for sparse gradients, which cannot be summed, clipped or sent here."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise SplitError(
                f"module {name!r} has sparse gradients, which cannot be summed over stages and "
                "replicas: build it with sparse=False"
            )


def refuse_attribute_changes(record: Record, stages: Sequence[range]) -> None:
    """Raise an error if two stages change an attribute that the next forward uses, since each stage
    would have its own copy."""
    for (path, name), change in record.attributes.items():
        where = [i for i, held in enumerate(stages) if not change.segments.isdisjoint(held)]
        if change.is_carried and len(where) > 1:
            owner = f"module {path!r}" if path else "the model"
            raise SplitError(
                f"{owner} keeps state between forwards in its attribute {name!r}, which is "
                f"changed in stage {where[0]} and in stage {where[-1]}, each of which would have "
                "its own copy: choose a partition that keeps it in one stage, or use one "
                "attribute for each stage"
            )


def refuse_unseen_changes(record: Record, stages: Sequence[range], owners: set[str]) -> None:
    """Raise an error if a stage reads an input that is changed outside the stage, or receives two
    tensors that share memory and changes one of them."""
    for number, held in enumerate(stages):
        for found in filter(None, (record, record.in_training)):
            _, stubbed = plan_stubs(found, held.start, owners)
            within = [call for call in range(len(found.calls)) if found.is_within(call, stubbed)]
            unseen = found.inputs.find_unseen(held, within)
            if unseen is not None:
                name, touch = unseen
                where = f"segment {touch.segment}"
                if touch.call is not None and found.calls[touch.call].module:
                    where = f"{where} by module {found.calls[touch.call].module!r}"
                raise SplitError(
                    f"input {name!r} is changed in place in {where}, and later read in stage "
                    f"{number}, which does not see the change: change a copy (x = x.clone()) and "
                    "pass the copy through the cuts"
                )
            entry = held.start - 1
            written = found.inputs.list_written(entry, held)
            for pair in found.inputs.twins.get(entry, ()):
                if not written.isdisjoint(pair):
                    first, second = (str(found.cuts[entry].specs[place]) for place in pair)
                    raise SplitError(
                        f"cut {entry} ({found.cuts[entry].name}) passes a {first} and a {second} "
                        f"that share memory, and stage {number} changes one of them in place: "
                        "clone() one before the cut, or pass one and create the other after it"
                    )


# The split.


class LayerShares(Protocol):
    """The weights of a rank that holds shards of layers (tensor_parallel/sharding.py)."""

    def cut(self, name: str, values: Tensor) -> Tensor:
        """Return this rank's shard of the values of a parameter or buffer."""

    def stand_in(
        self, name: str, original: Tensor, dtype: torch.dtype, device: torch.device, is_early: bool
    ) -> nn.Parameter:
        """Return a parameter with the full shape, to check the stage before it holds shards."""

    def install(self, stage: Stage, local: Mapping[str, nn.Parameter]) -> None:
        """Make the stage's modules compute with their shards of the parameters (tensor
        parallelism)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The segments, parameters and buffers of each stage."""

    model: nn.Module
    inputs: Mapping[str, Any]
    device: torch.device
    rehearsal: Rehearsal
    record: Record
    types: Mapping[int, torch.dtype]
    """Dtypes of parameters and buffers in a stage, by the original's id; others as in the model."""

    kept: KeptModules
    """The modules that stay in fp32 in half precision."""

    costs: tuple[float, ...]
    """Cost of each segment: estimated seconds, or the caller's measured times."""

    stages: tuple[range, ...]
    """Segments of each stage."""

    groups: Mapping[str, tuple[str, ...]]
    """For each parameter name, all names of its tensor, in the model's order."""

    segments: Mapping[str, frozenset[int]]
    """For each parameter or buffer name, the segments that use it."""

    frozen: frozenset[str]
    """Parameters that never change."""

    @property
    def partition(self) -> Partition:
        """The partition: number of segments of each stage."""
        return Partition([len(stage) for stage in self.stages])

    @cached_property
    def replay(self) -> Replay:
        """Return the object that compares stages with the whole model."""
        return Replay(self.rehearsal, self.inputs)

    def owners(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold this parameter or buffer."""
        return tuple(
            i for i, held in enumerate(self.stages) if not self.segments[name].isdisjoint(held)
        )

    @property
    def ties(self) -> tuple[TiedWeight, ...]:
        """Return the parameters with several names, or used in several stages."""
        found = {}
        for name, names in self.groups.items():
            stages = self.owners(name)
            if names[0] == name and (len(names) > 1 or len(stages) > 1):
                found[name] = TiedWeight(names=names, stages=stages)
        return tuple(found.values())

    def buffer_owner(self, name: str) -> int:
        """Return the stage that saves a buffer: the one that changes it, else its first user."""
        segments = self.record.changes.get(name) or self.segments[name]
        first = min(segments)
        return next(i for i, held in enumerate(self.stages) if first in held)

    def without_values(self) -> Split:
        """Return the split for a copy of the model on the meta device, to free the model."""
        given = [*self.model.parameters(), *self.model.buffers()]
        if all(tensor.is_meta for tensor in given):
            return self
        empty = {id(tensor): _without_values(tensor) for tensor in given}
        types = {id(empty[key]): kind for key, kind in self.types.items() if key in empty}
        return replace(self, model=copy_model(self.model, dict(empty)), types=types)

    def make_stage(
        self,
        index: int,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        seed: int | None = None,
        check: bool = True,
        at_hand: Mapping[str, nn.Parameter] | None = None,
        sharding: LayerShares | None = None,
    ) -> Stage:
        """Build a stage with its weights, and check it for values that bypass its cut.

        Weights come from `state_dict` (with the plain model's names), or are initialized by name
        from `seed` by their modules' own rules, or are copied from the model.
        Parameters `at_hand`, from the rank's other stages, are reused, so that a tied weight stays
        one parameter. With `sharding`, the stage holds this rank's shards.
        """
        weights = Weights(
            model=self.model,
            state_dict=state_dict,
            seed=seed,
            groups=dict.fromkeys(self.groups.values()),
        )
        held = self.stages[index]
        plan, stubbed = plan_stubs(self.record, held.start, list_owners(self.model))
        own, early, replaced, full = self._make_parameters(
            index, weights, stubbed, at_hand or {}, sharding
        )
        replaced |= self._make_buffers(index, weights, stubbed, sharding)
        module = copy_model(self.model, replaced)
        self.kept.install(module)
        stage = Stage(
            index=index,
            segments=held,
            module=module,
            record=self.record,
            rehearsal=self.rehearsal,
            device=self.device,
            parameters=own,
            buffers=[
                name for name, _ in self.model.named_buffers() if self.buffer_owner(name) == index
            ],
            early=early,
            full=full,
        )
        stage.install(plan, self.inputs)
        stage.refuse_calls(self._list_strange(index, own))
        if check:
            moved = map_leaves(
                lambda x: x.to(self.device) if isinstance(x, Tensor) else x, dict(self.inputs)
            )
            PoisonCheck(stage, moved).run()
            self.replay.check(index, held, plan, self.record)
        if sharding is not None:
            sharding.install(stage, own)
        return stage

    def _list_strange(self, index: int, own: Mapping[str, nn.Parameter]) -> list[str]:
        """Return modules not called in the dry run for which this stage lacks some tensors."""
        known = {call.module for call in self.record.calls}
        found = []
        for path, module in self.model.named_modules():
            dot = path + "." if path else ""
            mine = [dot + n for n, _ in module.named_parameters(recurse=False)]
            buffers = [dot + n for n, _ in module.named_buffers(recurse=False)]
            if path in known or not self.record.uses.keys().isdisjoint([*mine, *buffers]):
                continue
            lacks = any(name not in own for name in mine)
            if lacks or any(self.buffer_owner(name) != index for name in buffers):
                found.append(path)
        return found

    def _make_parameters(
        self,
        index: int,
        weights: Weights,
        stubbed: set[int],
        at_hand: Mapping[str, nn.Parameter],
        sharding: LayerShares | None,
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], dict[int, Any], dict[str, Tensor]]:
        """Return the stage's own parameters, those that code before the stage reads, the copy of
        each original, and fp32 values of trained parameters with another dtype in `types`."""
        originals = dict(self.model.named_parameters(remove_duplicate=False))
        own: dict[str, nn.Parameter] = {}
        early: dict[str, nn.Parameter] = {}
        made = {self.groups[n][0]: p for n, p in at_hand.items() if index in self.owners(n)}
        full: dict[str, Tensor] = {}
        replaced: dict[int, Any] = {}
        for name, original in originals.items():
            names = self.groups[name]
            first = names[0]
            is_own = index in self.owners(name)
            is_early = not (is_own and name in self.frozen) and is_read_before(
                self.record, names, self.stages[index].start, stubbed
            )
            if first not in made:
                values = (
                    weights.make(names, originals[first])
                    if is_own
                    else self._stand_in(original, real=is_early)
                )
                if is_own and sharding is not None:
                    values = sharding.cut(first, values)
                grad = original.requires_grad and is_own
                dtype = self._type_of(original)
                made[first] = nn.Parameter(values.to(self.device, dtype), requires_grad=grad)
                if grad and self.types:
                    full[first] = _widen(values).to(self.device, copy=True)
            replaced[id(original)] = made[first]
            if is_own and made[first].shape != original.shape:
                assert sharding is not None
                replaced[id(original)] = sharding.stand_in(
                    name, original, self._type_of(original), self.device, is_early
                )
            if is_own:
                own[name] = made[first]
            if is_early:
                early[name] = made[first]
        firsts = {name: self.groups[name][0] for name in own}
        return (
            own,
            early,
            replaced,
            {n: full[first] for n, first in firsts.items() if first in full},
        )

    def _make_buffers(
        self, index: int, weights: Weights, stubbed: set[int], sharding: LayerShares | None
    ) -> dict[int, Any]:
        replaced: dict[int, Any] = {}
        for name, original in self.model.named_buffers():
            needed = not original.is_meta or self._is_run(index, name, stubbed)
            needed = needed or self.buffer_owner(name) == index
            values = weights.make((name,), original) if needed else self._stand_in(original)
            if needed and sharding is not None:
                values = sharding.cut(name, values)
            replaced[id(original)] = values.to(self.device, self._type_of(original))
        return replaced

    def _stand_in(self, tensor: Tensor, real: bool = False) -> Tensor:
        """Return a one-element tensor expanded to the shape of a tensor not held here."""
        dtype = self._type_of(tensor)
        if real:
            return torch.zeros(tensor.shape, dtype=dtype, device=self.device)
        return torch.zeros((), dtype=dtype, device=self.device).expand(tensor.shape)

    def _type_of(self, original: Tensor) -> torch.dtype:
        return self.types.get(id(original), original.dtype)

    def _is_run(self, index: int, name: str, stubbed: set[int]) -> bool:
        """Return True if code that the stage runs, before or within it, uses this buffer."""
        return is_read_before(self.record, [name], self.stages[index].stop, stubbed)


class RankStages:
    """The stages of one rank, in pipeline order."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    @staticmethod
    def make(
        split: Split,
        indices: Sequence[int],
        state_dict: Mapping[str, Tensor] | None,
        seed: int | None,
        sharding: LayerShares | None = None,
    ) -> RankStages:
        held: dict[str, nn.Parameter] = {}
        stages = []
        for index in indices:
            stage = split.make_stage(
                index, state_dict=state_dict, seed=seed, at_hand=held, sharding=sharding
            )
            held |= stage.parameters()
            stages.append(stage)
        return RankStages(stages)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters by the plain model's names; a tied parameter under all its names."""
        return {n: p for stage in self.stages for n, p in stage.parameters().items()}

    def take_full(self) -> dict[str, Tensor]:
        """Return the fp32 values of half-precision parameters, and release them here."""
        full: dict[str, Tensor] = {}
        for stage in self.stages:
            full, stage.full = full | stage.full, {}
        return full

    def buffers(self) -> dict[str, Tensor]:
        """Return the current buffers that the stages save."""
        return {n: b for stage in self.stages for n, b in stage.buffers().items()}

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.train(mode)


def split_model(
    model: nn.Module,
    dummy_inputs: Mapping[str, Any],
    num_stages: int,
    partition: str | Sequence[int] | Partition | None = None,
    *,
    shared_weights: Sequence[Sequence[str]] | None = None,
    costs: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
    types: Mapping[int, torch.dtype] = MappingProxyType({}),
    kept: KeptModules = NOTHING_KEPT,
) -> Split:
    """Run `model(**dummy_inputs)` dry, and divide its segments into stages.

    Without `partition`, stages are balanced by `costs`, one for each segment, or by the dry run's
    estimates. `shared_weights` groups names of one parameter, besides the model's own tied weights.
    `types` holds the dtypes of parameters and buffers in a stage, by id.
    """
    refuse_sparse(model)
    device = torch.device(device)
    rehearsal, record = rehearse(model, dummy_inputs, device, types, kept)
    groups = group_names(model, shared_weights or ())
    used_costs = tuple(record.costs if costs is None else costs)
    if len(used_costs) != len(record.costs):
        raise SplitError(f"{len(used_costs)} costs for {len(record.costs)} segments")
    try:
        if partition is None or partition == "auto":
            stages = balance(used_costs, num_stages)
        else:
            stages = Partition.take(partition).ranges(len(record.cuts), num_stages)
    except ValueError as error:
        raise SplitError(str(error)) from None
    owners, frozen = list_owners(model), list_frozen(model, record, groups)
    # A model branches on what is in tensors, or on words and numbers beside them.
    given = leaves_of(dict(dummy_inputs))
    may_vary = record.real or any(not isinstance(leaf, Tensor) for leaf in given)
    segments = assign_segments(model, record, groups, may_vary)
    segments = hold_frozen(record, groups, stages, segments, owners, frozen)
    refuse_changes(record, stages, segments, groups, owners)
    refuse_attribute_changes(record, stages)
    refuse_unseen_changes(record, stages, owners)
    return Split(
        model=model,
        inputs=dict(dummy_inputs),
        device=device,
        rehearsal=rehearsal,
        record=record,
        types=types,
        kept=kept,
        costs=used_costs,
        stages=tuple(stages),
        groups=groups,
        segments=segments,
        frozen=frozen,
    )


def _widen(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values


def _without_values(tensor: Tensor) -> Tensor:
    made = tensor.detach().to("meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
