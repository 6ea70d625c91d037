"""Find the fastest plan of a space, and prove that it is the fastest.

```
options      every shape and schedule, by their floors (bounds.py)       ─┐ what is above the best
counts       how many stages on each kind of place, by their floors       │ plan so far is not
placements   every order; the least bound of any partition (chain.py)     │ looked into
partitions   branch and bound on the simulated step (partition.py)       ─┘
```

First plans are found, most promising first; then the rest is proved to be no better. Plans for
which time did not suffice leave a gap.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.cluster import Cluster, PlacedPipeline
from varuna_core.planner.model.schedule_model import (
    ScheduleModel,
    build_least_model,
    build_schedule_model,
)
from varuna_core.planner.model.tables import Array, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.search.bounds import Cells, Floors
from varuna_core.planner.search.coverage import PlanClass, Stop, make_class
from varuna_core.planner.search.deadline import Deadline, within
from varuna_core.planner.search.partition import (
    CLOSE,
    COARSE,
    FINE,
    find_partition,
    improve,
    is_allowed,
)
from varuna_core.planner.search.space import (
    FOR_MEMORY,
    NAMES,
    Option,
    Placements,
    Tier,
    Wishes,
    list_options,
)
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import place_stages


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with its simulated step time."""

    option: Option
    placed: PlacedPipeline
    bounds: Bounds
    step_s: float
    order: ScheduleModel | None = field(default=None, compare=False, repr=False)
    """With several stages a rank, the order of actions made for the costs of these cuts; None if
    the schedule's name and sizes determine it."""
    costs: Costs | None = field(default=None, compare=False, repr=False)
    """The costs that the order was made for; a run with other costs may make another order."""

    @property
    def stages_per_rank(self) -> int:
        return (len(self.bounds) - 1) // len(self.placed.sites)

    @property
    def places(self) -> tuple[int, ...]:
        """The rank in a replica of each stage."""
        return place_stages(self.option.schedule, len(self.placed.sites), self.stages_per_rank)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The best plan of a class of placements, and a lower bound."""

    placement_class: str
    best_s: float
    bound_s: float
    """Lower bound for the plans of the class."""

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.best_s)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Result of a search: plans, best first, and proofs."""

    candidates: tuple[Candidate, ...]
    """The best plan, then the plans timed on the way, one for each shape."""
    proofs: tuple[Proof, ...]
    """Proofs for ever larger classes of placements; the last covers all that was searched."""
    num_options: int
    num_placements: int
    """The number of placements that were searched; floors ruled out the others."""
    took_s: float
    classes: tuple[PlanClass, ...]
    """All classes that the wishes allow, those that were searched first."""
    simpler: Candidate | None = None
    """A plan preferred to the best one: simpler, and within the band of its time."""

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def chosen(self) -> Candidate:
        return self.simpler or self.best

    @property
    def bound_s(self) -> float:
        """Lower bound for all plans of the searched classes."""
        bounds = [one.bound_s for one in self.classes if one.bound_s is not None]
        return min(self.chosen.step_s, *bounds)

    @property
    def gap(self) -> float:
        """Share of the chosen plan's time that another plan of the searched classes might save."""
        return max(0.0, 1 - self.bound_s / self.chosen.step_s)


TIER_SHARE = 0.7
"""Share of the time limit for a class of placements that is followed by a larger class."""
LIST_SHARE = 0.3
"""Share of a class's time for computing the floors of options, once there is a plan."""
DIVE_SHARE = 0.3
"""Share of the time that is left for first plans of a class, before any plan is ruled out."""
PROMISING = 1.05
"""A first partition is improved if it takes at most this multiple of the best plan's time."""
MOST_LOOKS = 200
"""The most placements that are searched for a simpler plan."""
BEYOND = 1.2
"""Options are kept for a simpler plan up to this multiple of the best plan's time."""
FEW_NODES = 2_000
"""Limit on the nodes of the branch and bound search in each placement searched for a simpler
plan."""
MOST_NODES = 20_000
"""Limit on the nodes of the branch and bound search in a placement in the first round; each further
round has eight times as many."""
_Floor = tuple[Option, list[tuple[str, ...]], Array, Array]
"""An option, its kinds of places, rows with the number of stages on each kind, and a lower bound
for each row."""


def measure_simplicity(candidate: Candidate) -> tuple[int, ...]:
    """Return a key that sorts candidates, simplest first."""
    return candidate.option.measure_simplicity(len(candidate.placed.sites))


class _Group(NamedTuple):
    """Options that are searched together; their rows have rough bounds only."""

    floors: list[_Floor]


class _Counts(NamedTuple):
    """The remaining rows of options, sorted by their floors; `at` is the first of them."""

    counts: Array
    floors: Array
    """Floors by option, then by row."""
    order: Array
    at: int


class _Sharp(NamedTuple):
    """A chain whose bound was computed cell by cell."""

    chain: Chain
    nodes: int
    """Nodes of branch and bound for the next round."""


class Search:
    """Search for the fastest plan of one profile, training, cluster and set of wishes."""

    def __init__(
        self,
        profile: Profile,
        training: TrainingModel,
        cluster: Cluster,
        wishes: Wishes | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Without a deadline, a search is limited to a minute."""
        self.wishes = wishes or Wishes()
        self.tables = Tables(profile, training)
        self.floors = Floors(self.tables, cluster)
        self.options = list_options(profile, training, cluster, self.wishes)
        most = profile.model.num_segments
        if self.wishes.least == 0:
            most = max(most, self.wishes.stages or 0)
        self.placements = Placements(cluster, most)
        self.tier = self.placements.tiers[0]
        """The class of placements whose search began last."""
        self.deadline = deadline or within(60.0)
        self.found: dict[Option, Candidate] = {}
        self.best_s = float("inf")
        self.open = float("inf")
        """The least bound of plans that are not yet ruled out."""
        self.left: set[Option] = set()
        """Options that have plans that are not yet ruled out."""
        self.num_placements = 0
        self.listed: list[_Floor] = []
        """The floors of the last class of placements."""

    def run(self) -> Searched:
        """Search, and return the result; raise PlanningError if nothing fits."""
        proofs = []
        for tier in self.placements.tiers:
            self._run_tier(tier)
            if self.found:
                proofs.append(
                    Proof(
                        placement_class=NAMES[tier],
                        best_s=self.best_s,
                        bound_s=min(self.best_s, self.open),
                    )
                )
        if not self.found:
            raise PlanningError(self._say_nothing_fits())
        return Searched(
            candidates=tuple(
                sorted(self.found.values(), key=lambda one: (one.step_s, measure_simplicity(one)))
            ),
            proofs=tuple(proofs),
            num_options=len(self.options),
            classes=(
                make_class(
                    self.options,
                    stages_per_rank=(1,),
                    placements=proofs[-1].placement_class,
                    num_open=len(self.left),
                    of=len(self.options),
                    why=Stop.TIME,
                    bound_s=min(self.best_s, self.open),
                ),
            ),
            num_placements=self.num_placements,
            took_s=self.deadline.took_s,
        )

    def _run_tier(self, tier: Tier) -> None:
        self.tier, self.open, self.left = tier, float("inf"), set()
        is_last = tier == self.placements.tiers[-1]
        until = self.deadline if is_last else self.deadline.part(TIER_SHARE)
        floors = self._list_floors(until)
        later = [one for one in floors if self._is_for_memory(one[0])]
        self._dive([one for one in floors if not self._is_for_memory(one[0])])
        for option, columns, counts, floor in later:
            needs = self.floors.may_recompute(option, columns, counts, self.best_s * BEYOND)
            floor[~needs] = np.inf
        self._dive(later)
        self.listed = floors
        self._look(floors, until)

    def choose_simplest(self, limit_s: float, deadline: Deadline) -> Candidate:
        """Return the simplest plan within a time, the fastest of equally simple ones; after `run`.

        The search ends after a fixed number of placements, so that the choice is repeatable, or on
        a slow machine at the deadline.
        """
        known = [one for one in self.found.values() if one.step_s <= limit_s]
        best = min(known, key=lambda one: (measure_simplicity(one), one.step_s))
        rows = []
        for number, (option, _, counts, floor) in enumerate(self.listed):
            totals = counts.sum(axis=1)
            for at in map(int, np.flatnonzero(floor <= limit_s)):
                key = option.measure_simplicity(int(totals[at]))
                rows.append((key, float(floor[at]), number, at))
        looks = 0
        for key, _, number, at in sorted(rows):
            if key > measure_simplicity(best) or looks > MOST_LOOKS:
                break
            option, _, counts, _ = self.listed[number]
            row = tuple(int(n) for n in counts[at])
            for chain in self._make_chains(option, row, limit_s):
                if chain.bound > limit_s:
                    continue
                if deadline.is_over():
                    return best
                looks += 1
                found = self._find_within(option, chain, limit_s)
                if found is not None:
                    pair = best, found
                    best = min(pair, key=lambda one: (measure_simplicity(one), one.step_s))
        return best

    def _find_within(self, option: Option, chain: Chain, limit_s: float) -> Candidate | None:
        """Return the best plan of a chain if its step takes at most `limit_s`; else None."""
        if self.wishes.partition is None:
            beyond = limit_s * (1 + CLOSE)
            found = find_partition(chain, incumbent=beyond, max_nodes=FEW_NODES)
            bounds, step_s = (None, 0.0) if found is None else (found.bounds, found.step_s)
        else:
            bounds, step_s = self._improve(chain)
        if bounds is None or step_s > limit_s:
            return None
        return Candidate(option=option, placed=chain.placed, bounds=bounds, step_s=step_s)

    def _list_floors(self, until: Deadline) -> list[_Floor]:
        """Return the counts of options with their floors, the most promising option first.

        Once there is a plan, options are left out if a bound over all of their counts is far above
        that plan; options for which there is no time stay open.
        """
        rough, most = [], dict[tuple[int, int], Array]()
        for option in self.options:
            shape = option.shape
            columns, counts = self.placements.list_counts(
                shape.tensor, shape.replicas, self.wishes.stages, self.tier
            )
            if len(counts):
                key = shape.tensor, shape.replicas
                if key not in most:
                    most[key] = counts.max(axis=0)
                least = self.floors.compute_least(option, columns, most[key])
                rough.append((least, option, columns, counts))
        rough.sort(key=lambda one: one[0])
        listed, deadline = [], until.rest(LIST_SHARE)
        for least, option, columns, counts in rough:
            if least > self.best_s * BEYOND:
                break
            if self.found and deadline.is_over():
                self._leave_open(least, (option,))
                continue
            floor = self.floors.find(option, columns, counts)
            if np.isfinite(floor).any():
                listed.append((option, columns, counts, floor))
        return sorted(listed, key=lambda one: float(one[3].min()))

    def _leave_open(self, bound: float, options: Iterable[Option]) -> None:
        if bound < self.best_s * (1 - CLOSE):
            self.open = min(self.open, bound)
            self.left.update(options)

    def _dive(self, floors: Sequence[_Floor]) -> None:
        """Simulate one plan for each option, the plan with the option's lowest bound, to get a
        first limit.

        At least one plan is found whatever the deadline.
        """
        until = self.deadline.rest(DIVE_SHARE)
        for option, _, counts, floor in floors:
            row = int(floor.argmin())
            if self.found and until.is_over():
                return
            if not floor[row] < self.best_s * (1 - CLOSE):
                continue
            for chain in self._make_chains(option, tuple(int(n) for n in counts[row])):
                if chain.bound < self.best_s * (1 - CLOSE):
                    self._time(option, chain)

    def _look(self, floors: Sequence[_Floor], until: Deadline) -> None:
        """Search all plans that may be faster than the best plan, until it is proved that none is,
        or until the time `until`.

        The item with the least bound always comes next. Options are replaced by their counts with
        closer bounds, and counts by their placements. A placement's first partition is timed, and
        improved if it is near the best plan; then its other partitions are ruled out, with eight
        times the effort in each round.
        """
        turns = itertools.count()
        heap: list[tuple[float, int, _Group | _Counts | Chain | _Sharp, tuple[Option, ...]]] = []

        def push_counts(rows: _Counts, options: tuple[Option, ...]) -> None:
            if rows.at < len(rows.order):
                bound = float(rows.floors[:, rows.order[rows.at]].min())
                heapq.heappush(heap, (bound, next(turns), rows, options))

        def push(chain: Chain, options: tuple[Option, ...], bound: float = 0.0) -> None:
            if chain.bound < self.best_s * (1 - CLOSE):
                heapq.heappush(heap, (max(bound, chain.bound), next(turns), chain, options))

        for group in self._group(floors):
            least = min(float(one[3].min()) for one in group)
            heapq.heappush(heap, (least, next(turns), _Group(group), tuple(o for o, *_ in group)))
        while heap and heap[0][0] < self.best_s * (1 - CLOSE):
            bound, _, one, options = heapq.heappop(heap)
            if until.is_over():
                for least, _, _, those in [(bound, 0, one, options), *heap]:
                    self._leave_open(least, those)
                break
            if isinstance(one, _Group):
                own = np.array([self._compute_floors(floor) for floor in one.floors])
                rows = np.flatnonzero(np.isfinite(own).any(axis=0))
                order = np.argsort(own[:, rows].min(axis=0), kind="stable")
                push_counts(_Counts(one.floors[0][2][rows], own[:, rows], order, 0), options)
            elif isinstance(one, _Sharp):
                (option,) = options
                if one.nodes == MOST_NODES:
                    self._time(option, one.chain)
                proved = max(bound, self._prove(option, one.chain, one.nodes, until))
                if proved < self.best_s * (1 - 2 * CLOSE):
                    again = _Sharp(one.chain, 8 * one.nodes)
                    heapq.heappush(heap, (proved, next(turns), again, options))
            elif isinstance(one, Chain) and len(options) > 1:
                for option in options:
                    chain = self._make_chain(option, one.placed, self.best_s)
                    if chain is not None:
                        push(chain, (option,), bound)
            elif isinstance(one, Chain):
                sharp = bound
                if np.isfinite(self.best_s):  # else nothing is ruled out yet
                    sharp = max(bound, Cells(one, self.best_s, *COARSE).compute_least())
                if sharp < self.best_s * (1 - CLOSE):
                    again = _Sharp(one, MOST_NODES)
                    heapq.heappush(heap, (sharp, next(turns), again, options))
            else:
                row = one.order[one.at]
                push_counts(one._replace(at=one.at + 1), options)
                near = one.floors[:, row] < self.best_s * (1 - CLOSE)
                left = tuple(itertools.compress(options, near))
                for chain in self._make_first(left, tuple(int(n) for n in one.counts[row])):
                    push(chain, left)

    def _group(self, floors: Sequence[_Floor]) -> Iterator[list[_Floor]]:
        """Group the options that differ only in recompute and have the same bound; yield these
        groups, then every other option by itself."""
        groups: dict[Any, list[_Floor]] = {}
        for number, one in enumerate(floors):
            option = one[0]
            is_shared = option.recompute in ("none", *FOR_MEMORY) and self.wishes.recompute is None
            shared = option.shape, option.schedule
            groups.setdefault(shared if is_shared else number, []).append(one)
        yield from groups.values()

    def _compute_floors(self, one: _Floor) -> Array:
        """Return the floors of an option; inf if it has no better plan."""
        option, columns, counts, floor = one
        low = floor < self.best_s * (1 - CLOSE)
        if low.any() and self._is_for_memory(option):
            low &= self.floors.may_recompute(option, columns, counts, self.best_s)
        found = np.where(low, floor, np.inf)
        if low.any() and self.tier != "orders":  # there a look is sooner taken
            sharp = self.floors.sharpen(option, columns, counts[low], self.best_s)
            found[low] = np.maximum(found[low], sharp)
        return found

    def _make_first(self, options: tuple[Option, ...], counts: tuple[int, ...]) -> Iterator[Chain]:
        """Yield the chains of an option; for several options, chains whose bound holds for all."""
        if len(options) < 2:
            for option in options:
                yield from self._make_chains(option, counts)
            return
        shape, schedule = options[0].shape, options[0].schedule
        work = build_least_model(schedule, sum(counts), options[0].num_microbatches)
        for placed in self.placements.iterate(shape.tensor, shape.replicas, counts):
            self.num_placements += 1
            yield Chain(self.tables, shape, placed, work, self.wishes.least)

    def _make_chains(
        self, option: Option, counts: tuple[int, ...], limit: float | None = None
    ) -> Iterator[Chain]:
        """Yield the chains that may take at most `limit`, by default the best plan's time."""
        limit = self.best_s if limit is None else limit
        shape = option.shape
        for placed in self.placements.iterate(shape.tensor, shape.replicas, counts):
            self.num_placements += 1
            chain = self._make_chain(option, placed, limit)
            if chain is not None:
                yield chain

    def _make_chain(self, option: Option, placed: PlacedPipeline, limit: float) -> Chain | None:
        work = build_schedule_model(
            option.schedule, len(placed.sites), option.num_microbatches, option.recompute
        )
        chain = Chain(self.tables, option.shape, placed, work, self.wishes.least)
        if self._is_for_memory(option) and not chain.may_recompute(limit):
            return None
        return chain

    def _is_for_memory(self, option: Option) -> bool:
        """Return True for a recompute mode that is never faster and only saves memory."""
        return self.wishes.is_for_memory(option.recompute)

    def _time(self, option: Option, chain: Chain) -> None:
        if self.wishes.partition is None:
            start = chain.follow_bound()
            if start is None or chain.compute_step(start) > self.best_s * PROMISING:
                return
        self._keep(option, chain, *self._improve(chain))

    def _improve(self, chain: Chain) -> tuple[Bounds | None, float]:
        wanted = self.wishes.partition
        if wanted is None:
            return improve(chain, is_late=self.deadline.is_over)
        bounds = tuple(int(n) for n in np.concatenate([[0], np.cumsum(wanted)]))
        if len(wanted) != chain.num_stages or bounds[-1] != chain.size:
            return None, float("inf")
        if not is_allowed(chain, bounds):
            return None, float("inf")
        return bounds, float(chain.compute_steps([bounds])[0])

    def _prove(self, option: Option, chain: Chain, nodes: int, until: Deadline) -> float:
        """Search a chain for a better plan; return a lower bound for its plans."""
        if self.wishes.partition is not None:
            return self.best_s  # there was but one to be timed
        found = find_partition(
            chain,
            incumbent=self.best_s,
            max_nodes=nodes,
            deadline=until,
            improving=False,
            cells=COARSE if nodes == MOST_NODES else FINE,
        )
        if found is None:
            return self.best_s
        self._keep(option, chain, found.bounds, found.step_s)
        return found.bound_s

    def _keep(self, option: Option, chain: Chain, bounds: Bounds | None, step_s: float) -> None:
        if bounds is None:
            return
        known = self.found.get(option)
        if known is None or step_s < known.step_s:
            self.found[option] = Candidate(
                option=option, placed=chain.placed, bounds=bounds, step_s=step_s
            )
        self.best_s = min(self.best_s, step_s)

    def _say_nothing_fits(self) -> str:
        """Return a message on the memory that the largest segment lacks in its best option."""
        lacks = []
        for option in self.options:
            shape, needs = option.shape, []
            fixed = self.tables.compute_fixed(shape)
            for kind in {kind.gpu for kind in self.placements.cluster.kinds}:
                times = self.tables.compute_times((kind,), shape.micro_batch, shape.tensor)
                held = fixed + times.graph_bytes + times.work_bytes
                needs.append(held.diagonal(1) - times.memory_bytes)
            lacks.append(float(np.min(needs, axis=0).max()))
        least = min(lacks)
        if least > 0:
            return (
                f"no plan fits in memory: a segment lacks {least / 2**30:.1f} GB even as a stage "
                f"of its own ({self.options[lacks.index(least)]})"
            )
        return (
            "no plan fits: each segment fits as a stage of its own, but all together do not fit "
            "on these nodes with these settings; add nodes, or leave more keys to the search"
        )
