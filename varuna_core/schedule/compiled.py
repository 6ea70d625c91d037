"""Compile a schedule to arrays of numbers, so that its times are quickly computed for any costs.

```
action           rank   takes          makes
1F2              1      activation 7   activation 8 ──► over a channel, in order, each for a hop
1B2              1      gradient 40    gradient 41
```

A rank runs its list in order and starts an action when the rank is free and the action's input has
arrived. Sends take no time of the rank. Messages from one rank to another occupy their link one
after another, each for its hop's time, as on a bandwidth-limited link. The simulation uses no
clocks, threads or random numbers. `simulate` compiles and times a schedule in one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from varuna_core.schedule.actions import (
    BACKWARDS,
    COPIES,
    FORWARDS,
    Kind,
    Schedule,
    ScheduleError,
)
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.held import follow_held
from varuna_core.schedule.order import walk

KINDS: tuple[Kind, ...] = ("F", "f", "R", "B", "I", "W")
"""Kinds of action that compute."""
_INDEX = {kind: index for index, kind in enumerate((*KINDS, *COPIES))}
Counts = tuple[int, ...]
"""Numbers of graphs and inputs that one rank holds at one moment, for each of its stages."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """Times at which actions ended, in the unit of the costs."""

    makespan: float
    ends: tuple[float, ...]
    """End time of each rank's last action."""
    busy: tuple[float, ...]
    """Busy time of each rank."""
    last_backward: tuple[float, ...]
    """For each stage, the start time of its last action that computes weight gradients."""
    starts: tuple[float, ...] = ()
    """Start time of each action, in the order of `Compiled.actions`; only if requested."""


class Compiled:
    """A schedule's actions in an order in which they can run."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_ranks, self.num_stages = schedule.num_ranks, schedule.num_stages
        placement, last = schedule.placement, self.num_stages - 1
        stages = self.num_stages
        slots: dict[tuple[bool, int, int], int] = {}
        links: dict[tuple[int, int], int] = {}
        self.ops: list[tuple[int, int, int, int, int, int]] = []
        """(rank, cost, input slot, output slot, link, hop) of each action; -1 means none. The cost
        index is kind x stages + stage, the hop index 2 x boundary (+ 1 for gradients)."""
        self.actions: list[tuple[int, Kind, int, int]] = []
        count = 0
        for rank, action in walk(schedule):
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            forward = kind in FORWARDS
            takes = makes = link = hop = -1
            if forward or kind in BACKWARDS:
                if stage > 0 if forward else stage < last:
                    takes = slots.pop((forward, stage, microbatch))
                if stage < last if forward else stage > 0:
                    target = stage + 1 if forward else stage - 1
                    makes = slots[forward, target, microbatch] = count
                    count += 1
                    if placement[target] != rank:
                        link = links.setdefault((rank, placement[target]), len(links))
                        hop = 2 * min(stage, target) + (not forward)
            self.ops.append((rank, _INDEX[kind] * stages + stage, takes, makes, link, hop))
            self.actions.append((rank, kind, stage, microbatch))
        self.num_slots, self.num_links = count, len(links)

    @cached_property
    def held(self) -> tuple[tuple[Counts, ...], ...]:
        """Return how many autograd graphs and inputs each rank holds, as in `count_held`."""
        return count_held(self.schedule)

    @cached_property
    def uses(self) -> Counter[int]:
        """Count, for each cost, the actions of the schedule that have it."""
        return Counter(op[1] for op in self.ops)

    @cached_property
    def final(self) -> tuple[int, ...]:
        """Index of each stage's last action that computes weight gradients (B or W); -1 for a stage
        that has none."""
        final = {action[2]: i for i, action in enumerate(self.actions) if action[1] in "BW"}
        return tuple(final.get(stage, -1) for stage in range(self.num_stages))

    def compute_last_cost(self, stage: int) -> int:
        """Return the cost index of a stage's last action that computes weight gradients."""
        return self.ops[self.final[stage]][1]

    def run(
        self,
        costs: Sequence[float],
        hops: Sequence[float],
        *,
        holds: Sequence[float] | None = None,
        keep_starts: bool = False,
        factors: Sequence[float] | None = None,
    ) -> ScheduleTimes:
        """Simulate the schedule with `costs` from `list_costs` and two `hops` per stage boundary.

        Each action's cost is multiplied by its entry in `factors`. A message occupies its link for
        the time of its hop, or of its entry in `holds`.
        """
        holds = hops if holds is None else holds
        free = [0.0] * self.num_ranks
        busy = [0.0] * self.num_ranks
        link_free = [0.0] * self.num_links
        arrival = [0.0] * self.num_slots
        starts: list[float] = []
        final = dict.fromkeys(self.final, 0.0)
        for index, (rank, cost, takes, makes, link, hop) in enumerate(self.ops):
            start = free[rank]
            if takes >= 0 and arrival[takes] > start:
                start = arrival[takes]
            took = costs[cost]
            if factors is not None:
                took *= factors[index]
            end = start + took
            free[rank] = end
            busy[rank] += took
            if makes >= 0:
                if link >= 0:
                    if link_free[link] > end:
                        end = link_free[link]
                    link_free[link] = end + holds[hop]
                    end += hops[hop]
                arrival[makes] = end
            if keep_starts:
                starts.append(start)
            if index in final:
                final[index] = start
        return ScheduleTimes(
            makespan=max(free, default=0.0),
            ends=tuple(free),
            busy=tuple(busy),
            last_backward=tuple(final[index] for index in self.final),
            starts=tuple(starts),
        )


def count_held(schedule: Schedule) -> tuple[tuple[Counts, ...], ...]:
    """Return the distinct maximal numbers of graphs and inputs that each rank holds at once."""
    found = []
    for rank, actions in enumerate(schedule.ranks):
        stages = list_stages(schedule, rank)
        seen = {
            tuple(count[stage] for stage in stages for count in (held.graphs, held.inputs))
            for _, held in follow_held(actions, stages)
        }
        found.append(_keep_largest(seen))
    return tuple(found)


def list_stages(schedule: Schedule, rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.placement) if owner == rank]


def _keep_largest(counts: set[Counts]) -> tuple[Counts, ...]:
    kept: list[Counts] = []
    for one in sorted(counts, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)


def list_costs(costs: Costs) -> list[float]:
    """Return the costs of computations as `Compiled.run` takes them, by kind, then stage."""
    return [cost for kind in KINDS for cost in costs.by_kind[kind]]


def list_all_costs(costs: Costs) -> list[float]:
    """Return the costs for schedules that may offload: computations first, then copies."""
    return list_costs(costs) + [cost for kind in COPIES for cost in costs.by_kind[kind]]


def list_hops(costs: Costs) -> list[float]:
    """Return the hops in the form that `Compiled.run` takes, equal in both directions."""
    return [hop for hop in costs.hops for _ in range(2)]


def unlist_costs(listed: Sequence[float], hops: Sequence[float]) -> Costs:
    """Return Costs from lists in the form that `Compiled.run` takes, with or without copies; for
    each hop, the slower direction is used."""
    size = len(hops) // 2 + 1
    each = {kind: tuple(listed[at * size : (at + 1) * size]) for kind, at in _INDEX.items()}
    return Costs(
        forward=each["F"],
        input_grad=each["I"],
        weight_grad=each["W"],
        backward=each["B"],
        recompute=each["R"],
        offload=each["O"],
        load=each["L"],
        hops=tuple(map(max, hops[::2], hops[1::2])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTiming:
    """Times of a simulated step, in the unit of the costs."""

    makespan: float
    busy: tuple[float, ...]
    """Busy time of each rank; the rest of the makespan is the rank's bubble."""
    starts: tuple[tuple[float, ...], ...]
    """Start time of each action of each rank."""

    @property
    def bubble(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_share(self) -> float:
        """Return the idle fraction of the ranks' total time."""
        return sum(self.bubble) / (self.makespan * len(self.busy)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs) -> ScheduleTiming:
    """Simulate a schedule; raise ScheduleError if its ranks deadlock."""
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(f"{schedule}, but costs are given for {costs.num_stages} stages")
    compiled = Compiled(schedule)
    timed = compiled.run(list_all_costs(costs), list_hops(costs), keep_starts=True)
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    for start, op in zip(timed.starts, compiled.ops, strict=True):
        starts[op[0]].append(start)
    return ScheduleTiming(
        makespan=timed.makespan, busy=timed.busy, starts=tuple(map(tuple, starts))
    )
