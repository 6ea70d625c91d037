"""Search plans with several stages a rank, and plans whose order of actions follows their costs.

```
promising   floors of 1f1b, less of the bubble: cuts by the largest stage's work, then moves of
            segments as long as one helps; the best get the order for the costs of their cuts
the rest    the least bound comes next (rank_bounds.py): all cuts of a placement where there are
            few, moves where there are many; what is above the best plan is ruled out
```

Plans that a limit or the deadline leaves unsearched are part of the bound of their class.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.cluster import PlacedPipeline
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.tables import Array, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.search.coverage import PlanClass, Stop, list_not_searched, make_class
from varuna_core.planner.search.deadline import Deadline
from varuna_core.planner.search.partition import (
    CLOSE,
    IsLate,
    improve,
    is_allowed,
    list_moves,
    never,
)
from varuna_core.planner.search.rank_bounds import PlacedBounds, bound_counts, bound_least
from varuna_core.planner.search.search import Candidate, Search, Searched, measure_simplicity
from varuna_core.planner.search.space import NAMES as PLACEMENT_CLASSES
from varuna_core.planner.search.space import SEARCHED, Option, Wishes
from varuna_core.schedule.registry import SCHEDULES, has_one_stage_a_rank

NAMES = tuple(name for name in SCHEDULES if not has_one_stage_a_rank(name))
BY_COSTS = tuple(name for name in SCHEDULES if name not in SEARCHED)
"""The schedules of this search: those with several stages a rank, and zero_bubble."""
GUIDE = "1f1b"
"""Schedule whose lower bounds order the shapes and placements."""
MOST_STAGES = 4
"""Most stages of a rank with a schedule that takes any number."""
MOST_TRIED, MORE_TRIED = 60, 20
"""The numbers of placements whose cuts are improved by moves: promising ones, and others."""
PLACEMENTS = 2
"""Promising placements that are tried with the same number of stages on each kind of place."""
MOST_CUTS = 20_000
"""A placement with at most this number of partitions has all of them bounded."""
MOST_ROWS = 400_000
"""Cuts that are bounded in one search."""
TOGETHER = 512
"""Partitions that are timed at once."""
MOST_ORDERS = 16
"""Orders that are made for costs in one search, each for one partition."""
ORDER_S = 1e-4
"""First guess of the time to make an order for costs, per micro-batch and pair of stages."""
MOST_SETTLED = 4
"""Promising plans whose order of actions is made for the costs of their cuts."""
PROMISING = 1.2
"""An order is made for the costs of plans that take at most the best step time times this."""
MOST_TURNS = 2
"""Rounds of ordering the actions for a partition and improving the partition in that order."""


@dataclass(frozen=True, kw_only=True)
class _Start:
    option: Option
    row: tuple[int, ...]
    stages_per_rank: int


@dataclass(frozen=True, kw_only=True)
class _Tried:
    option: Option
    chain: SeveralStages
    bounds: Bounds
    step_s: float


class _Rows(NamedTuple):
    """Counts of ranks on each kind of place, sorted by their floors, starting at `at`."""

    counts: Array
    floors: Array
    at: int


_Shape = tuple[Option, int]
"""An option and its number of stages on each rank."""


def list_names(training: TrainingModel, wishes: Wishes) -> tuple[str, ...]:
    """Return the names of the schedules to try."""
    if wishes.zero == 3:
        return ()
    if wishes.schedule is None:
        is_free = training.may_have_several_stages and wishes.partition is None
        return BY_COSTS if is_free else ()
    return (wishes.schedule,) if is_by_costs(wishes) else ()


def is_by_costs(wishes: Wishes) -> bool:
    """Return True if the wishes ask for a schedule with several stages a rank, or for one whose
    order of actions follows the costs."""
    return wishes.schedule in NAMES or (wishes.schedule in BY_COSTS and wishes.least > 0)


def build_guide(wishes: Wishes) -> Wishes:
    """Return the wishes for the search with one stage a rank, which guides this one."""
    if not is_by_costs(wishes):
        return wishes
    if wishes.zero == 3:
        raise PlanningError(f"schedule {wishes.schedule} cannot be planned with zero 3: use 1f1b")
    return replace(wishes, schedule=GUIDE, partition=None)


def try_several(
    question: Search, searched: Searched | None, wishes: Wishes, deadline: Deadline
) -> Searched | None:
    """Return the result with plans of several stages a rank added, if the wishes allow them."""
    only_several = is_by_costs(wishes)
    names = list_names(question.tables.training, wishes)
    kept = () if only_several or searched is None else searched.candidates
    limit = kept[0].step_s * (1 - CLOSE) if kept else float("inf")
    search = _Several(question, wishes, names, limit, deadline)
    search.run()
    if only_several:
        question.found.clear()
    question.found.update(search.found)
    ordered = sorted(
        (*kept, *search.found.values()), key=lambda one: (one.step_s, measure_simplicity(one))
    )
    if not ordered:
        return None
    classes = () if only_several or searched is None else searched.classes
    classes = (*classes, *search.list_classes(ordered[0].step_s))
    left_out = list_not_searched(classes, question.tables, question.placements.cluster, wishes)
    base = searched or Searched(
        candidates=(), proofs=(), num_options=0, num_placements=0, took_s=0.0, classes=()
    )
    return replace(
        base,
        candidates=tuple(ordered),
        classes=(*classes, *left_out),
        took_s=deadline.took_s,
    )


class _Several:
    """Search for plans, for one planning request, in which each rank has several stages."""

    def __init__(
        self,
        question: Search,
        wishes: Wishes,
        names: tuple[str, ...],
        limit: float,
        deadline: Deadline,
    ) -> None:
        self.question, self.wishes, self.names, self.deadline = question, wishes, names, deadline
        self.tables, self.best_s = question.tables, limit
        self.shapes = list(self._list_shapes())
        self.found: dict[Option, Candidate] = {}
        self.open: dict[_Shape, float] = {}
        """The least bound of the plans that were not searched, keyed by shape."""
        self.why = Stop.NUMBER
        self.counts: dict[tuple[int, ...], tuple[list[tuple[str, ...]], Array, Array]] = {}
        self.order_s = ORDER_S
        self.rows_left, self.orders_left = MOST_ROWS, MOST_ORDERS
        self.tries_left = MORE_TRIED

    def run(self) -> None:
        if self.shapes:
            self._dive()
            self._look()

    def list_classes(self, best_s: float) -> Iterator[PlanClass]:
        """Yield the class of schedules with several stages a rank, then that with one."""
        near = best_s * (1 - CLOSE)
        for is_one in (False, True):
            own = [one for one in self.shapes if (one[1] == 1) == is_one]
            still = [self.open[one] for one in own if self.open.get(one, near) < near]
            if own:
                yield make_class(
                    [option for option, _ in own],
                    stages_per_rank=tuple(sorted({each for _, each in own})),
                    placements=PLACEMENT_CLASSES[self.question.tier],
                    num_open=len(still),
                    of=len(own),
                    why=self.why,
                    bound_s=min([best_s, *still]),
                )

    def is_late(self) -> bool:
        """Return True if there is a plan and time is up."""
        return math.isfinite(self.best_s) and self.deadline.is_over()

    def _list_shapes(self) -> Iterator[_Shape]:
        for option in self.question.options:
            if option.schedule != GUIDE or option.shape.zero == 3:
                continue
            if self.wishes.is_for_memory(option.recompute) or option.recompute == "auto":
                continue
            for name in self.names:
                for each in count_each(name, self.tables.training):
                    if 2 * each <= self.tables.size:
                        yield replace(option, schedule=name), each

    # Promising plans.

    def _dive(self) -> None:
        tried = self._try_promising()
        for number, one in enumerate(sorted(tried, key=lambda one: one.step_s)):
            if number >= MOST_SETTLED or one.step_s > self.best_s * PROMISING:
                break
            if number and self.is_late():
                break
            if self._has_time(one.option, one.chain.num_stages):
                self._settle(one)

    def _try_promising(self) -> list[_Tried]:
        count, best_s = 0, self.best_s
        found: list[_Tried] = []
        for start in self._list_starts():
            if count >= MOST_TRIED or self.is_late() or (found and self.deadline.is_over()):
                break
            best = min(found, key=lambda one: one.step_s, default=None)
            if best is not None and not self._has_time(best.option, best.chain.num_stages, 2):
                break  # the rest is for the order of its own costs
            shape = start.option.shape
            placements = self.question.placements.iterate(shape.tensor, shape.replicas, start.row)
            for placed in itertools.islice(placements, PLACEMENTS):
                bounds = PlacedBounds(self.tables, start.option, placed, start.stages_per_rank)
                if not bounds.bound_all() < best_s:
                    continue
                if not self._has_time(start.option, len(bounds.places)):
                    continue
                count += 1
                chain = make_chain(self.tables, start.option, placed, start.stages_per_rank)
                tried = self._try(start.option, chain)
                if tried is not None:
                    best_s = min(best_s, tried.step_s)
                    found.append(tried)
        return found

    def _has_time(self, option: Option, num_stages: int, orders: int = 1) -> bool:
        """Return True if earlier orders suggest that time suffices, or if there is no plan yet."""
        took = 0.0
        if SCHEDULES[option.schedule].splits_backward:
            took = orders * self.order_s * option.num_microbatches * num_stages**2
        return not (math.isfinite(self.best_s) and self.deadline.is_over(took))

    def _settle_given(self, option: Option, chain: SeveralStages, bounds: Bounds) -> None:
        """Keep the plan of these cuts, and note how long making its order took."""
        since = self.deadline.rest()
        settled = settle(option, chain, bounds, is_given=True)
        size = option.num_microbatches * chain.num_stages**2
        self.order_s = max(self.order_s, since.took_s / size)
        if settled is not None:
            self._keep(settled)

    def _list_starts(self) -> Iterator[_Start]:
        """Yield placements to start from, the most promising first."""
        starts: list[tuple[float, int, Option, Array, int]] = []
        size, wishes = self.tables.size, self.wishes
        known = {(one[0].shape, one[0].recompute): one for one in self.shapes}
        for option, _, counts, floors in self.question.listed:
            if option.schedule != GUIDE or (option.shape, option.recompute) not in known:
                continue
            if self.is_late():
                break
            ranks, m = counts.sum(axis=1), option.num_microbatches
            for several in sorted({each for name in self.names for each in self._count(name)}):
                expected = floors * (m + (ranks - 1) / several) / (m + ranks - 1)
                fits = (ranks > 1) & (ranks * several <= size) & np.isfinite(floors)
                if wishes.partition is not None:
                    fits &= ranks * several == len(wishes.partition)
                expected = np.where(fits, expected, np.inf)
                some = np.argsort(expected, kind="stable")[:MOST_TRIED]
                for at in some[np.isfinite(expected[some])]:
                    starts.append((float(expected[at]), len(starts), option, counts[at], several))
        for _, _, option, row, several in sorted(starts, key=lambda one: one[:2]):
            for name in self.names:
                if several in self._count(name):
                    yield _Start(
                        option=replace(option, schedule=name),
                        row=tuple(map(int, row)),
                        stages_per_rank=several,
                    )

    def _count(self, name: str) -> Sequence[int]:
        return count_each(name, self.tables.training)

    def _try(self, option: Option, chain: SeveralStages) -> _Tried | None:
        bounds = _choose_cuts(chain, self.wishes.partition, self.deadline.is_over)
        if bounds is None:
            return None
        step_s = float(chain.compute_steps([bounds])[0])
        return _Tried(option=option, chain=chain, bounds=bounds, step_s=step_s)

    def _settle(self, one: _Tried) -> None:
        is_given = self.wishes.partition is not None
        num_stages = one.chain.num_stages
        settled = settle(
            one.option,
            one.chain,
            one.bounds,
            is_given,
            lambda: not self._has_time(one.option, num_stages),
        )
        if settled is not None:
            self._keep(settled)

    def _keep(self, one: Candidate) -> None:
        known = self.found.get(one.option)
        if known is None or one.step_s < known.step_s:
            self.found[one.option] = one
        self.best_s = min(self.best_s, one.step_s)

    # The rest.

    def _look(self) -> None:
        turns = itertools.count()
        heap: list[tuple[float, int, _Rows | PlacedBounds | None, _Shape]] = []

        def push(bound: float, one: _Rows | PlacedBounds | None, shape: _Shape) -> None:
            if bound < self.best_s * (1 - CLOSE):
                heapq.heappush(heap, (bound, next(turns), one, shape))

        def push_rows(rows: _Rows, shape: _Shape) -> None:
            if rows.at < len(rows.floors):
                push(float(rows.floors[rows.at]), rows, shape)

        for shape in self.shapes:
            push(self._bound_shape(shape), None, shape)
        while heap and heap[0][0] < self.best_s * (1 - CLOSE):
            bound, _, one, (option, each) = heapq.heappop(heap)
            is_late = self.is_late()
            if is_late or self.tries_left <= 0:
                self.why = Stop.TIME if is_late else Stop.NUMBER
                for least, _, _, shape in [(bound, 0, one, (option, each)), *heap]:
                    self._leave_open(shape, least)
                return
            if one is None:
                push_rows(self._list_rows((option, each)), (option, each))
            elif isinstance(one, _Rows):
                push_rows(one._replace(at=one.at + 1), (option, each))
                row = tuple(int(n) for n in one.counts[one.at])
                tensor, replicas = option.shape.tensor, option.shape.replicas
                for placed in self.question.placements.iterate(tensor, replicas, row):
                    bounds = PlacedBounds(self.tables, option, placed, each)
                    push(max(bound, bounds.bound_all()), bounds, (option, each))
            else:
                left = self._search_cuts(one, bound)
                if left < self.best_s * (1 - CLOSE):
                    self._leave_open((option, each), left)

    def _leave_open(self, shape: _Shape, bound: float) -> None:
        self.open[shape] = min(bound, self.open.get(shape, math.inf))

    def _list_counts(self, shape: _Shape) -> tuple[list[tuple[str, ...]], Array, Array]:
        """Return the kinds of places, rows with the counts of ranks, and each column's largest."""
        option, each = shape
        key = option.shape.tensor, option.shape.replicas, each
        if key not in self.counts:
            columns, counts = self.question.placements.list_counts(
                *key[:2], self.wishes.stages, self.question.tier
            )
            ranks = counts.sum(axis=1)
            # One rank alone has 1f1b's order: of use only where another is asked for.
            fewest = 1 if each == 1 and self.wishes.schedule is not None else 2
            counts = counts[(ranks >= fewest) & (ranks * each <= self.tables.size)]
            self.counts[key] = columns, counts, counts.max(axis=0, initial=0)
        return self.counts[key]

    def _bound_shape(self, shape: _Shape) -> float:
        """Return a lower bound for all rows of a shape; inf without rows."""
        columns, counts, most = self._list_counts(shape)
        return bound_least(self.tables, shape[0], columns, most) if len(counts) else math.inf

    def _list_rows(self, shape: _Shape) -> _Rows:
        option, each = shape
        columns, counts, _ = self._list_counts(shape)
        floors = bound_counts(self.tables, option, columns, counts, each)
        order = np.argsort(floors, kind="stable")
        return _Rows(counts[order], floors[order], 0)

    def _search_cuts(self, bounds: PlacedBounds, bound: float) -> float:
        """Search the partitions of a placement; return a lower bound of those not timed."""
        option, splits = bounds.option, bounds.splits
        cuts = self._list_cuts(len(bounds.places))
        if cuts is None and not self._has_time(option, len(bounds.places)):
            self.why = Stop.TIME
            return bound
        if cuts is None:
            self.tries_left -= 1
            tried = self._try(option, self._make_chain(bounds))
            if tried is not None and tried.step_s < self.best_s * PROMISING:
                self._settle(tried)
            return bound
        least = bounds.bound_partitions(cuts)
        order = np.argsort(least, kind="stable")
        chain = None
        for at in range(0, len(order), 1 if splits else TOGETHER):
            first = float(least[order[at]])
            if not first < self.best_s * (1 - CLOSE):
                return math.inf
            has_time = self._has_time(option, len(bounds.places))
            if (splits and self.orders_left <= 0) or not has_time:
                self.why = Stop.NUMBER if has_time else Stop.TIME
                return max(bound, first)
            chain = chain or self._make_chain(bounds)
            if splits:
                self.orders_left -= 1
                self._settle_given(option, chain, tuple(cuts[order[at]].tolist()))
            else:
                self._time(option, chain, cuts[order[at : at + TOGETHER]])
        return math.inf

    def _make_chain(self, bounds: PlacedBounds) -> SeveralStages:
        return make_chain(self.tables, bounds.option, bounds.placed, bounds.each)

    def _list_cuts(self, num_stages: int) -> Array | None:
        """Return all partitions; None if there are too many."""
        size, wanted = self.tables.size, num_stages - 1
        if self.wishes.partition is not None:
            given = np.cumsum([0, *self.wishes.partition])[None, :]
            fits = given.shape[1] == num_stages + 1
            return given if fits else np.zeros((0, num_stages + 1), dtype=int)
        count = math.comb(size - 1, wanted)
        if count > min(MOST_CUTS, self.rows_left):
            return None
        self.rows_left -= count
        chosen = np.array(list(itertools.combinations(range(1, size), wanted)), dtype=int)
        ends = np.zeros((len(chosen), 1), dtype=int)
        return np.concatenate([ends, chosen.reshape(len(chosen), -1), ends + size], axis=1)

    def _time(self, option: Option, chain: SeveralStages, cuts: Array) -> None:
        cuts = cuts[chain.select_fitting(cuts)]
        if not len(cuts):
            return
        steps = chain.compute_steps(cuts)
        at = int(steps.argmin())
        if steps[at] < self.best_s * (1 - CLOSE):
            self._settle_given(option, chain, tuple(cuts[at].tolist()))


def find_at(
    tables: Tables, option: Option, placed: PlacedPipeline, stages_per_rank: int
) -> Candidate | None:
    """Return a candidate with the best cuts found for one placement; None if none fits."""
    chain = make_chain(tables, option, placed, stages_per_rank)
    bounds = _choose_cuts(chain, None)
    return None if bounds is None else settle(option, chain, bounds, is_given=False)


def count_each(schedule: str, training: TrainingModel) -> Sequence[int]:
    """Return the numbers of stages per rank that are tried."""
    own = SCHEDULES[schedule].stages_per_rank
    if own is None and training.overlap_sends:
        return range(2, MOST_STAGES + 1)
    return (own or 2,)


def make_chain(
    tables: Tables, option: Option, placed: PlacedPipeline, stages_per_rank: int
) -> SeveralStages:
    """Build the chain of a placement with the order of actions for even costs."""
    work = build_schedule_model(
        option.schedule,
        len(placed.sites),
        option.num_microbatches,
        option.recompute,
        stages_per_rank,
    )
    return SeveralStages(tables, option.shape, placed, work)


def _choose_cuts(
    chain: SeveralStages, partition: Sequence[int] | None, is_late: IsLate = never
) -> Bounds | None:
    """Return the best cuts found for a chain; None if none fits."""
    if partition is not None:
        bounds = tuple(itertools.accumulate(partition, initial=0))
        return bounds if is_allowed(chain, bounds) else None
    begin = chain.follow_bound()
    if begin is not None:
        begin = _make_fit(chain, begin)
    return None if begin is None else improve(chain, begin, is_late)[0]


def _make_fit(chain: SeveralStages, bounds: Bounds) -> Bounds | None:
    """Move segments from the fullest ranks until all fit; None if no move helps."""
    share = float(chain.compute_shares(np.array([bounds]))[0])
    while share > 1:
        moved = list_moves(chain, bounds)
        moved = moved[Chain.select_fitting(chain, moved)]
        if not len(moved):
            return None
        shares = chain.compute_shares(moved)
        place = int(shares.argmin())
        if not shares[place] < share:
            return None
        bounds, share = tuple(moved[place].tolist()), float(shares[place])
    return bounds


def settle(
    option: Option,
    chain: SeveralStages,
    bounds: Bounds,
    is_given: bool,
    is_late: IsLate = never,
) -> Candidate | None:
    """Return the candidate with the order of actions that the runtime makes for the costs of its
    cuts; None if that order needs too much memory. Cuts not given by the user may be improved."""
    best: Candidate | None = None
    for _ in range(MOST_TURNS):
        costs = chain.compute_costs(bounds)
        chain = chain.follow_costs(costs)
        if not is_allowed(chain, bounds):
            break
        step_s = chain.compute_step(bounds)
        if best is not None and not step_s < best.step_s * (1 - CLOSE):
            break
        best = Candidate(
            option=option,
            placed=chain.placed,
            bounds=bounds,
            step_s=step_s,
            order=chain.schedule,
            costs=costs,
        )
        if is_given or is_late():
            break
        bounds, _ = improve(chain, bounds, is_late)
        if bounds == best.bounds:
            break
    return best
