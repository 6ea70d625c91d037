"""Verdicts on jobs that do their steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    STEP_S,
    change_gpus,
    change_rank,
    healthy,
    make_points,
    with_points,
)
from varuna_core.records.logs.step_counts import POINT_S, StepCounts, Tally, parse_counts
from vjob.jobs.monitor.model.snapshot import Health, Verdict
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


def test_epochs_have_a_pace_of_epochs() -> None:
    snapshot = with_points(healthy(), make_points([STEP_S] * 60))
    assert snapshot.progress is not None
    snapshot = replace(snapshot, progress=replace(snapshot.progress, unit="epoch"))
    assert "s an epoch" in judge(snapshot).reason


def jitter(spread: float = 0.05) -> float:
    return DRAW.lognormvariate(0, spread)


DRAW = random.Random(5)
LOOK_ALIKES: dict[str, Callable[[int], float]] = {
    "steady": lambda n: 0.5,
    "compiles at first": lambda n: 40 if n == 0 else 3 if n < 10 else 0.5,
    "tries kernels": lambda n: 2 if n < 60 else 0.5,
    "evaluates": lambda n: 0.5 + 30 * (n % 100 == 99),
    "evaluates ever longer": lambda n: 0.5 + n / 20 * (n % 50 == 49),
    "saves": lambda n: 0.5 + 20 * (n % 50 == 49),
    "saves often": lambda n: 0.5 + 3 * (n % 5 == 4),
    "a smaller last batch": lambda n: 0.1 if n % 40 == 39 else 0.5,
    "reads its first epoch from disk": lambda n: 1.6 if n < 400 else 0.5,
    "starts its loader in each epoch": lambda n: 0.5 + 8 * (n % 60 == 0),
    "jitter": lambda n: 0.5 * jitter(0.6),
    "two kinds of steps": lambda n: 0.3 if n % 2 else 1.2,
    "a critic and a generator": lambda n: 0.2 if n % 5 else 1.5,
    "buckets of lengths": lambda n: DRAW.choice((0.2, 0.4, 0.8, 1.6)),
    "draws images": lambda n: 0.5 + 5 * (n % 200 == 0),
    "a faster clock for a minute": lambda n: 0.42 if n < 150 else 0.5,
    "collects garbage": lambda n: 0.5 + 1.5 * (n % 17 == 0),
    "a full queue of batches": lambda n: 0.1 if n < 64 else 0.5,
}
HAS_MORE_TO_DO: dict[str, Callable[[int], float]] = {
    "sorted by length": lambda n: 0.2 + 1.4 * (n % 500) / 500,
    "longer sequences": lambda n: 0.5 if n < 500 else 1.5,
    "sequences that grow": lambda n: 0.3 + 0.0015 * n,
    "layers unfrozen": lambda n: 0.4 if n < 600 else 1.0,
    "twice the resolution": lambda n: 0.2 * 2 ** (n // 400),
    "episodes that grow": lambda n: min(0.3 + 0.002 * n, 3) * jitter(0.3),
    "a buffer that fills": lambda n: 0.15 if n < 200 else 0.6,
    "more accumulation": lambda n: 0.5 if n < 500 else 2.0,
}


def judge_life(pace: Callable[[int], float]) -> list[Verdict]:
    """Return the verdicts on 1200 counted steps, after every 60th."""
    clock, point_due, tally, verdicts = 0.0, 0.0, Tally(0.0, NOW), []
    for step in range(1, 1201):
        clock += pace(step - 1) * jitter()
        tally.add(clock)
        if clock >= point_due:
            tally.note()
            point_due = clock + POINT_S
        if not step % 60:
            counts = parse_counts(tally.pack_head((1, 1, 1, 1, 0), step) + tally.pack_body())
            assert counts is not None
            progress = join_counts(None, {0: counts}, 0, 0.0, None)
            verdicts.append(judge(replace(healthy(), progress=progress, now=counts.last_at)))
    return verdicts


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_pace_that_changes_now_and_then_is_not_slow(name: str) -> None:
    assert {one.health for one in judge_life(LOOK_ALIKES[name])} == {Health.HEALTHY}


@pytest.mark.parametrize("name", HAS_MORE_TO_DO)
def test_of_steps_that_have_more_to_do_only_what_is_seen_is_said(name: str) -> None:
    slow = [one for one in judge_life(HAS_MORE_TO_DO[name]) if one.health is Health.SLOW]
    assert slow and all("its steps may have more work to do" in one.reason for one in slow)
    assert all(one.advice.startswith("if sequence and batch sizes are as before") for one in slow)


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
