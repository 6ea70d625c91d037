"""The verdict on jobs that wait, run and end; each rule on its own case."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.monitor.judge import RULES, judge
from jobs.monitor.rules import name_rule
from jobs.monitor.snapshot import Attempt, Disk, Echo, JobRow, Phase, Scheduler, Snapshot
from jobs.monitor.verdict import EXIT_CODES, Health
from tests.jobs.monitor.builders import (
    NOW,
    STEP_S,
    change_gpus,
    change_node,
    change_rank,
    healthy,
    make_exit,
    make_line,
    make_outcome,
    make_points,
    silent,
    with_points,
    with_state,
)


def over(snapshot: Snapshot, state: str = "FAILED", **facts: object) -> Snapshot:
    return replace(with_state(snapshot, state), **facts)  # type: ignore[arg-type]


def starting(**facts: object) -> Snapshot:
    begun = healthy(progress=None, ranks=(), went_at=None, attempt_started=NOW - 30)
    nodes = tuple(replace(node, phase="ready", gpus=()) for node in begun.nodes)
    return replace(begun, **{"nodes": nodes, **facts})  # type: ignore[arg-type]


def test_a_job_that_does_its_steps_is_healthy() -> None:
    verdict = judge(healthy())
    assert verdict.health is Health.HEALTHY
    assert "step 200 of 5000" in verdict.reason
    assert verdict.exit_code == 0
    assert verdict.remarks == ()


def test_every_rule_says_its_own_name() -> None:
    names = [name_rule(rule) for rule in RULES]
    assert len(set(names)) == len(names)


# Waiting


def test_a_refused_job_is_dead_with_the_schedulers_message() -> None:
    verdict = judge(healthy(record_state="refused", message="invalid account"))
    assert (verdict.health, verdict.rule) == (Health.DEAD, "refused")
    assert "invalid account" in verdict.reason


def waiting(reason: str, **facts: object) -> Snapshot:
    row = JobRow(id="4711", state="PENDING", word="PENDING", reason=reason, **facts)  # type: ignore[arg-type]
    return healthy(
        scheduler=Scheduler(name="slurm", jobs=(row,)),
        attempt=None,
        went_at=None,
        nodes=(),
        ranks=(),
        progress=None,
    )


def test_a_pending_job_has_its_reason_and_start() -> None:
    verdict = judge(waiting("Priority", start="2024-05-01T12:00:00"))
    assert (verdict.health, verdict.exit_code) == (Health.PENDING, 0)
    assert "higher priority" in verdict.reason and "2024-05-01T12:00:00" in verdict.reason


def test_a_job_that_cannot_run_says_so_and_what_to_do() -> None:
    verdict = judge(waiting("PartitionNodeLimit"))
    assert (verdict.health, verdict.never_starts, verdict.exit_code) == (Health.PENDING, True, 12)
    assert "lower count" in verdict.reason
    assert verdict.advice.startswith("vjob cancel 4711")


def test_one_pending_job_of_a_split_run_holds_the_others() -> None:
    rows = (
        JobRow(id="1", group="master", state="RUNNING"),
        JobRow(id="2", group="slave", state="PENDING", reason="Resources"),
    )
    verdict = judge(starting(scheduler=Scheduler(name="slurm", jobs=rows)))
    assert verdict.health is Health.PENDING
    assert "group slave" in verdict.reason


def test_a_requeued_job_counts_its_starts() -> None:
    earlier = (Attempt(number=0, reason="node n001 was lost", step=90),)
    snapshot = replace(waiting("BeginTime", restarts=2), earlier=earlier)
    verdict = judge(snapshot)
    assert verdict.health is Health.REQUEUED
    assert "2 time(s)" in verdict.reason and "n001" in verdict.reason


def test_a_suspended_job_waits() -> None:
    assert judge(with_state(healthy(), "SUSPENDED")).rule == "suspended"


def test_a_morph_is_no_end() -> None:
    snapshot = healthy(morph="8 x 4 to 6 x 4", outcome=make_outcome(113, "n001 was lost"))
    assert judge(snapshot).health is Health.MORPHING


def test_a_submit_that_was_cut_off_is_unknown_after_a_while() -> None:
    snapshot = healthy(record_state="intent", scheduler=Scheduler(name="slurm"), attempt=None)
    assert judge(replace(snapshot, submitted=NOW - 5)).health is Health.PENDING
    assert judge(replace(snapshot, submitted=NOW - 5000)).health is Health.UNKNOWN


def test_a_job_that_was_just_submitted_may_not_be_shown_yet() -> None:
    snapshot = replace(waiting(""), scheduler=Scheduler(name="slurm"))
    assert judge(replace(snapshot, submitted=NOW - 20)).health is Health.PENDING
    assert judge(replace(snapshot, submitted=NOW - 2000)).health is Health.UNKNOWN


def test_a_job_started_anew_is_not_judged_by_the_attempt_before() -> None:
    """Between the scheduler's start and the new attempt's, the old outcome still lies there."""
    outcome = make_outcome(1, "rank 2 on n000 exited 1", 2, "n000")
    again = with_state(healthy(outcome=outcome), "RUNNING", restarts=1)
    assert judge(again).health is Health.REQUEUED
    assert judge(replace(again, attempt=1)).health is Health.DEAD
    assert judge(replace(again, attempt=1, outcome=None)).health is Health.HEALTHY


# Starting


@pytest.mark.parametrize(
    ("phase", "node_phase", "went"),
    [("container", "container", None), ("rendezvous", "ready", None), ("warm-up", "running", NOW)],
)
def test_a_start_has_its_phase(phase: str, node_phase: str, went: float | None) -> None:
    snapshot = starting(went_at=went)
    snapshot = change_node(snapshot, "n002", phase=node_phase)
    verdict = judge(snapshot)
    assert (verdict.health, verdict.phase) == (Health.STARTING, phase)


def test_missing_nodes_are_counted() -> None:
    snapshot = starting(num_nodes=6)
    assert "2 of 6" in judge(snapshot).reason


def test_a_warm_up_without_an_end_is_stalled() -> None:
    snapshot = change_gpus(silent(healthy(progress=None), 0), None, utilization=0.0)
    snapshot = replace(snapshot, went_at=NOW - 1500, ranks=())
    assert judge(snapshot).health is Health.HEALTHY  # its logs go on
    quiet = replace(
        snapshot, nodes=tuple(replace(node, log_at=NOW - 1400) for node in snapshot.nodes)
    )
    verdict = judge(quiet)
    assert (verdict.health, verdict.rule) == (Health.STALLED, "starting")
    assert "vjob stacks 4711" in verdict.advice


def test_the_first_step_ends_the_start() -> None:
    snapshot = with_points(healthy(went_at=NOW - 100), make_points([9.0]))
    assert judge(snapshot).health is Health.HEALTHY
    assert judge(silent(snapshot, 600)).health is Health.HEALTHY
    assert judge(silent(snapshot, 1300)).health is Health.STALLED


# Stalls


def test_silence_longer_than_the_jobs_own_steps_allow_is_a_stall() -> None:
    assert judge(silent(healthy(), 100)).health is Health.HEALTHY
    verdict = judge(silent(healthy(), 130))
    assert (verdict.health, verdict.exit_code) == (Health.STALLED, 14)
    assert "step 200" in verdict.reason


def test_slow_steps_have_a_longer_limit() -> None:
    snapshot = with_points(healthy(), make_points([60.0] * 50))
    snapshot = replace(
        snapshot, ranks=tuple(replace(rank, step_at=None) for rank in snapshot.ranks)
    )
    assert judge(silent(snapshot, 290)).health is Health.HEALTHY
    assert judge(silent(snapshot, 310)).health is Health.STALLED


def test_a_line_every_ten_steps_is_waited_for() -> None:
    snapshot = with_points(healthy(), make_points([10.0] * 50, every=10))
    assert judge(silent(snapshot, 450)).health is Health.HEALTHY


def test_a_stopped_rank_is_named_before_the_ordinary_limit() -> None:
    snapshot = change_rank(healthy(), 6, process_state="T")
    assert judge(silent(snapshot, 10)).health is Health.HEALTHY
    verdict = judge(silent(snapshot, 25))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.STALLED, "n001", 6)
    assert "kill -CONT 1006" in verdict.advice


def test_a_rank_stuck_in_the_kernel_is_the_suspect() -> None:
    verdict = judge(silent(change_rank(healthy(), 9, process_state="D"), 200))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.STALLED, "n002", 9)


def test_a_silent_node_is_the_suspect() -> None:
    snapshot = change_node(silent(healthy(), 300), "n003", beat_at=NOW)
    verdict = judge(snapshot)
    assert (verdict.health, verdict.node) == (Health.STALLED, "n003")


def test_the_idle_node_is_the_suspect_where_the_others_spin() -> None:
    snapshot = change_gpus(silent(healthy(), 300), None, utilization=100.0, history=(100.0,) * 6)
    snapshot = change_gpus(snapshot, "n002", utilization=0.0, history=(0.0,) * 6)
    verdict = judge(snapshot)
    assert (verdict.health, verdict.node) == (Health.STALLED, "n002")
    assert "idle" in verdict.reason


def test_the_only_rank_that_computes_is_the_suspect() -> None:
    snapshot = silent(healthy(), 300)
    ranks = tuple(replace(rank, cpu_percent=1.0) for rank in snapshot.ranks)
    verdict = judge(change_rank(replace(snapshot, ranks=ranks), 7, cpu_percent=99.0))
    assert (verdict.health, verdict.rank) == (Health.STALLED, 7)


def test_the_rank_whose_trace_is_behind_is_the_suspect() -> None:
    slow = silent(healthy(), 300)
    slow = replace(slow, ranks=tuple(replace(rank, step_s=20.0) for rank in slow.ranks))
    verdict = judge(change_rank(slow, 5, step=199))
    assert (verdict.health, verdict.rank, verdict.node) == (Health.STALLED, 5, "n001")
    quick = judge(change_rank(silent(healthy(), 300), 5, step=199))
    assert quick.rank is None  # it may just not be written out


def test_all_gpus_at_their_most_spin_in_a_collective() -> None:
    snapshot = change_gpus(silent(healthy(), 300), None, utilization=100.0, history=(100.0,) * 6)
    assert "spin in a collective" in judge(snapshot).reason


def test_all_gpus_idle_points_to_the_host() -> None:
    snapshot = change_gpus(silent(healthy(), 300), None, utilization=0.0, history=(0.0,) * 6)
    assert "on the host" in judge(snapshot).reason


def test_a_lost_node_is_named_by_the_schedulers_word() -> None:
    snapshot = change_node(silent(healthy(), 300), "n001", beat_at=NOW)
    scheduler = replace(snapshot.scheduler, lost_nodes={"n001": "DOWN*"})
    verdict = judge(replace(snapshot, scheduler=scheduler))
    assert (verdict.health, verdict.node) == (Health.DEAD, "n001")
    assert "DOWN*" in verdict.reason
    fresh = healthy(scheduler=replace(healthy().scheduler, lost_nodes={"n001": "DOWN*"}))
    assert judge(fresh).health is Health.HEALTHY


def test_after_the_last_step_there_is_time_to_save() -> None:
    snapshot = with_points(healthy(), make_points([STEP_S] * 200), num_steps=200)
    assert judge(silent(snapshot, 1500)).health is Health.HEALTHY
    assert judge(silent(snapshot, 2000)).health is Health.STALLED


def test_steps_without_a_time_are_as_old_as_their_log() -> None:
    points = tuple(replace(point, at=None) for point in make_points([STEP_S] * 200))
    snapshot = healthy(ranks=())
    assert snapshot.progress is not None
    progress = replace(snapshot.progress, points=points, at=None)
    assert judge(replace(snapshot, progress=progress)).health is Health.HEALTHY
    assert judge(silent(replace(snapshot, progress=progress), 200)).health is Health.STALLED


def test_a_batch_script_that_goes_on_after_its_ranks_is_well() -> None:
    ranks = tuple(
        replace(rank, exit=make_exit(rank.rank, rank.node, 0)) for rank in healthy().ranks
    )
    assert judge(silent(healthy(ranks=ranks), 900)).health is Health.HEALTHY
    tidying = with_state(silent(healthy(), 900), "COMPLETING")
    assert judge(tidying).rule == "ending"
    assert judge(with_state(healthy(), "COMPLETING")).health is Health.HEALTHY


# Checkpoints and evaluations


def in_phase(name: str, age: float, **facts: object) -> Snapshot:
    line = make_line(f"{name} begins")
    snapshot = replace(healthy(), phase=Phase(name=name, since=NOW, line=line), **facts)  # type: ignore[arg-type]
    return silent(snapshot, age)


def test_a_checkpoint_is_no_stall() -> None:
    assert judge(in_phase("checkpoint", 1500)).health is Health.CHECKPOINTING
    assert judge(in_phase("evaluation", 1500)).health is Health.HEALTHY
    assert judge(in_phase("checkpoint", 2000)).health is Health.STALLED


def test_the_limit_of_a_checkpoint_is_learned() -> None:
    facts = {"phases_s": {"checkpoint": 200.0}}
    assert judge(in_phase("checkpoint", 500, **facts)).health is Health.CHECKPOINTING
    assert judge(in_phase("checkpoint", 700, **facts)).health is Health.STALLED


def test_the_time_after_a_checkpoint_counts_from_its_end() -> None:
    snapshot = silent(healthy(phases_s={"checkpoint": 400.0}), 500)
    assert judge(replace(snapshot, phase_ended_at=NOW + 420)).health is Health.HEALTHY
    assert judge(snapshot).health is Health.HEALTHY  # its end may just not be told
    assert judge(replace(snapshot, phase_ended_at=NOW + 300)).health is Health.STALLED


def test_a_checkpoint_beside_the_training_hides_no_stall() -> None:
    snapshot = in_phase("checkpoint", 0)
    assert snapshot.phase is not None
    beside = replace(snapshot, phase=replace(snapshot.phase, since=NOW - 100))
    assert judge(beside).health is Health.HEALTHY
    assert judge(silent(beside, 200)).health is Health.STALLED


def test_an_error_from_before_a_checkpoint_does_not_end_it() -> None:
    snapshot = in_phase("checkpoint", 400, errors=(OOM,))
    assert judge(snapshot).health is Health.CHECKPOINTING
    within = replace(snapshot, errors=(replace(OOM, written_by=NOW + 20),))
    assert judge(within).health is Health.FAILING


# Failing


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
    assert "step 50" in verdict.reason and "step 40" in verdict.advice
    skipped = (*points[:-1], replace(points[-1], loss=float("inf"), skipped=1))
    assert judge(with_points(healthy(), skipped)).health is Health.HEALTHY
    recovered = (*points[:20], replace(points[20], loss=float("nan")), *points[21:])
    assert judge(with_points(healthy(), recovered)).health is Health.HEALTHY


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


OOM = make_line("[rank6]: torch.OutOfMemoryError: CUDA out of memory.", node="n001", rank=6)


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
    assert any("went on" in remark for remark in verdict.remarks)


def test_an_error_in_a_start_that_goes_no_further_fails() -> None:
    line = make_line("ModuleNotFoundError: No module named 'x'", node="n000", rank=0, num_same=16)
    snapshot = healthy(progress=None, ranks=(), errors=(line,), went_at=NOW - 300)
    assert judge(snapshot).health is Health.STARTING
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


def test_no_process_on_any_gpu_long_after_the_start_fails() -> None:
    unused = {"num_processes": 0, "utilization": 0.0, "memory_used_mb": 3}
    snapshot = change_gpus(healthy(progress=None, ranks=()), None, **unused)
    assert judge(snapshot).rule == "no gpu process"
    unseen = change_gpus(snapshot, None, memory_used_mb=15000)
    assert judge(unseen).health is not Health.FAILING
    assert judge(replace(snapshot, went_at=NOW - 300)).health is Health.STARTING


# Slow


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
    slow = with_points(healthy(), make_points([STEP_S] * 60 + [2.6] * 10))
    verdict = judge(slow)
    assert (verdict.health, verdict.rule) == (Health.SLOW, "slower")
    once = with_points(healthy(), make_points([STEP_S] * 66 + [9.0] * 4))
    assert judge(once).health is Health.HEALTHY


def test_a_slowness_that_just_began_is_a_remark_where_there_is_a_history() -> None:
    slow = with_points(healthy(), make_points([STEP_S] * 60 + [2.6] * 10))
    verdict = judge(slow, [healthy(), healthy()])
    assert verdict.health is Health.HEALTHY
    assert any("1.9 times" in remark for remark in verdict.remarks)
    assert judge(slow, [healthy(), slow, slow]).health is Health.SLOW


def test_heat_with_slower_steps_is_slow_and_heat_alone_a_remark() -> None:
    hot = change_gpus(healthy(), "n002", throttle="hw_thermal", temperature=93)
    assert judge(hot).health is Health.HEALTHY
    assert any("n002:0" in remark for remark in judge(hot).remarks)
    slow = with_points(hot, make_points([STEP_S] * 60 + [1.9] * 10))
    assert (judge(slow).rule, judge(slow).node) == ("throttled", "n002")


# Over


def test_a_job_whose_ranks_exited_0_is_done() -> None:
    verdict = judge(over(healthy(), "COMPLETED", outcome=make_outcome(0, "all 16 ranks exited 0")))
    assert (verdict.health, verdict.exit_code) == (Health.DONE, 0)
    assert "vjob report 4711" in verdict.advice


def test_a_job_finished_yesterday_is_done_by_its_record() -> None:
    snapshot = healthy(
        scheduler=Scheduler(name="slurm"),
        record_state="ended",
        record_verdict="COMPLETED",
        outcome=make_outcome(0, "all 16 ranks exited 0"),
    )
    assert judge(silent(snapshot, 86400)).health is Health.DONE


def killed() -> Snapshot:
    why = "rank 6 on n001 was ended by SIGKILL"
    outcome = make_outcome(137, why, 6, "n001", culprit_signal="SIGKILL")
    noise = make_line("RuntimeError: Connection closed by peer", node="n000", rank=2)
    return over(healthy(), outcome=outcome, errors=(noise,))


def test_a_killed_rank_is_named_with_its_signal() -> None:
    verdict = judge(killed())
    assert (verdict.health, verdict.exit_code) == (Health.DEAD, 10)
    assert (verdict.node, verdict.rank) == ("n001", 6)
    assert "SIGKILL" in verdict.reason and "nothing tells who" in verdict.reason
    assert verdict.evidence[0].kind == "connection lost"


def test_memory_is_the_cause_where_something_proves_it() -> None:
    proof = make_line("slurmstepd: error: Detected 2 oom_kill events in StepId=1.0.", node="n001")
    verdict = judge(replace(killed(), errors=(*killed().errors, proof)))
    assert "memory was used up" in verdict.reason
    assert verdict.evidence[0] == proof
    full = change_node(killed(), "n001", memory_used_mb=749_000)
    assert "749000 of 750000" in judge(full).reason
    assert "memory" in judge(with_state(killed(), "OUT_OF_MEMORY")).reason


def test_fallout_of_the_culprit_points_to_the_rank_that_began() -> None:
    lines = (
        make_line("RuntimeError: Connection closed by peer", node="n000", rank=2),
        OOM,
    )
    outcome = make_outcome(1, "rank 2 on n000 exited 1", 2, "n000")
    verdict = judge(over(healthy(), outcome=outcome, errors=lines))
    assert (verdict.node, verdict.rank) == ("n001", 6)
    assert "CUDA out of memory" in verdict.reason


def test_exits_tell_the_culprit_where_the_batch_script_left_no_outcome() -> None:
    snapshot = change_rank(healthy(), 6, exit=make_exit(6, "n001", 139, "SIGSEGV"))
    verdict = judge(over(snapshot, "COMPLETED"))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.DEAD, "n001", 6)
    assert "SIGSEGV" in verdict.reason


def test_ranks_that_the_scheduler_ended_are_no_cause() -> None:
    why = "rank 6 on n001 was ended by SIGTERM"
    outcome = make_outcome(143, why, 6, "n001", culprit_signal="SIGTERM")
    verdict = judge(over(healthy(), "TIMEOUT", outcome=outcome))
    assert "time limit" in verdict.reason and verdict.rank is None
    verdict = judge(over(healthy(), "TIMEOUT", outcome=outcome, errors=(OOM,)))
    assert "time limit" in verdict.reason and "CUDA out of memory" in verdict.reason


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("TIMEOUT", "time limit"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "memory"),
    ],
)
def test_the_schedulers_word_is_a_cause(state: str, said: str) -> None:
    outcome = make_outcome(143, "SIGTERM from the scheduler")
    verdict = judge(over(healthy(), state, outcome=outcome))
    assert verdict.health is Health.DEAD
    assert said in verdict.reason


def test_a_lost_node_is_a_cause() -> None:
    why = "n003 was lost: rank 12 left no exit code"
    verdict = judge(over(healthy(), "NODE_FAIL", outcome=make_outcome(113, why, 12, "n003")))
    assert (verdict.health, verdict.node, verdict.rank) == (Health.DEAD, "n003", 12)
    assert "cluster.exclude" in verdict.advice


def test_a_batch_script_that_never_ran_says_why() -> None:
    snapshot = over(healthy(progress=None, nodes=(), ranks=(), attempt=None), "FAILED")
    jobs = (JobRow(id="4711", state="FAILED", exit_code="0:53"),)
    lost = replace(snapshot, scheduler=Scheduler(name="slurm", jobs=jobs))
    assert "output could not be made" in judge(lost).reason
    said = replace(snapshot, scheduler_lines=("module: command not found",))
    assert "command not found" in judge(said).reason


# A folder of logs


def bare(age: float, **facts: object) -> Snapshot:
    snapshot = healthy(scheduler=Scheduler(name=""), record_state="", attempt=None, **facts)
    return replace(snapshot, now=NOW + age)


def test_a_bare_folder_whose_last_step_is_done_is_done() -> None:
    points = make_points([STEP_S] * 50)
    assert judge(with_points(bare(1e6), points, num_steps=50)).health is Health.DONE
    said = ("[after training is done] datetime: 2023-06-14 16:08:12 ",)
    assert judge(change_node(bare(1e6), "n000", out=said)).health is Health.DONE


def test_an_old_bare_folder_that_stopped_short_is_dead() -> None:
    verdict = judge(bare(1e6))
    assert (verdict.health, verdict.rule) == (Health.DEAD, "abandoned")
    assert "step 200 of 5000" in verdict.reason
    assert judge(bare(1e6, progress=None)).health is Health.UNKNOWN
    assert judge(bare(1e6, progress=None, errors=(OOM,))).health is Health.DEAD


def test_a_young_bare_folder_is_judged_like_a_running_job() -> None:
    assert judge(bare(10)).health is Health.HEALTHY
    assert judge(bare(600)).health is Health.STALLED


# Remarks and doubt


def test_a_scheduler_that_does_not_answer_is_a_remark() -> None:
    scheduler = replace(healthy().scheduler, problem="squeue: timed out", age_s=95.0)
    verdict = judge(healthy(scheduler=scheduler))
    assert verdict.health is Health.HEALTHY
    assert any("95 s old" in remark for remark in verdict.remarks)


def test_clocks_gpus_and_nodes_have_remarks() -> None:
    snapshot = change_gpus(healthy(clock_skew_s=40.0), "n001", ecc_errors=2, num_foreign=1)
    remarks = " / ".join(judge(change_node(snapshot, "n003", clock_offset_s=-30.0)).remarks)
    for word in ("ECC", "n001:0", "not the job's", "40 s", "n003"):
        assert word in remarks


def test_a_state_that_nobody_knows_is_unknown() -> None:
    snapshot = healthy(progress=None, ranks=(), nodes=(), attempt=None)
    verdict = judge(with_state(snapshot, "UNKNOWN"))
    assert (verdict.health, verdict.exit_code) == (Health.UNKNOWN, 11)


def test_every_rule_has_its_heading_in_the_docs_in_order() -> None:
    text = (Path(__file__).parents[3] / "docs" / "status.md").read_text()
    part = text.partition("\n## Verdicts\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.+)$", part, re.MULTILINE) == [name_rule(rule) for rule in RULES]
    for health in Health:
        assert f"| {health.value} |" in part
    for health, code in EXIT_CODES.items():
        assert re.search(rf"\| {health.value} \|.*\| {code} \|", part)
