"""Describe schedules for the search: the role of each stage, and timings of many plans at once.

If the registry says how far a schedule runs ahead, roles are known without building the schedule;
most plans are refused before a partition has to be timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from varuna_core.schedule.actions import BACKWARDS, COPIES, FORWARDS, Action, Kind, Schedule
from varuna_core.schedule.compiled import KINDS, Compiled, Counts, count_held, list_stages
from varuna_core.schedule.recompute import Recompute, apply_recompute
from varuna_core.schedule.registry import SCHEDULES, ScheduleKind, build_schedule

Array = Any
"""A numpy array; numpy's own types would make every element Any as well."""
Copies = tuple[tuple[Kind, tuple[Kind, ...], int], ...]
"""Copies (O, L), the kinds of work during each, and how often this occurs."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The actions that a schedule runs on one stage and the memory that it needs."""

    uses: tuple[int, ...]
    """How often each kind of action runs."""
    held: tuple[Counts, ...]
    ahead: int
    """The number of forwards before the first backward."""
    num_microbatches: int
    gradients_last: bool
    """True if all forwards of all stages come before any backward."""
    keeps_what_fits: bool = False
    """True if recomputes depend on the memory; `uses` and `held` are then lower bounds."""
    keeps_products: bool = False
    """True if recomputes reuse saved products (`recompute: selective`)."""
    copies: Copies = ()
    is_least: bool = False
    """True for a role that bounds every way of recompute from below."""


class Levels:
    """The actions of a compiled schedule by level; actions of a level do not depend on each other.

    Times many sets of costs at once, as `Compiled.run` times one.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.num_ranks, self.num_stages = compiled.num_ranks, compiled.num_stages
        self.num_slots, self.num_links = compiled.num_slots, compiled.num_links
        self._levels = _find_levels(compiled)

    def run(
        self,
        costs: Array,
        hops: Array,
        holds: Array | None = None,
        factors: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Time many candidates: return (makespans, ends of ranks, begins of last backwards).

        `factors` multiply costs: a row for each action of the schedule, a column for each
        candidate.
        """
        holds = hops if holds is None else holds
        size = len(costs)
        free = np.zeros((self.num_ranks, size))
        link_free = np.zeros((self.num_links + 1, size))
        arrival = np.zeros((self.num_slots + 1, size))  # the last row stays 0: takes of nothing
        costs = np.ascontiguousarray(np.asarray(costs).T)
        hops, holds = (
            np.concatenate([np.asarray(rows).T, np.zeros((1, size))]) for rows in (hops, holds)
        )
        begins = np.zeros((self.num_stages, size))
        for (
            actions, ranks, cost, takes, senders, makes, link, hop, of_link, final, stages
        ) in self._levels:  # fmt: skip
            start = np.maximum(free[ranks], arrival[takes])
            took = costs[cost]
            end = start + (took if factors is None else took * factors[actions])
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


def _find_levels(compiled: Compiled) -> list[tuple[Array, ...]]:
    of_rank = [0] * compiled.num_ranks
    of_slot = [0] * compiled.num_slots
    rows: list[list[int]] = []
    for index, (rank, _, takes, makes, _, _) in enumerate(compiled.ops):
        level = max(of_rank[rank], of_slot[takes] if takes >= 0 else 0)
        of_rank[rank] = level + 1
        if makes >= 0:
            of_slot[makes] = level + 1
        while len(rows) <= level:
            rows.append([])
        rows[level].append(index)
    finals = {index: stage for stage, index in enumerate(compiled.final)}
    levels = []
    for row in rows:
        table = np.array([compiled.ops[index] for index in row])
        ranks, cost, takes, makes, link, hop = table.T
        senders = np.flatnonzero(makes >= 0)
        final = [place for place, index in enumerate(row) if index in finals]
        stages = [finals[row[place]] for place in final]
        levels.append(
            (
                np.array(row),
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


class ScheduleModel:
    """A schedule's roles and ranks by stage, and its actions, which are built when needed."""

    def __init__(
        self,
        roles: tuple[Role, ...],
        make: Callable[[Recompute], Schedule],
        recompute: Recompute,
        placement: tuple[int, ...] | None = None,
    ) -> None:
        """`placement` has each stage's rank; None means one stage on each rank."""
        self.roles, self._make, self.recompute = roles, make, recompute
        self.placement = placement or tuple(range(len(roles)))

    @property
    def keeps_what_fits(self) -> bool:
        return any(role.keeps_what_fits for role in self.roles)

    @cached_property
    def plain(self) -> Schedule:
        """The schedule without recomputes, for stages that recompute only what does not fit."""
        return self._make("none")

    @cached_property
    def compiled(self) -> Compiled:
        """The schedule in which stages recompute whenever they may."""
        return Compiled(self._make("full"))

    @cached_property
    def recomputes(self) -> tuple[tuple[Array, Array], ...]:
        """For each stage, the indices of its recomputes in `compiled`, and their micro-batches."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.roles]
        for place, (_, kind, stage, microbatch) in enumerate(self.compiled.actions):
            if kind == "R":
                found[stage].append((place, microbatch))
        return tuple((np.array(rows, dtype=int).reshape(-1, 2).T) for rows in found)

    @cached_property
    def levels(self) -> Levels:
        return Levels(self.compiled)


@lru_cache(maxsize=1024)
def build_schedule_model(
    schedule: str,
    ranks: int,
    num_microbatches: int,
    recompute: Recompute,
    stages_per_rank: int = 1,
) -> ScheduleModel:
    """Build the model of a schedule, with equal costs, by name."""

    def make(wanted: Recompute) -> Schedule:
        # `auto` is everything, less what a stage turns out to keep.
        way = wanted if recompute == "auto" else recompute
        return build_schedule(
            schedule, ranks, num_microbatches, stages_per_rank=stages_per_rank, recompute=way
        )

    kind = SCHEDULES[schedule]
    if kind.count_ahead is None:
        assert recompute != "auto", "with auto, memory would change the order of actions"
        return model_schedule(Compiled(make(recompute)), recompute)
    roles = tuple(
        _build_role(kind, kind.count_ahead, ranks - 1 - stage, num_microbatches, recompute)
        for stage in range(ranks)
    )
    return ScheduleModel(roles, make, recompute)


@lru_cache(maxsize=1024)
def build_least_model(schedule: str, ranks: int, num_microbatches: int) -> ScheduleModel:
    """Build a model for lower bounds over all recompute modes; its actions have no recomputes."""
    plain = build_schedule_model(schedule, ranks, num_microbatches, "none")
    roles = tuple(replace(role, held=((1, 0),), is_least=True) for role in plain.roles)
    return ScheduleModel(roles, lambda wanted: plain.plain, "none")


def model_schedule(compiled: Compiled, recompute: Recompute) -> ScheduleModel:
    """Build the model of a given schedule."""
    stages, schedule = range(compiled.num_stages), compiled.schedule
    roles = tuple(compute_role(compiled, stage, recompute) for stage in stages)
    return ScheduleModel(roles, lambda wanted: schedule, recompute, schedule.placement)


def compute_role(compiled: Compiled, stage: int, recompute: Recompute) -> Role:
    """Return the role of a stage in a given schedule."""
    schedule = compiled.schedule
    rank = schedule.placement[stage]
    own = 2 * list_stages(schedule, rank).index(stage)
    kind = SCHEDULES.get(schedule.name)
    is_copied = recompute == "offload"
    return Role(
        uses=tuple(compiled.uses[i * compiled.num_stages + stage] for i in range(len(KINDS))),
        held=tuple(sorted({counts[own : own + 2] for counts in compiled.held[rank]})),
        ahead=_count_ahead([one for one in schedule.ranks[rank] if one.stage == stage]),
        num_microbatches=schedule.num_microbatches,
        gradients_last=kind is not None and kind.gradients_last,
        keeps_products=recompute == "selective",
        copies=list_copies(schedule.ranks[rank], stage) if is_copied else (),
    )


def list_copies(actions: Sequence[Action], stage: int) -> Copies:
    """Return the copies of a stage's graphs with the actions during each: an offload lasts until
    the rank's next copy, which needs its memory, and a load until the backward."""
    found = Counter(
        (copy.kind, tuple(_list_beside(actions, place)))
        for place, copy in enumerate(actions)
        if copy.stage == stage and copy.kind in COPIES
    )
    return tuple((*copy, count) for copy, count in sorted(found.items()))


def _list_beside(actions: Sequence[Action], place: int) -> Iterator[Kind]:
    copy = actions[place]
    for at in range(place + 1, len(actions)):
        action = actions[at]
        is_own = (action.stage, action.microbatch) == (copy.stage, copy.microbatch)
        if action.kind in COPIES if copy.kind == "O" else is_own and action.kind in BACKWARDS:
            return
        if action.kind not in COPIES:
            yield action.kind


def _build_role(
    kind: ScheduleKind,
    count_ahead: Callable[[int, int], int],
    behind: int,
    m: int,
    recompute: Recompute,
) -> Role:
    """Build the role of a stage that has `behind` later stages."""
    ahead = min(count_ahead(behind, m), m)
    if recompute == "offload":
        return _offload(ahead, m, kind.gradients_last)
    # A graph that is used at once is kept: to recompute it would save nothing.
    again = (recompute in ("full", "selective") or kind.recomputes) and ahead > 1
    held = ((1, ahead - 1), (0, ahead)) if again else ((ahead, 0),)
    return Role(
        uses=(0, m, m, m, 0, 0) if again else (m, 0, 0, m, 0, 0),
        held=held,
        ahead=ahead,
        num_microbatches=m,
        gradients_last=kind.gradients_last,
        keeps_what_fits=recompute == "auto",
        keeps_products=recompute == "selective",
    )


@lru_cache(maxsize=4096)
def _offload(ahead: int, m: int, gradients_last: bool) -> Role:
    (actions,) = (schedule := apply_recompute(make_alone(ahead, m), "offload")).ranks
    return Role(
        uses=(m, 0, 0, m, 0, 0),
        held=count_held(schedule)[0],
        ahead=ahead,
        num_microbatches=m,
        gradients_last=gradients_last,
        copies=list_copies(actions, 0),
    )


def make_alone(ahead: int, num_microbatches: int) -> Schedule:
    """Make the schedule of a single stage, which runs `ahead` forwards before its first backward,
    and then backwards and forwards in turn."""
    actions = [Action("F", 0, number) for number in range(ahead)]
    for number in range(num_microbatches):
        actions.append(Action("B", 0, number))
        if number + ahead < num_microbatches:
            actions.append(Action("F", 0, number + ahead))
    return Schedule(
        name="", ranks=(tuple(actions),), placement=(0,), num_microbatches=num_microbatches
    )
