"""Verdicts on jobs that are about to fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    OOM,
    STEP_S,
    change_gpus,
    change_rank,
    healthy,
    make_exit,
    make_line,
    make_points,
    silent,
    starting,
    with_points,
)
from varuna_core.records.checkpoints import Damaged, Skipped
from vjob.jobs.monitor.model.snapshot import COUNTED, Disk, Echo, Health
from vjob.jobs.monitor.rules.judge import judge


def test_a_rank_that_failed_is_named_while_the_others_live() -> None:
    snapshot = change_rank(healthy(), 6, exit=make_exit(6, "n001", 137, "SIGKILL"))
    verdict = judge(snapshot)
    assert (verdict.health, verdict.node, verdict.rank) == (Health.FAILING, "n001", 6)
    assert "SIGKILL" in verdict.reason


def test_a_wrong_echo_fails_at_once() -> None:
    line = make_line("WORLD_SIZE: 32", node="n000", rank=0)
    echoes = (
        Echo(name="NNODES", said="4", wanted="4.0", line=line),
        Echo(name="PROFILE", said="True", wanted="true", line=line),
        Echo(name="PARTITION", said="0-11-8", wanted="0, 11, 8", line=line),
        Echo(name="MODEL", said="xl", wanted=None, line=line),
    )
    assert judge(starting(echoes=echoes)).health is Health.STARTING
    wrong = Echo(name="WORLD_SIZE", said="32", wanted="16", line=line)
    verdict = judge(starting(echoes=(*echoes, wrong)))
    assert (verdict.health, verdict.rule, verdict.exit_code) == (
        Health.FAILING,
        "wrong setting",
        15,
    )
    assert verdict.evidence == (line,)
    assert "vjob cancel 4711" in verdict.advice


def test_a_loss_that_is_no_number_fails() -> None:
    points = make_points([STEP_S] * 50)
    bad = (*points[:-1], replace(points[-1], loss=float("nan")))
    verdict = judge(with_points(healthy(checkpoint_step=40), bad))
    assert (verdict.health, verdict.rule) == (Health.FAILING, "not a number")
    assert "at step 50, first printed at step 50" in verdict.reason
    assert "step 40" in verdict.advice
    assert verdict.advice.endswith("`vjob cancel --now 4711`: a save would keep the NaN")
    counted = with_points(healthy(), bad)
    assert counted.progress is not None and verdict.facts
    counted = replace(counted, progress=replace(counted.progress, source=COUNTED))
    assert not any("optimizer" in fact for fact in judge(counted).facts)  # a line had the loss
    skipped = (*points[:-1], replace(points[-1], loss=float("inf"), skipped=1))
    assert judge(with_points(healthy(), skipped)).health is Health.HEALTHY
    recovered = (*points[:20], replace(points[20], loss=float("nan")), *points[21:])
    assert judge(with_points(healthy(), recovered)).health is Health.HEALTHY


@pytest.mark.parametrize(
    ("num_bad", "facts", "reason"),
    [
        (3, {"loss": None}, "is nan in the last 3 lines that show it, from step 48 to 50; they"),
        (2, {"loss": None}, ""),
        (3, {"loss": 0.0}, "their last loss is 0"),
        (20, {"loss": 2.5}, "from step 31 to 50; their last loss is 2.5"),
        (19, {"loss": 2.5}, ""),  # fp16 may search its loss scale
        (50, {"loss": None}, "is nan in the last 50 lines"),
        (50, {"loss": None, "skipped": 1, "loss_scale": 2.0}, "skipped for overflow"),
    ],
)
def test_norms_that_are_no_numbers_fail(num_bad: int, facts: dict[str, Any], reason: str) -> None:
    """A job whose lines show only `grad norm nan` was HEALTHY."""
    points = make_points([STEP_S] * 50, **{**facts, "skipped": 0})
    bad = tuple(replace(one, grad_norm=float("nan"), **facts) for one in points[50 - num_bad :])
    verdict = judge(with_points(healthy(), (*points[: 50 - num_bad], *bad)))
    assert verdict.health is (Health.FAILING if reason else Health.HEALTHY)
    assert reason in verdict.reason
    back = (*points[:40], *(replace(one, grad_norm=float("nan")) for one in points[40:-1]))
    assert judge(with_points(healthy(), (*back, points[-1]))).health is Health.HEALTHY


def test_overflow_without_end_fails_and_the_search_for_a_scale_does_not() -> None:
    points = make_points([STEP_S] * 40)
    search = tuple(
        replace(point, skipped=1, loss=None, loss_scale=2.0 ** (20 - number))
        for number, point in enumerate(points[:15])
    )
    assert judge(with_points(healthy(), search)).health is Health.HEALTHY
    endless = tuple(
        replace(point, skipped=1, loss=None, loss_scale=max(2.0 ** (20 - number), 1.0))
        for number, point in enumerate(points)
    )
    verdict = judge(with_points(healthy(), endless))
    assert (verdict.health, verdict.rule) == (Health.FAILING, "loss scale")


def test_exploding_gradients_fail_and_one_spike_does_not() -> None:
    points = make_points([STEP_S] * 40)
    spike = (*points[:-1], replace(points[-1], grad_norm=900.0))
    assert judge(with_points(healthy(), spike)).health is Health.HEALTHY
    wild = (*points[:-3], *(replace(point, grad_norm=900.0, loss=50.0) for point in points[-3:]))
    assert judge(with_points(healthy(), wild)).rule == "gradients explode"


def test_an_error_that_nothing_follows_fails() -> None:
    snapshot = healthy(errors=(OOM,))
    assert judge(snapshot).health is Health.HEALTHY
    verdict = judge(silent(snapshot, 80))
    assert (verdict.health, verdict.rule) == (Health.FAILING, "error line")
    assert (verdict.node, verdict.rank, verdict.evidence[0]) == ("n001", 6, OOM)
    assert "micro_batch_size" in verdict.advice


def test_an_error_after_which_steps_were_done_is_a_remark() -> None:
    snapshot = healthy(errors=(replace(OOM, written_by=NOW - 500),))
    verdict = judge(silent(snapshot, 80))
    assert verdict.health is Health.HEALTHY
    assert any("training continued" in remark for remark in verdict.remarks)


def test_an_error_in_a_start_that_goes_no_further_fails() -> None:
    line = make_line("ModuleNotFoundError: No module named 'x'", node="n000", rank=0, num_same=16)
    snapshot = healthy(progress=None, ranks=(), errors=(line,), went_at=NOW - 300)
    assert judge(snapshot).health is Health.RUNNING
    verdict = judge(silent(snapshot, 130))
    assert (verdict.health, verdict.rule) == (Health.FAILING, "error line")
    assert "16 times" in verdict.reason


def test_a_full_disk_fails_once_a_rank_says_so() -> None:
    disk = Disk(path="/data", what="checkpoints", free_bytes=0, total_bytes=10**12)
    verdict = judge(healthy(disks=(disk,)))
    assert verdict.health is Health.HEALTHY
    assert any("0.0 GB" in remark for remark in verdict.remarks)
    line = make_line("OSError: [Errno 28] No space left on device", node="n001", rank=4)
    assert judge(healthy(disks=(disk,), errors=(line,))).rule == "disk full"


def test_skipped_saves_fail_until_one_is_complete() -> None:
    """Training goes on meanwhile: it is the checkpoints that do not."""
    disk = Disk(path="/ckpt", what="checkpoints", free_bytes=2_000_000, total_bytes=10**9)
    skipped = Skipped(400, 3, NOW - 600, "/ckpt", "iteration 400 was not saved: No space", True)
    found = healthy(skipped=skipped, disks=(disk,), checkpoint_step=100)
    verdict = judge(found)
    assert (verdict.health, verdict.rule) == (Health.FAILING, "saves skipped")
    assert "the last 3 saves were skipped, for 10 min" in verdict.reason
    assert "no room in /ckpt (2.0 MB free)" in verdict.reason
    assert judge(replace(found, checkpoint_step=500)).health is Health.HEALTHY
    assert found.skipped is not None
    verdict = judge(replace(found, skipped=replace(found.skipped, waits=True)))
    assert "a save waits, for 10 min: no room in /ckpt (2.0 MB free)" in verdict.reason
    assert "training goes on" not in verdict.reason


def test_a_checkpoint_that_was_set_aside_is_told_of() -> None:
    one = Damaged(200, "/ckpt/varuna_ckpt_200.a.1.damaged", "rank 1: segment-0003 is missing")
    verdict = judge(healthy(damaged=(Damaged(100, "/ckpt/x", "cut"), one)))
    assert verdict.health is Health.HEALTHY
    (remark,) = verdict.remarks
    assert (
        "step 200 is damaged and was set aside (rank 1: segment-0003 is missing), and 1" in remark
    )
    assert one.path in remark


def test_no_process_on_any_gpu_long_after_the_start_fails() -> None:
    unused = {"num_processes": 0, "utilization": 0.0, "memory_used_mb": 3}
    snapshot = change_gpus(healthy(progress=None, ranks=()), None, **unused)
    assert judge(snapshot).rule == "no gpu process"
    unseen = change_gpus(snapshot, None, memory_used_mb=15000)
    assert judge(unseen).health is not Health.FAILING
    assert judge(replace(snapshot, went_at=NOW - 300)).health is Health.STARTING
