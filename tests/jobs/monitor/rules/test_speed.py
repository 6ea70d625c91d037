"""Verdicts on jobs that do their steps."""

from __future__ import annotations

from dataclasses import replace

from tests.jobs.monitor.builders import (
    NOW,
    STEP_S,
    change_gpus,
    change_rank,
    healthy,
    make_points,
    with_points,
)
from varuna_core.records.logs.step_counts import StepCounts
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.readers.node_files import join_counts
from vjob.jobs.monitor.rules.judge import judge


def test_a_straggler_is_found_among_its_peers() -> None:
    snapshot = change_rank(healthy(), 5, work_s=1.6, step_s=2.0)
    verdict = judge(snapshot)
    assert (verdict.health, verdict.node, verdict.rank) == (Health.SLOW, "n001", 5)
    assert verdict.exit_code == 13


def test_a_slower_stage_or_device_is_no_straggler() -> None:
    ranks = tuple(
        replace(rank, work_s=2.0 if rank.stage == 2 else 0.7, device=("a", "b")[rank.rank // 8])
        for rank in healthy().ranks
    )
    assert judge(healthy(ranks=ranks)).health is Health.HEALTHY


def test_steps_that_became_slower_are_slow() -> None:
    slow = with_points(healthy(), make_points([STEP_S] * 60 + [2.6] * 25))
    verdict = judge(slow)
    assert (verdict.health, verdict.rule) == (Health.SLOW, "slower")
    once = with_points(healthy(), make_points([STEP_S] * 66 + [9.0] * 4))
    assert judge(once).health is Health.HEALTHY


def test_steps_that_have_been_slow_for_longer_than_the_last_points_are_slow() -> None:
    slow = make_points([2.6] * 120, first=500)
    assert judge(with_points(healthy(), slow)).health is Health.HEALTHY
    verdict = judge(with_points(healthy(), slow, early_times=(STEP_S,) * 20))
    assert (verdict.health, verdict.rule) == (Health.SLOW, "slower")
    few = with_points(healthy(), slow, early_times=(STEP_S,) * 19)
    assert judge(few).health is Health.HEALTHY


def test_the_early_pace_is_that_of_the_counter_before_the_last_points() -> None:
    begin = NOW - 1000
    times = [float(at) for at in range(200)] + [200 + 4.0 * at for at in range(200)]
    points = tuple((done + 1, begin + at) for done, at in enumerate(times))
    counts = StepCounts(
        count=400, opened_at=begin, first_at=begin, last_at=points[-1][1], points=points
    )
    progress = join_counts(None, {0: counts}, 0, 0.0, None)
    assert progress is not None and set(progress.early_times) == {1.0}
    verdict = judge(replace(healthy(), progress=progress, now=points[-1][1]))
    assert (verdict.health, verdict.rule) == (Health.SLOW, "slower")


def test_a_slowness_that_just_began_is_a_remark_where_there_is_a_history() -> None:
    slow = with_points(healthy(), make_points([STEP_S] * 60 + [2.6] * 25))
    verdict = judge(slow, [healthy(), healthy()])
    assert verdict.health is Health.HEALTHY
    assert any("1.9 times" in remark for remark in verdict.remarks)
    assert judge(slow, [healthy(), slow, slow]).health is Health.SLOW


def test_heat_with_slower_steps_is_slow_and_heat_alone_a_remark() -> None:
    hot = change_gpus(healthy(), "n002", throttle="hw_thermal", temperature=93)
    assert judge(hot).health is Health.HEALTHY
    assert any("n002:0" in remark for remark in judge(hot).remarks)
    slow = with_points(hot, make_points([STEP_S] * 60 + [1.9] * 32))
    assert (judge(slow).rule, judge(slow).node) == ("throttled", "n002")
