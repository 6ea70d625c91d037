"""Which parameter lies where: names of one tensor, segments that use it, what cannot be shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.record import Record, tensor_names
from varuna_core.runtime.split.stubs import plan_stubs


@dataclass(frozen=True, kw_only=True)
class TiedWeight:
    """One parameter under several names, or in several stages."""

    names: tuple[str, ...]
    """In the model's order; the first one's values count at the start."""

    stages: tuple[int, ...]
    """The stages that hold it; their gradients add up."""


def group_names(
    model: nn.Module, shared_weights: Sequence[Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Each parameter name to all names of its tensor: tied in the model, or named as shared."""
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
                raise SplitError(f"shared_weights names {name!r}, which is no parameter")
            if parameters[name].shape != parameters[pair[0]].shape:
                raise SplitError(
                    f"shared weights {pair[0]!r} {list(parameters[pair[0]].shape)} and "
                    f"{name!r} {list(parameters[name].shape)} differ in shape"
                )
        join(pair)
    return {name: tuple(sorted(group, key=order.__getitem__)) for name, group in groups.items()}


def assign_segments(
    model: nn.Module, record: Record, groups: Mapping[str, tuple[str, ...]]
) -> dict[str, frozenset[int]]:
    """Where each parameter and buffer is used; an unused one lies with its module or neighbour."""
    seen = {name: {segment for segment, _ in uses} for name, uses in record.uses.items()}
    found: dict[str, frozenset[int]] = {}
    last = 0
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for name in names:
        used = set().union(*(seen.get(other, set()) for other in groups.get(name, (name,))))
        used = used or _segments_of_module(record, name) or {last}
        found[name], last = frozenset(used), max(used)
    return found


def _segments_of_module(record: Record, name: str) -> set[int]:
    """Of the nearest module above that was called and lies in one segment a call."""
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        calls = [call for call in record.calls if call.module == path and call.end >= 0]
        if calls:
            within = all(call.begin == call.end for call in calls)
            return {call.begin for call in calls} if within else set()
    return set()


def list_owners(model: nn.Module) -> set[str]:
    """The modules within the model that own parameters."""
    return {name for name, m in model.named_modules() if name and any(True for _ in m.parameters())}


def list_frozen(
    model: nn.Module, record: Record, groups: Mapping[str, tuple[str, ...]]
) -> frozenset[str]:
    """Parameters that nothing changes: without gradient, and not written by the forward."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(
        name
        for name, names in groups.items()
        if not any(parameters[other].requires_grad or other in record.changes for other in names)
    )


def is_read_before(record: Record, names: Iterable[str], first: int, stubbed: set[int]) -> bool:
    """Code that runs in spite of the stubs reads the tensor before segment `first`."""
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
    """`segments`, with frozen parameters in each stage that has plain code before it read them.

    What such code makes of them is the same in each stage, and may be used there.
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
    """What a forward changes must change in one stage, and be read where the change is seen."""

    def stages_of(found: Iterable[int]) -> list[int]:
        return sorted({next(i for i, held in enumerate(stages) if s in held) for s in found})

    for name, changed in record.changes.items():
        where = stages_of(changed)
        readers = [i for i in stages_of(segments[name]) if i not in where]
        kind = "parameter" if name in groups else "buffer"
        remedy = "keep it in one stage by another partition, or make one for each side"
        if len(where) > 1:
            raise SplitError(
                f"{kind} {name!r} is changed in stage {where[0]} and in stage {where[-1]}, each "
                f"of which would have its own: {remedy}"
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
