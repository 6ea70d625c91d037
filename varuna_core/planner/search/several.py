"""Plans with several stages a rank, tried after the search of those with one; nothing is proved.

```
floors of 1f1b      what most of a step is: work, sums, the optimizer   ─┐ the most promising first,
less of the bubble  a v-th of it, with v stages a rank                  ─┘ until MOST_TRIED
zbv, interleaved    cuts by the largest stage's work, then moves of segments, as long as one helps
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.cluster import PlacedPipeline
from varuna_core.planner.model.schedule_model import find_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.search.partition import CLOSE, improve, is_allowed, list_moves
from varuna_core.planner.search.search import (
    Candidate,
    LeftOut,
    Scope,
    Search,
    Searched,
    Stop,
    measure_simplicity,
)
from varuna_core.planner.search.space import SEARCHED, Option, Wishes
from varuna_core.schedule.registry import SCHEDULES, has_one_stage_a_rank

NAMES = tuple(name for name in SCHEDULES if not has_one_stage_a_rank(name))
GUIDE = "1f1b"
"""Its floors say which shapes and placements are promising."""
MOST_STAGES = 4
"""Of a rank, where a schedule takes any number."""
SHARE = 0.15
"""Of a search's time, kept for this."""
MOST_TRIED = 60
PLACEMENTS = 2
"""Of as many stages on each kind of place."""
EXPECTED = 1.1
"""Of the best step so far, up to which a start is worth a try."""
MOST_SETTLED = 4
"""Of these the order of actions is made for the costs of their cuts, which takes long."""
PROMISING = 1.2
"""Of the best step, up to which that is done."""
MOST_TURNS = 2
"""Of ordering actions for cuts, and of moving cuts in that order."""


@dataclass(frozen=True, kw_only=True)
class _Start:
    option: Option
    row: tuple[int, ...]
    stages_per_rank: int
    expected_s: float


@dataclass(frozen=True, kw_only=True)
class _Tried:
    option: Option
    chain: SeveralStages
    bounds: Bounds
    step_s: float


def list_names(training: TrainingModel, wishes: Wishes) -> tuple[str, ...]:
    """The schedules to try."""
    if wishes.zero == 3:
        return ()
    if wishes.schedule is None:
        is_free = training.may_have_several_stages and wishes.partition is None
        return NAMES if is_free else ()
    return (wishes.schedule,) if wishes.schedule in NAMES else ()


def find_guide(wishes: Wishes) -> Wishes:
    """The wishes of the search with one stage a rank."""
    if wishes.schedule not in NAMES:
        return wishes
    if wishes.zero == 3:
        raise PlanningError(f"schedule {wishes.schedule} with zero 3 is not planned; 1f1b is")
    return replace(wishes, schedule=GUIDE, partition=None)


def try_several(question: Search, searched: Searched, wishes: Wishes) -> Searched:
    """With the plans of several stages a rank that were found, if the wishes allow them."""
    only_several = wishes.schedule in NAMES
    names = list_names(question.tables.training, wishes)
    limit = float("inf") if only_several else searched.best.step_s * (1 - CLOSE)
    tried, stopped = _try_all(question, wishes, names, limit)
    found: dict[Option, Candidate] = {}
    best_s = limit
    for number, one in enumerate(sorted(tried, key=lambda one: one.step_s)):
        if number >= MOST_SETTLED or one.step_s > best_s * PROMISING:
            break
        if found and _is_late(question):
            break
        settled = settle(one.option, one.chain, one.bounds, wishes.partition is not None)
        if settled is not None:
            known = found.get(one.option)
            if known is None or settled.step_s < known.step_s:
                found[one.option] = settled
            best_s = min(best_s, settled.step_s)
    if only_several:
        question.found.clear()
    question.found.update(found)
    kept = () if only_several else searched.candidates
    ordered = sorted(
        (*kept, *found.values()), key=lambda one: (one.step_s, measure_simplicity(one))
    )
    scope = Scope(
        proved=() if only_several else searched.scope.proved,
        tried=tuple(name for name in names if any(one.option.schedule == name for one in tried)),
        num_tried=len(tried),
        stopped=stopped,
    )
    scope = replace(scope, not_tried=tuple(_list_left_out(scope, wishes, names)))
    return replace(searched, candidates=tuple(ordered), scope=scope)


def _list_left_out(scope: Scope, wishes: Wishes, names: Sequence[str]) -> Iterator[LeftOut]:
    """Schedules of which nothing was timed, though the wishes allow them."""
    untried = tuple(name for name in names if name not in scope.tried)
    if untried and scope.stopped is not None:
        yield LeftOut(schedules=untried, why=scope.stopped)
    if wishes.schedule is None and wishes.zero != 3:
        asked = tuple(name for name in SCHEDULES if name not in (*SEARCHED, *scope.proved, *names))
        if asked:
            yield LeftOut(schedules=asked, why=Stop.ONLY_ASKED)


def _try_all(
    question: Search, wishes: Wishes, names: tuple[str, ...], best_s: float
) -> tuple[list[_Tried], Stop | None]:
    """The cuts of each promising start, with the actions in the order for even costs; and why
    others were not tried."""
    count = 0
    found: list[_Tried] = []
    for start in _list_starts(question, wishes, names):
        if count >= MOST_TRIED:
            return found, Stop.NUMBER
        if start.expected_s > best_s * EXPECTED:
            return found, Stop.UNPROMISING
        if best_s < np.inf and _is_late(question):
            return found, Stop.TIME
        shape = start.option.shape
        placements = question.placements.iterate(shape.tensor, shape.replicas, start.row)
        for placed in itertools.islice(placements, PLACEMENTS):
            count += 1
            chain = make_chain(question.tables, start.option, placed, start.stages_per_rank)
            bounds = _choose_cuts(chain, wishes.partition)
            if bounds is not None:
                step_s = float(chain.find_steps([bounds])[0])
                best_s = min(best_s, step_s)
                found.append(_Tried(option=start.option, chain=chain, bounds=bounds, step_s=step_s))
    return found, None


def _is_late(question: Search) -> bool:
    return question.clock() > question.deadline + SHARE * question.limit_s


def find_at(
    tables: Tables, option: Option, placed: PlacedPipeline, stages_per_rank: int
) -> Candidate | None:
    """The best cuts that are found for one placement; None where none fits."""
    chain = make_chain(tables, option, placed, stages_per_rank)
    bounds = _choose_cuts(chain, None)
    return None if bounds is None else settle(option, chain, bounds, is_given=False)


def count_each(schedule: str, training: TrainingModel) -> Sequence[int]:
    """The numbers of stages a rank that are tried."""
    own = SCHEDULES[schedule].stages_per_rank
    if own is None and training.overlap_sends:
        return range(2, MOST_STAGES + 1)
    return (own or 2,)


def make_chain(
    tables: Tables, option: Option, placed: PlacedPipeline, stages_per_rank: int
) -> SeveralStages:
    """With the actions in the order for even costs."""
    work = find_schedule_model(
        option.schedule,
        len(placed.sites),
        option.num_microbatches,
        option.recompute,
        stages_per_rank,
    )
    return SeveralStages(tables, option.shape, placed, work)


def _choose_cuts(chain: SeveralStages, partition: Sequence[int] | None) -> Bounds | None:
    """None where none fits."""
    if partition is not None:
        bounds = tuple(itertools.accumulate(partition, initial=0))
        return bounds if is_allowed(chain, bounds) else None
    begin = chain.follow_bound()
    if begin is not None:
        begin = _make_fit(chain, begin)
    return None if begin is None else improve(chain, begin)[0]


def _make_fit(chain: SeveralStages, bounds: Bounds) -> Bounds | None:
    """Segments moved from the fullest ranks to others until all fits; None where no move helps."""
    share = float(chain.find_shares(np.array([bounds]))[0])
    while share > 1:
        moved = list_moves(chain, bounds)
        moved = moved[Chain.find_fitting(chain, moved)]
        if not len(moved):
            return None
        shares = chain.find_shares(moved)
        place = int(shares.argmin())
        if not shares[place] < share:
            return None
        bounds, share = tuple(moved[place].tolist()), float(shares[place])
    return bounds


def settle(
    option: Option, chain: SeveralStages, bounds: Bounds, is_given: bool
) -> Candidate | None:
    """With the actions in the order that the runtime makes for the costs of these cuts, or, if they
    are not given, of better ones in that order; None where that holds more than fits."""
    best: Candidate | None = None
    for _ in range(MOST_TURNS):
        costs = chain.find_costs(bounds)
        chain = chain.follow_costs(costs)
        if not is_allowed(chain, bounds):
            break
        step_s = chain.find_step(bounds)
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
        if is_given:
            break
        bounds, _ = improve(chain, bounds)
        if bounds == best.bounds:
            break
    return best


def _list_starts(question: Search, wishes: Wishes, names: tuple[str, ...]) -> Iterator[_Start]:
    """What may be worth a try, the most promising first."""
    starts = []
    size = question.tables.size
    for option, _, counts, floors in question.listed:
        if option.schedule != GUIDE or option.shape.zero == 3:
            continue
        if wishes.is_for_memory(option.recompute):
            continue
        ranks, m = counts.sum(axis=1), option.num_microbatches
        for name in names:
            for several in count_each(name, question.tables.training):
                expected = floors * (m + (ranks - 1) / several) / (m + ranks - 1)
                fits = (ranks > 1) & (ranks * several <= size) & np.isfinite(floors)
                if wishes.partition is not None:
                    fits &= ranks * several == len(wishes.partition)
                expected = np.where(fits, expected, np.inf)
                some = np.argsort(expected, kind="stable")[:MOST_TRIED]
                starts += [
                    _Start(
                        option=replace(option, schedule=name),
                        row=tuple(int(n) for n in counts[at]),
                        stages_per_rank=several,
                        expected_s=float(expected[at]),
                    )
                    for at in some[np.isfinite(expected[some])]
                ]
    yield from sorted(starts, key=lambda one: one.expected_s)
