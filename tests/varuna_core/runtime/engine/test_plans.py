"""Which plan a step gets: what memory allows, how far a rank may run ahead, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from varuna_core.records.rank_map import StageMap, parse_stage_map
from varuna_core.runtime.engine.plans import CAPACITY, Plans, settle_stages
from varuna_core.schedule.actions import ScheduleError
from varuna_core.schedule.costs import build_even_costs
from varuna_core.schedule.recompute import Memory, measure_memory
from varuna_core.schedule.registry import place_stages

RANKS = parse_stage_map("0;1;2;3;", 4)


def make_plans(name: str, recompute: Any = "auto", **options: Any) -> Plans:
    return Plans(name, RANKS, build_even_costs(4), recompute, **options)


def make_memory(limit: float) -> Memory:
    return Memory(graphs=(10.0,) * 4, inputs=(1.0,) * 4, limits=(limit,) * 4)


def count_recomputes(plans: Plans) -> int:
    return sum(action.kind == "R" for rank in plans.find(8).schedule.ranks for action in rank)


def test_auto_recomputes_all_then_what_memory_requires() -> None:
    plans = make_plans("1f1b")
    everything = count_recomputes(plans)
    assert plans.lacks_memory and everything
    plans.set_memory(make_memory(25.0))
    assert not plans.lacks_memory and 0 < count_recomputes(plans) < everything
    plans.set_memory(make_memory(40.0))
    assert not count_recomputes(plans)


def test_what_cannot_fit_is_refused_if_the_limit_was_given() -> None:
    plans = make_plans("1f1b", is_limit_given=True)
    plans.set_memory(make_memory(5.0))
    with pytest.raises(ScheduleError, match="the limit is 5"):
        plans.find(8)
    plans = make_plans("1f1b")
    plans.set_memory(make_memory(5.0))
    assert count_recomputes(plans)


def test_only_varuna_runs_ahead_and_never_beyond_memory() -> None:
    assert make_plans("1f1b", "full").find(8).ahead == (0, 0, 0, 0)
    assert make_plans("varuna", "full", opportunistic=False).find(8).ahead == (0, 0, 0, 0)
    plan = make_plans("varuna", "full").find(8)
    assert plan.ahead[0] > plan.ahead[2] > plan.ahead[3] == 0
    assert plan.capacity >= 2 * plan.ahead[0] >= CAPACITY
    plans = make_plans("varuna")
    plans.set_memory(make_memory(16.0))
    plan = plans.find(8)
    peaks = measure_memory(plan.schedule, make_memory(16.0))
    for peak, ahead in zip(peaks, plan.ahead, strict=True):
        assert peak + ahead <= 16.0


def test_auto_with_several_stages_is_settled_at_once() -> None:
    placed, name = settle_stages(RANKS, "auto", 2, 8, build_even_costs(8))
    assert name in ("zbv", "interleaved")
    assert placed == RANKS.with_placement(place_stages(name, RANKS.depth, 2))
    assert settle_stages(RANKS, "auto", 1, 8, build_even_costs(4)) == (
        StageMap(ranks=RANKS.ranks),
        "auto",
    )
