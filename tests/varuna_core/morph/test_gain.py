"""Whether a morph pays, held against a training that is played second by second."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.gain import forecast, pays, with_more
from varuna_core.records.plan import MorphPlan, Plan
from varuna_core.records.training import derive_facts

times = st.integers(1, 50)


def count_done(steps: int, step_s: int, seconds: int) -> float:
    """Steps, parts of one too, after so many seconds."""
    return min(steps, max(seconds, 0) / step_s)


@given(st.integers(1, 200), times, times, st.integers(0, 500), st.integers(1, 5000))
def test_it_pays_where_more_is_done_when_the_training_or_its_time_ends(
    steps: int, step_s: int, then_s: int, pause_s: int, left_s: int
) -> None:
    horizon = min(steps * step_s, left_s)
    without = count_done(steps, step_s, horizon)
    with_it = (horizon - pause_s) / then_s  # as if there were steps beyond the last one
    assume(abs(without - with_it) > 1e-9)
    assert pays(steps, step_s, then_s, pause_s, left_s) == (with_it > without)
    if steps * step_s <= left_s:  # then it is: done sooner
        assert (pause_s + steps * then_s < steps * step_s) == (with_it > without)


@given(st.integers(1, 200), times, times, st.integers(0, 500), st.integers(1, 5000))
def test_what_is_better_in_every_way_pays_too(
    steps: int, step_s: int, then_s: int, pause_s: int, left_s: int
) -> None:
    if pays(steps, step_s, then_s, pause_s, left_s):
        assert then_s < step_s and pause_s < left_s
        assert pays(steps + 1, step_s, then_s, pause_s, left_s)
        assert pays(steps, step_s, then_s, pause_s, left_s + 1)
        assert pays(steps, step_s, then_s, pause_s, math.inf)
        assert pays(steps, step_s, then_s * 0.9, pause_s * 0.9, left_s)
        assert pays(steps, step_s * 1.1, then_s, pause_s, left_s)


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_what_is_no_time_never_pays(wrong: float) -> None:
    assert pays(100, 2.0, 1.0, 10.0)
    assert not pays(wrong, 2.0, 1.0, 10.0)
    assert not pays(100, wrong, 1.0, 10.0)
    assert not pays(100, 2.0, wrong, 10.0)
    assert not pays(100, 2.0, 1.0, wrong)
    assert not pays(100, 2.0, 1.0, 10.0, wrong)
    assert not pays(100, 2.0, 0.0, 10.0)


def plan_of(nodes: int, pipeline: int, most: int = 64) -> Plan:
    limits = MorphPlan(min_nodes=1, max_nodes=most, requeue=False, save_s=10.0)
    plan = make_plan(make_group("all", nodes, 1), pipeline=pipeline, data=nodes // pipeline)
    return replace(plan, morphing=limits)


TRAINING = derive_facts(
    replace(GPT, layers=12, global_batch_size=64, micro_batch_size=1, partition=None)
)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 16))
def test_more_nodes_never_bring_more_than_their_ranks(depth: int, data: int, more: int) -> None:
    plan = plan_of(depth * data, depth)
    here = list(range(plan.num_nodes))
    wide = with_more(plan, plan.groups[0], more)
    found = forecast(wide, TRAINING, here, range(wide.num_nodes))
    assert found is not None and not found.is_predicted
    assert found.ratio >= plan.num_nodes / wide.num_nodes - 1e-9
    if found.ratio < 1:
        assert math.isclose(forecast(wide, TRAINING, here, here).ratio, 1.0)  # type: ignore[union-attr]


def test_twice_the_nodes_take_little_more_than_half_as_long() -> None:
    plan = plan_of(4, 4)
    wide = with_more(plan, plan.groups[0], 4)
    found = forecast(wide, TRAINING, range(4), range(8))
    assert found is not None and found.ratio == pytest.approx((32 + 3) / (64 + 3))
    alone = forecast(wide, TRAINING, range(4), range(5))
    assert alone is not None and alone.ratio > 0.8, "a fifth node is worth a fifth at most"


def test_what_the_planner_said_counts_before_any_count() -> None:
    plan = replace(plan_of(4, 4), layout_steps={"/1*4": 2.0, "/1*6": 1.5, "/1*3": 3.0})
    plan = replace(plan, layouts={"/1*6": (6, 1, "2-2-2-2-2-2"), "/1*3": (3, 1, "4-4-4")})
    wide = with_more(plan, plan.groups[0], 2)
    found = forecast(wide, TRAINING, range(4), range(6))
    assert found is not None and (found.ratio, found.is_predicted) == (0.75, True)
    fewer = forecast(wide, TRAINING, range(4), [0, 1, 3])
    assert fewer is not None and (fewer.ratio, fewer.is_predicted) == (1.5, True)
    unknown = forecast(wide, TRAINING, range(4), range(5))
    assert unknown is not None and not unknown.is_predicted
