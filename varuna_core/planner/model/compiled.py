"""A schedule as arrays: its dependencies found once, timed as often as costs are given.

```
action           rank   takes          makes
1F2              1      activation 7   activation 8 ──► over a channel, in order, each for a hop
1B2              1      gradient 40    gradient 41
```

`run` times one set of costs in a plain loop; `run_batch` many at once, level by level: actions of a
level need nothing of each other. Both give what `varuna_core.schedule.simulate` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action, Kind, Schedule
from varuna_core.schedule.choice import build_schedule
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.generators import build_gpipe, build_one_f_one_b
from varuna_core.schedule.order import walk

KINDS: tuple[Kind, ...] = ("F", "f", "R", "B", "I", "W")
Array = Any
"""A numpy array: its stubs make every element Any anyway."""
Counts = tuple[int, ...]
"""Of one rank at one moment: graphs held and inputs held, in turn, of each of its stages."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """When things ended, in the unit of the costs."""

    makespan: float
    ends: tuple[float, ...]
    """Of each rank, its last action's end."""
    busy: tuple[float, ...]
    """Of each rank, its work."""
    last_backward: tuple[float, ...]
    """Of each stage, the begin of the last action that makes weight gradients."""
    starts: tuple[float, ...] = ()
    """Of each action, in the order of `Compiled.actions`; only if asked for."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a schedule asks of one stage."""

    uses: tuple[int, ...]
    """How often each kind of action runs."""
    held: tuple[Counts, ...]
    ahead: int
    """Forwards before the first backward."""
    num_microbatches: int
    gradients_last: bool
    """All forwards of all stages come before any backward."""


class Compiled:
    """One schedule's actions in an order in which they can run."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_ranks, self.num_stages = schedule.num_ranks, schedule.num_stages
        placement, last = schedule.placement, self.num_stages - 1
        stages = self.num_stages
        slots: dict[tuple[bool, int, int], int] = {}
        links: dict[tuple[int, int], int] = {}
        self.ops: list[tuple[int, int, int, int, int, int]] = []
        """(rank, cost, slot it takes, slot it makes, link, hop), -1 for none.

        The cost is kind x stages + stage, the hop 2 x boundary (+ 1 for gradients)."""
        self.actions: list[tuple[int, str, int, int]] = []
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
            self.ops.append((rank, KINDS.index(kind) * stages + stage, takes, makes, link, hop))
            self.actions.append((rank, kind, stage, microbatch))
        self.num_slots, self.num_links = count, len(links)
        self._held: tuple[tuple[Counts, ...], ...] | None = None
        self._levels: list[tuple[Array, ...]] | None = None
        self.uses = Counter(op[1] for op in self.ops)
        """How often each cost is paid."""
        self.ahead = [_count_ahead(actions) for actions in schedule.ranks]
        """Of each rank, its forwards before its first backward."""
        final = {action[2]: i for i, action in enumerate(self.actions) if action[1] in "BW"}
        self._final = [final[stage] for stage in range(stages)]

    def find_role(self, stage: int) -> Role:
        """Of a schedule with one stage a rank."""
        return Role(
            uses=tuple(self.uses[kind * self.num_stages + stage] for kind in range(6)),
            held=self.held[self.schedule.placement[stage]],
            ahead=self.ahead[self.schedule.placement[stage]],
            num_microbatches=self.schedule.num_microbatches,
            gradients_last=self.schedule.name == "gpipe",
        )

    @property
    def held(self) -> tuple[tuple[Counts, ...], ...]:
        if self._held is None:
            self._held = count_held(self.schedule)
        return self._held

    def find_last_cost(self, stage: int) -> int:
        """Which cost the stage's last action that makes weight gradients has."""
        return self.ops[self._final[stage]][1]

    def run(
        self,
        costs: Sequence[float],
        hops: Sequence[float],
        *,
        holds: Sequence[float] | None = None,
        keep_starts: bool = False,
        factors: Sequence[float] | None = None,
    ) -> Timed:
        """`costs` by `list_costs`, `hops` 2 a boundary; `factors` multiply each action's cost.

        A message keeps its link for its hop, or for what `holds` says.
        """
        holds = hops if holds is None else holds
        free = [0.0] * self.num_ranks
        busy = [0.0] * self.num_ranks
        link_free = [0.0] * self.num_links
        arrival = [0.0] * self.num_slots
        starts: list[float] = []
        final = dict.fromkeys(self._final, 0.0)
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
        return Timed(
            makespan=max(free),
            ends=tuple(free),
            busy=tuple(busy),
            last_backward=tuple(final[index] for index in self._final),
            starts=tuple(starts),
        )

    def find_makespan(self, costs: Sequence[float], hops: Sequence[float]) -> float:
        """The makespan alone: `run` without what it keeps."""
        free = [0.0] * self.num_ranks
        link_free = [0.0] * self.num_links
        arrival = [0.0] * self.num_slots
        for rank, cost, takes, makes, link, hop in self.ops:
            end = free[rank]
            if takes >= 0 and arrival[takes] > end:
                end = arrival[takes]
            end += costs[cost]
            free[rank] = end
            if makes >= 0:
                if link >= 0:
                    if link_free[link] > end:
                        end = link_free[link]
                    end += hops[hop]
                    link_free[link] = end
                arrival[makes] = end
        return max(free)

    def run_batch(
        self, costs: Array, hops: Array, holds: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Rows of candidates: (makespans, ends of ranks, last backwards' begins)."""
        holds = hops if holds is None else holds
        if self._levels is None:
            self._levels = self._find_levels()
        size = len(costs)
        free = np.zeros((self.num_ranks, size))
        link_free = np.zeros((self.num_links + 1, size))
        arrival = np.zeros((self.num_slots + 1, size))  # the last row stays 0: takes of nothing
        costs = np.ascontiguousarray(np.asarray(costs).T)
        hops, holds = (
            np.concatenate([np.asarray(rows).T, np.zeros((1, size))]) for rows in (hops, holds)
        )
        begins = np.zeros((self.num_stages, size))
        for ranks, cost, takes, senders, makes, link, hop, of_link, final, stages in self._levels:
            start = np.maximum(free[ranks], arrival[takes])
            end = start + costs[cost]
            free[ranks] = end
            if len(senders):
                sent = end[senders]
                if of_link:
                    sent = np.maximum(sent, link_free[link])
                    link_free[link] = sent + holds[hop]
                    sent += hops[hop]
                    link_free[-1] = 0.0  # what is handed over within a rank waits for no link
                arrival[makes] = sent
            if len(final):
                begins[stages] = start[final]
        return free.max(axis=0), free.T, begins.T

    def _find_levels(self) -> list[tuple[Array, ...]]:
        of_rank = [0] * self.num_ranks
        of_slot = [0] * self.num_slots
        rows: list[list[int]] = []
        for index, (rank, _, takes, makes, _, _) in enumerate(self.ops):
            level = max(of_rank[rank], of_slot[takes] if takes >= 0 else 0)
            of_rank[rank] = level + 1
            if makes >= 0:
                of_slot[makes] = level + 1
            while len(rows) <= level:
                rows.append([])
            rows[level].append(index)
        finals = {index: stage for stage, index in enumerate(self._final)}
        levels = []
        for row in rows:
            table = np.array([self.ops[index] for index in row])
            ranks, cost, takes, makes, link, hop = table.T
            senders = np.flatnonzero(makes >= 0)
            final = [place for place, index in enumerate(row) if index in finals]
            stages = [finals[row[place]] for place in final]
            levels.append(
                (
                    ranks,
                    cost,
                    takes,
                    senders,
                    makes[senders],
                    link[senders],
                    hop[senders],
                    bool((link[senders] >= 0).any()),
                    np.array(final, dtype=int),
                    np.array(stages, dtype=int),
                )
            )
        return levels


def _count_ahead(actions: Sequence[Action]) -> int:
    kinds = [action.kind for action in actions if action.kind in FORWARDS + BACKWARDS]
    return next((i for i, kind in enumerate(kinds) if kind in BACKWARDS), len(kinds))


def count_held(schedule: Schedule) -> tuple[tuple[Counts, ...], ...]:
    """What each rank may hold at once; only counts that no others exceed in every place."""
    held = []
    for rank, actions in enumerate(schedule.ranks):
        place = {s: 2 * i for i, s in enumerate(list_stages(schedule, rank))}
        now = [0] * (2 * len(place))
        seen: set[Counts] = set()
        for action in actions:
            kind, at = action.kind, place[action.stage]
            if kind == "f":
                now[at + 1] += 1
            elif kind in ("F", "R"):
                now[at] += 1
                now[at + 1] -= kind == "R"
            seen.add(tuple(now))
            if kind in ("B", "W"):
                now[at] -= 1
        held.append(_keep_largest(seen))
    return tuple(held)


def list_stages(schedule: Schedule, rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.placement) if owner == rank]


def _keep_largest(counts: set[Counts]) -> tuple[Counts, ...]:
    kept: list[Counts] = []
    for one in sorted(counts, reverse=True):
        if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)


def list_costs(costs: Costs) -> list[float]:
    """As `Compiled.run` takes them: by kind, then by stage."""
    return [cost for kind in KINDS for cost in costs.by_kind[kind]]


def list_hops(costs: Costs) -> list[float]:
    """The same both ways."""
    return [hop for hop in costs.hops for _ in range(2)]


@lru_cache(maxsize=256)
def compile_by_name(name: str, num_ranks: int, num_microbatches: int) -> Compiled:
    """Schedules that depend on no costs."""
    build = {"gpipe": build_gpipe, "1f1b": build_one_f_one_b}[name]
    return Compiled(build(num_ranks, num_microbatches))


Way = Literal["none", "full"]


class ScheduleModel:
    """A schedule of one stage a rank: the stages' roles, and the actions once asked for."""

    def __init__(self, roles: tuple[Role, ...], make: Callable[[], Compiled]) -> None:
        self.roles, self._make = roles, make

    @cached_property
    def compiled(self) -> Compiled:
        return self._make()


@lru_cache(maxsize=1024)
def find_schedule_model(
    schedule: str, stages: int, num_microbatches: int, recompute: Way
) -> ScheduleModel:
    """Of a schedule whose order depends on no costs."""

    def make() -> Compiled:
        return Compiled(build_schedule(schedule, stages, num_microbatches, recompute=recompute))

    if schedule not in ("gpipe", "1f1b", "varuna"):
        return model_schedule(make())
    roles = tuple(
        _find_role(schedule, stages - 1 - stage, num_microbatches, recompute)
        for stage in range(stages)
    )
    return ScheduleModel(roles, make)


def model_schedule(compiled: Compiled) -> ScheduleModel:
    """Of a schedule that was made."""
    roles = tuple(compiled.find_role(stage) for stage in range(compiled.num_stages))
    return ScheduleModel(roles, lambda: compiled)


def _find_role(schedule: str, behind: int, m: int, recompute: Way) -> Role:
    """With so many stages behind this one."""
    ahead = {"gpipe": m, "1f1b": behind + 1, "varuna": behind + 1 + (behind > 0)}[schedule]
    ahead = min(ahead, m)
    # A graph that is used at once is kept: to recompute it would save nothing.
    again = (recompute == "full" or schedule == "varuna") and ahead > 1
    held = ((1, ahead - 1), (0, ahead)) if again else ((ahead, 0),)
    return Role(
        uses=(0, m, m, m, 0, 0) if again else (m, 0, 0, m, 0, 0),
        held=held,
        ahead=ahead,
        num_microbatches=m,
        gradients_last=schedule == "gpipe",
    )
