"""Verdicts on jobs that start, save, or do no steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    OOM,
    STEP_S,
    change_gpus,
    change_node,
    change_rank,
    healthy,
    in_phase,
    make_exit,
    make_points,
    silent,
    starting,
    with_points,
    with_state,
)
from varuna_core.facts.cluster import NodeCondition, NodeState
from varuna_core.facts.hang import Hang, HangAction, HangWitness
from vjob.jobs.monitor.model.snapshot import Health
from vjob.jobs.monitor.readers.attempt import choose_hang
from vjob.jobs.monitor.rules.judge import judge


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


def test_a_run_that_waits_for_another_step_of_its_allocation_says_so() -> None:
    """The second run inside one salloc said only that its node has not reported."""
    busy = "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)"
    snapshot = replace(starting(num_nodes=6), scheduler_lines=(busy,))
    assert "waits until another step of the job" in judge(snapshot).reason
    created = replace(snapshot, scheduler_lines=(busy, "srun: Step created for job 7"))
    assert "2 of 6" in judge(created).reason


def test_a_warm_up_without_an_end_is_stalled() -> None:
    snapshot = change_gpus(silent(healthy(progress=None), 0), None, utilization=0.0)
    snapshot = replace(snapshot, went_at=NOW - 1500, ranks=())
    assert judge(snapshot).health is Health.RUNNING  # its logs go on
    quiet = replace(
        snapshot, nodes=tuple(replace(node, log_at=NOW - 1400) for node in snapshot.nodes)
    )
    verdict = judge(quiet)
    assert (verdict.health, verdict.rule) == (Health.STALLED, "starting")
    assert "vjob stacks 4711" in verdict.advice


def test_the_first_step_ends_the_start() -> None:
    snapshot = with_points(healthy(went_at=NOW - 100), make_points([9.0]))
    assert judge(snapshot).health is Health.HEALTHY
    assert judge(silent(snapshot, 600)).health is Health.RUNNING
    assert judge(silent(snapshot, 1300)).health is Health.STALLED


def test_a_hang_in_the_first_steps_says_when_it_will_be_called_stalled() -> None:
    """It was HEALTHY for 20 minutes, without a word."""
    snapshot = with_points(healthy(ranks=(), went_at=NOW - 10), make_points([0.3] * 4))
    usual, late = judge(silent(snapshot, 30)), judge(silent(snapshot, 480))
    assert "too early" not in usual.reason and usual.advice == ""
    assert late.health is Health.RUNNING
    assert late.reason.startswith("step 4 of 5000 8 min ago, 0.3 s a step; ")
    assert late.reason.endswith("the job is STALLED after 20 min without one")
    assert late.advice == "vjob stacks 4711"


@pytest.mark.parametrize(
    ("age_s", "num_bytes", "cpu", "said"),
    [
        (20, 0, 0.0, "STARTING"),
        (20, 0, 99.0, "STARTING"),  # imports
        (90, 0, 0.0, "STARTING"),  # ranks connect
        (20, 40, 0.0, "RUNNING: no step has been seen yet"),
        (20, 4000, 0.0, "RUNNING: no line of the program is known to report a step; set progress"),
        (90, 40, 0.0, "RUNNING: no line of the program is known to report a step; set progress"),
        (90, 0, 99.0, "RUNNING: it printed nothing; vjob stacks"),
        (400, 0, 0.0, "RUNNING: it printed nothing; vjob stacks"),
        (1300, 0, 99.0, "RUNNING: it printed nothing; vjob stacks"),
        (1300, 0, 0.0, "STALLED"),
        (90, 40, 99.0, "STARTING"),  # a built-in program: its steps would be known
    ],
)
def test_ranks_that_run_without_a_known_step_are_not_starting(
    age_s: float, num_bytes: int, cpu: float, said: str
) -> None:
    """STARTING for hours, of a program that printed a line an epoch, or nothing."""
    begun = starting(went_at=NOW - age_s, ranks=healthy().ranks[:4])
    begun = replace(begun, ranks=tuple(replace(one, step_at=None, cpu_percent=cpu)
                                       for one in begun.ranks))  # fmt: skip
    node = {"phase": "running", "sizes": {"out": num_bytes}, "log_at": NOW if num_bytes else None}
    for name in [one.name for one in begun.nodes]:
        begun = change_node(begun, name, **node)
    is_told = said == "STARTING" and num_bytes > 0
    verdict = judge(replace(begun, info={"WORLD_SIZE": "4"} if is_told else {}))
    health, _, rest = said.partition(": ")
    reason, _, advice = rest.partition("; ")
    assert verdict.health.value == health
    assert reason in verdict.reason and verdict.advice.startswith(advice)
    assert bool(advice) == bool(verdict.advice) or health != "RUNNING"


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


@pytest.mark.parametrize(("until", "rule"), [(None, "hangs"), (NOW, "healthy")])
def test_a_hang_that_the_agents_found_is_told_until_the_steps_go_on(
    until: float | None, rule: str
) -> None:
    hang = Hang(
        HangWitness.MISMATCHED,
        since=NOW - 60,
        seen_at=NOW - 10,
        rank=6,
        node="n001",
        collective="all_reduce 9",
        called_by=(0, 1, 2, 3, 4, 5, 7),
        missing=(6,),
        other="barrier",
        until=until,
    )
    verdict = judge(replace(healthy(), hang=hang))
    assert verdict.rule == rule
    if until is None:
        assert (verdict.health, verdict.node, verdict.rank) == (Health.STALLED, "n001", 6)
        assert verdict.reason.startswith(
            "ranks 0-5, 7 called all_reduce 9, rank 6 on n001 called barrier instead; no step"
        )


def test_a_stopped_rank_that_the_agents_found_can_be_let_go_on() -> None:
    """The advice was there until the agents were sure, and then only `vjob stacks`."""
    hang = Hang(HangWitness.STOPPED, since=NOW - 60, seen_at=NOW - 10, rank=6, node="n001")
    snapshot = replace(change_rank(healthy(), 6, process_state="T"), hang=hang)
    verdict = judge(silent(snapshot, 76))
    assert verdict.rule == "hangs" and verdict.advice.startswith("`kill -CONT 1006` on n001")


def test_all_stopped_ranks_of_a_node_are_let_go_on_together() -> None:
    """Two ranks were named as stopped, and the process of one."""
    snapshot = silent(change_rank(healthy(), 6, process_state="T"), 400)
    verdict = judge(change_rank(snapshot, 7, process_state="T"))
    assert "kill -CONT 1006 1007" in verdict.advice and "ranks 6, 7 on n001" in verdict.reason


def test_a_rank_that_is_stopped_is_a_remark_while_steps_go_on() -> None:
    verdict = judge(change_rank(healthy(), 6, process_state="T"))
    assert verdict.health is Health.HEALTHY
    (remark,) = verdict.remarks
    assert remark.startswith("rank 6 on n001 is stopped") and "kill -CONT 1006" in remark


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


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({"step": 25, "step_at": NOW - 300}, True, id="stands"),
        pytest.param({"step": 25, "step_at": NOW - 60}, False, id="not yet"),
        pytest.param({"step": 25, "step_at": NOW - 60, "process_state": "T"}, True, id="stopped"),
        pytest.param({"step": 25, "step_at": NOW - 300, "step_s": 50.0}, False, id="slow"),
        pytest.param({"step": 5000, "step_at": NOW - 300}, False, id="through"),
        pytest.param({"step_at": NOW - 300, "exit": make_exit(5, "n001", 0)}, False, id="left"),
    ],
)
def test_a_rank_that_stands_while_others_go_on_is_named(
    changes: dict[str, Any], is_told: bool
) -> None:
    snapshot = healthy()
    assert snapshot.progress is not None
    counted = replace(snapshot.progress, done=snapshot.progress.step)
    ranks = tuple(replace(rank, step=400, step_at=NOW, step_s=1.0) for rank in snapshot.ranks)
    snapshot = change_rank(replace(snapshot, ranks=ranks, progress=counted), 5, **changes)
    verdict = judge(snapshot)
    assert (verdict.rank == 5 and verdict.health is Health.STALLED) is is_told
    if is_told:
        assert "rank 5 on n001 has been at step 25" in verdict.reason
        assert verdict.reason.endswith("while others continue, at step 400")


def test_all_gpus_at_their_most_spin_in_a_collective() -> None:
    snapshot = change_gpus(silent(healthy(), 300), None, utilization=100.0, history=(100.0,) * 6)
    assert "spin in a collective" in judge(snapshot).reason


def test_all_gpus_idle_points_to_the_host() -> None:
    snapshot = change_gpus(silent(healthy(), 300), None, utilization=0.0, history=(0.0,) * 6)
    assert "on the host" in judge(snapshot).reason


def test_a_lost_node_is_named_by_the_schedulers_word() -> None:
    snapshot = change_node(silent(healthy(), 300), "n001", beat_at=NOW)
    scheduler = replace(snapshot.scheduler, lost_nodes={"n001": "DOWN*"})
    verdict = judge(replace(snapshot, scheduler=scheduler, checkpoint_step=40))
    assert (verdict.health, verdict.node) == (Health.DEAD, "n001")
    assert "DOWN*" in verdict.reason
    assert "step 40, from which the run continues" in verdict.facts[-1]
    fresh = healthy(scheduler=replace(healthy().scheduler, lost_nodes={"n001": "DOWN*"}))
    assert judge(fresh).health is Health.HEALTHY


def test_a_node_that_slurm_called_down_after_its_last_beat_is_lost_at_once() -> None:
    """A run was HEALTHY after Slurm had called its node down."""
    down = NodeState("n001", NodeCondition.LOST, "down+not_responding", since=NOW)
    said = {"lost_nodes": {"n001": "down"}, "node_states": (down,)}
    scheduler = replace(healthy().scheduler, **said)  # type: ignore[arg-type]
    snapshot = replace(change_node(healthy(), "n001", beat_at=NOW - 20), scheduler=scheduler)
    assert judge(snapshot).health is Health.DEAD
    assert judge(change_node(snapshot, "n001", beat_at=NOW - 2)).health is Health.HEALTHY


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


@pytest.mark.parametrize(
    ("action", "acts_at", "words"),
    [
        (HangAction.RESTART, NOW + 12, "its ranks are ended and restarted within 12 s"),
        (HangAction.REQUEUE, NOW, "the job goes back into the queue now"),
        (HangAction.STOP, NOW + 12, "the run is ended within 12 s"),
        (HangAction.REPORT, None, "vjob itself does nothing about the hang"),
    ],
)
def test_a_hang_that_is_suspected_says_what_will_be_done_and_when(
    action: HangAction, acts_at: float | None, words: str
) -> None:
    hang = Hang(HangWitness.STOPPED, NOW - 20, NOW - 15, 1, "n1", action=action, acts_at=acts_at)
    files = {"hanging": hang.as_json()}
    found, _ = choose_hang(files)
    assert found == hang
    assert words in judge(replace(healthy(), hang=found)).reason


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (HangAction.RESTART, "its ranks are ended and restarted within 45 s"),
        (
            HangAction.REPORT,
            "the hang is certain within 45 s if no step comes; vjob itself does nothing about",
        ),
    ],
)
def test_a_run_that_may_hang_is_not_called_healthy(action: HangAction, words: str) -> None:
    hang = Hang(HangWitness.SILENT, NOW - 60, NOW, action=action, acts_at=NOW + 45)
    verdict = judge(replace(healthy(), suspected=hang))
    assert verdict.health is Health.RUNNING and "left" not in verdict.reason
    assert "the run may hang: no rank is active; no step for 60 s" in verdict.reason
    assert words in verdict.reason


def test_a_hang_whose_ranks_are_being_ended_is_no_healthy_run_with_time_left() -> None:
    hang = Hang(HangWitness.SILENT, NOW - 60, NOW, until=NOW, action=HangAction.RESTART)
    found, suspected = choose_hang({"hang": hang.as_json()})
    verdict = judge(replace(healthy(), hang=found, suspected=suspected))
    assert "left" not in verdict.reason and "restarted now" in verdict.reason


@pytest.mark.parametrize(
    ("witness", "until", "expected"),
    [("silent", None, None), ("lost", None, "lost"), ("lost", NOW, "lost")],
)
def test_a_silence_without_a_reason_is_not_told_early(
    witness: str, until: float | None, expected: str | None
) -> None:
    hang = Hang(HangWitness(witness), NOW - 20, NOW - 15, acts_at=NOW)
    files = {"hanging": hang.as_json()}
    if until is not None:
        files["hang"] = Hang(HangWitness.SILENT, NOW - 90, NOW - 60, until=until).as_json()
    found, suspected = choose_hang(files)
    assert (found and found.witness.value) == expected
    assert (suspected is None) == (expected is not None)
