"""Rewrite any schedule to recompute or offload activations instead of keeping them.

```
none      F0 F1 F2 F3 B0 B1 B2 B3        four graphs
full      f0 f1 f2 f3 R0 B0 R1 B1 ...    one graph and four inputs
auto      F0 F1 f2 f3 B0 B1 R2 B2 ...    two graphs: only those that do not fit are recomputed
offload   F0 O0 F1 O1 F2 O2 L0 F3 ...    two graphs and two inputs, three graphs offloaded
```

The recompute directly precedes its backward and needs no gradient, so a rank recomputes before it
waits for the gradient. A graph that is used at once is always kept, since a recompute would save no
memory.

A load is placed one action earlier than a recompute would be, so that the copy overlaps with that
action; an offload's copy overlaps with the action after it. So a rank holds two graphs at once; a
rank that would hold no more without offload offloads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from varuna_core.schedule.actions import BACKWARDS, Action, Schedule, ScheduleError
from varuna_core.schedule.held import follow_held

Recompute = Literal["none", "full", "auto", "selective", "offload"]
"""Recompute modes; in a schedule `selective` equals `full`, with a larger `f` and a faster `R`."""
USABLE = 0.9
"""Fraction of a GPU's free memory that `auto` uses; the rest is for fragmentation and temporary
tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of micro-batches on all ranks, in bytes or any other unit."""

    graphs: tuple[float, ...]
    """For each stage, memory of one micro-batch's graph, including its inputs."""
    inputs: tuple[float, ...]
    """For each stage, memory that a forward without a graph (`f`) keeps: its inputs and, in mode
    `selective`, the results of matrix products."""
    limits: tuple[float, ...]
    """For each rank, the maximum memory of all its micro-batches."""


def measure_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """Return the peak memory of each rank."""
    return tuple(max(_trace(actions, memory), default=0.0) for actions in schedule.ranks)


def apply_recompute(
    schedule: Schedule, recompute: Recompute, memory: Memory | None = None
) -> Schedule:
    """Return the schedule with the actions of this mode: forwards without a graph (`f`) and
    recomputes (`R`), or offloads (`O`) and loads (`L`). Mode `auto` needs `memory`.

    A schedule that already has such actions is returned unchanged.
    """
    if recompute == "none" or any(a.kind in "RO" for actions in schedule.ranks for a in actions):
        return schedule
    if recompute == "offload":
        return replace(schedule, ranks=tuple(map(_offload, schedule.ranks)))
    if recompute == "auto" and memory is None:
        raise ScheduleError("recompute auto needs the memory of graphs and the memory limit")
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        ends = _find_ends(actions)
        if memory is None or recompute != "auto":
            chosen = {key for key, (begin, end) in ends.items() if end > begin + 1}
        else:
            chosen = _choose(actions, ends, memory, rank)
        ranks.append(_rewrite(actions, chosen))
    return replace(schedule, ranks=tuple(ranks))


Key = tuple[int, int]
"""A stage and a micro-batch."""


def _find_ends(actions: tuple[Action, ...]) -> dict[Key, tuple[int, int]]:
    """Return the indices, in a rank's list of actions, of the forward and the first backward of
    each micro-batch on each stage."""
    begins: dict[Key, int] = {}
    ends: dict[Key, tuple[int, int]] = {}
    for index, action in enumerate(actions):
        key = (action.stage, action.microbatch)
        if action.kind == "F":
            begins[key] = index
        elif action.kind in BACKWARDS and key in begins:
            ends[key] = (begins[key], index)
    return ends


def _choose(
    actions: tuple[Action, ...], ends: dict[Key, tuple[int, int]], memory: Memory, rank: int
) -> set[Key]:
    """Choose the graphs that one rank recomputes.

    Whenever the held graphs do not fit, the graph that is used last is dropped: this frees memory
    for the longest time, so with graphs of equal size no choice recomputes less.
    """
    limit = memory.limits[rank]
    held = 0.0
    kept: list[tuple[int, Key]] = []  # by use: the backward's position; nearly sorted by itself
    chosen: set[Key] = set()
    for index, action in enumerate(actions):
        key = (action.stage, action.microbatch)
        graph, inputs = memory.graphs[action.stage], memory.inputs[action.stage]
        if action.kind == "F":
            held += graph
            _insert(kept, (ends[key][1], key))
        elif action.kind in BACKWARDS:
            if key in chosen:
                held += graph - inputs
            else:
                kept.remove((index, key))
        while held > limit:
            used_at_once = action.kind == "F" and ends[key][1] == index + 1
            if not kept or (used_at_once and kept[-1][1] == key):
                raise ScheduleError(
                    f"rank {rank}, {action}: {held:g} is held at once even if everything is "
                    f"recomputed, but the limit is {limit:g}"
                )
            _, victim = kept.pop()
            chosen.add(victim)
            held -= memory.graphs[victim[0]] - memory.inputs[victim[0]]
        if action.kind in ("B", "W"):
            held -= graph
    return chosen


def _insert(kept: list[tuple[int, Key]], item: tuple[int, Key]) -> None:
    index = len(kept)
    while index and kept[index - 1] > item:
        index -= 1
    kept.insert(index, item)


def _offload(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Add offloads to a rank's actions: `O` copies a graph of activations to the host after its
    forward, `L` copies the graph back before its backward. Graphs that are used again too soon for
    both copies stay; the actions are returned unchanged if no memory is saved."""
    ends = _find_ends(actions)
    chosen = {key for key, (begin, end) in ends.items() if end > begin + 2}
    loads = {ends[key][1] - 1: key for key in chosen}
    rewritten = []
    for index, action in enumerate(actions):
        key = (action.stage, action.microbatch)
        if index in loads:
            rewritten.append(Action("L", *loads[index]))
        rewritten.append(action)
        if action.kind == "F" and key in chosen:
            rewritten.append(Action("O", *key))
    saves = _count_graphs(rewritten) < _count_graphs(actions)
    return tuple(rewritten) if saves else actions


def _count_graphs(actions: Sequence[Action]) -> int:
    """Return the maximum number of graphs that a rank holds at once."""
    stages = sorted({action.stage for action in actions})
    counts = [sum(held.graphs.values()) for _, held in follow_held(actions, stages)]
    return max(counts, default=0)


def _rewrite(actions: tuple[Action, ...], chosen: set[Key]) -> tuple[Action, ...]:
    rewritten = []
    for action in actions:
        stage, microbatch = key = (action.stage, action.microbatch)
        if key in chosen and action.kind == "F":
            action = Action("f", stage, microbatch)
        elif key in chosen and action.kind in BACKWARDS:
            rewritten.append(Action("R", stage, microbatch))
        rewritten.append(action)
    return tuple(rewritten)


def _trace(actions: tuple[Action, ...], memory: Memory) -> list[float]:
    """Return the memory that a rank holds while each of its actions runs."""
    stages = sorted({action.stage for action in actions})
    return [
        sum(
            held.graphs[stage] * memory.graphs[stage] + held.inputs[stage] * memory.inputs[stage]
            for stage in stages
        )
        for _, held in follow_held(actions, stages)
    ]
