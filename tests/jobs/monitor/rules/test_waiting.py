"""Verdicts on jobs that wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    healthy,
    make_outcome,
    starting,
    with_state,
)
from varuna_core.facts.cluster import NodeCondition, NodeState
from varuna_core.records.exits import Outcome
from vjob.jobs.monitor.model.snapshot import Attempt, Health, JobRow, Scheduler, Snapshot
from vjob.jobs.monitor.rules.judge import judge
from vjob.jobs.monitor.rules.words import format_chain


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


def test_a_refused_job_is_refused_with_the_schedulers_message() -> None:
    verdict = judge(healthy(record_state="refused", message="invalid account"))
    assert (verdict.health, verdict.rule) == (Health.REFUSED, "refused")
    assert verdict.exit_code == 17
    assert "invalid account" in verdict.reason


def test_a_pending_job_has_its_reason_and_start() -> None:
    verdict = judge(waiting("Priority", start="2024-05-01T12:00:00"))
    assert (verdict.health, verdict.exit_code) == (Health.PENDING, 0)
    assert "higher priority" in verdict.reason and "2024-05-01T12:00:00" in verdict.reason


def test_a_job_that_cannot_run_says_so_and_what_to_do() -> None:
    verdict = judge(waiting("PartitionNodeLimit"))
    assert (verdict.health, verdict.never_starts, verdict.exit_code) == (Health.PENDING, True, 12)
    assert "the job's queue has, or allows, fewer nodes" in verdict.reason
    assert verdict.advice == "vjob cancel 4711; lower count of the node group; submit again"


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("JobHeldUser", "release it with `scontrol release 4711`"),
        ("JobHeldAdmin", "ask an admin to release it"),
        ("DependencyNeverSatisfied", "vjob cancel 4711"),
    ],
)
def test_a_held_job_needs_no_new_submit(reason: str, advice: str) -> None:
    verdict = judge(waiting(reason))
    assert (verdict.never_starts, verdict.exit_code) == (True, 12)
    assert verdict.advice == advice
    old = waiting(reason)
    old = replace(old, scheduler=replace(old.scheduler, age_s=24.0))
    assert judge(old).advice == f"{advice} (the scheduler was asked 24 s ago)"


def test_a_sentence_of_the_scheduler_is_shown_whole_and_known_for_good() -> None:
    said = "Job's account not permitted to use this partition (big allows a not b)"
    verdict = judge(waiting(said, start="2024-05-01T15:13:39"))
    assert (verdict.never_starts, verdict.exit_code) == (True, 12)
    assert said in verdict.reason and "cluster.account" in verdict.advice
    assert "15:13" not in verdict.reason and "wait" not in verdict.advice


def test_the_start_after_a_requeue_is_the_one_that_slurm_expects() -> None:
    """It was said to be some two minutes away, beside Slurm's own time for it."""
    said = judge(waiting("BeginTime", restarts=1, start="2024-05-01T12:00:06")).reason
    assert said.endswith(
        "BeginTime: the job waits for its begin time, expected to start 2024-05-01T12:00:06"
    )
    assert "minutes" not in judge(waiting("BeginTime", restarts=1)).reason


def test_a_job_that_waits_for_jobs_names_them() -> None:
    said = judge(waiting("Dependency", dependency="afterok:3(unfulfilled)")).reason
    assert "Dependency: the job waits for afterok:3(unfulfilled)" in said


@pytest.mark.parametrize(
    ("cause", "said"), [("preempted", "preempted by another job"), ("node-fail", "a node failed")]
)
def test_a_requeue_says_why(cause: str, said: str) -> None:
    """A preemption was `requeued 1 time(s), after: all 4 ranks exited 0`."""
    earlier = (Attempt(number=0, reason="all 4 ranks exited 0", step=90),)
    snapshot = waiting("BeginTime", restarts=1, earlier=(cause,))
    verdict = judge(replace(snapshot, earlier=earlier))
    assert f"requeued once: {said}, after: all 4 ranks exited 0" in verdict.reason
    assert verdict.main.values["cause"] == cause


def test_a_job_that_is_being_preempted_says_when_it_ends() -> None:
    snapshot = with_state(healthy(), "RUNNING", preempted=NOW - 2, ends=NOW + 4)
    (found,) = [one for one in judge(snapshot).others if one.rule == "being preempted"]
    (said,) = [one for one in judge(snapshot).remarks if "for another job" in one]
    assert said.endswith("and ends this job in 4 s") and found.evidence[0].since == NOW - 2


def test_a_node_that_is_drained_is_named_with_the_admins_reason() -> None:
    """The reason `ECC GPU2` never reached status."""
    drained = NodeState("n001", NodeCondition.DRAINING, "mixed+drain", "ECC GPU2", "root", NOW - 60)
    snapshot = healthy(scheduler=replace(healthy().scheduler, node_states=(drained,)))
    verdict = judge(snapshot)
    assert verdict.health is Health.HEALTHY
    (said,) = [one for one in verdict.remarks if "n001" in one]
    assert said.startswith("the scheduler drains node n001: ECC GPU2 (root, 60 s ago)")
    assert not judge(with_state(snapshot, "COMPLETED")).remarks


def test_nodes_that_are_drained_are_no_wait_for_others_alone() -> None:
    for said in (
        "ReqNodeNotAvail, UnavailableNodes:a1",
        "Nodes required for job are DOWN, DRAINED or",
    ):
        verdict = judge(waiting(said))
        assert "down" in verdict.reason and "sinfo -R" in verdict.advice


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
    assert "2 times" in verdict.reason and "n001" in verdict.reason


@pytest.mark.parametrize("outcome", [None, make_outcome(0, "rank 0 checkpointed the function")])
def test_a_function_that_saved_and_comes_again_is_neither_failing_nor_done(
    outcome: Outcome | None,
) -> None:
    stop = {"kind": "requeue", "code": 0, "reason": "rank 0 checkpointed the function", "rank": 0}
    snapshot = healthy(stop=stop, outcome=outcome)
    verdict = judge(snapshot)
    assert verdict.health is Health.REQUEUED
    assert verdict.reason == "rank 0 checkpointed the function" and not verdict.remarks
    assert judge(with_state(snapshot, "FAILED")).health is not Health.REQUEUED


def test_a_function_that_saved_and_left_is_not_failing() -> None:
    stop = {"kind": "left", "code": 0, "reason": "rank 0 checkpointed and left", "rank": 0}
    assert judge(healthy(stop=stop)).health is not Health.FAILING


def test_a_suspended_job_waits() -> None:
    assert judge(with_state(healthy(), "SUSPENDED")).rule == "suspended"


def test_a_morph_is_no_end() -> None:
    snapshot = healthy(morph="8 x 4 to 6 x 4", outcome=make_outcome(113, "n001 was lost"))
    assert judge(snapshot).health is Health.MORPHING


def test_a_run_that_comes_back_is_not_done() -> None:
    """vjob watch said DONE between the end of its manager and the next start, and went home."""
    back = "the nodes of its last start to the nodes of its next start"
    snapshot = healthy(morph=back, outcome=make_outcome(0, "all 2 ranks exited 0"))
    assert judge(snapshot).health is Health.MORPHING
    assert judge(with_state(snapshot, "PENDING")).health is not Health.MORPHING
    assert judge(with_state(snapshot, "COMPLETED")).health is Health.DONE


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


def test_a_job_of_a_chain_says_which_runs_it_waits_for() -> None:
    assert format_chain(["a"], []) == "a to end well"
    assert format_chain(["a", "b"], ["c"]) == "a, b to end well, and for c to end"
    assert format_chain([], ["c"]) == "c to end"


def test_a_job_that_waits_to_start_its_ranks_anew_is_not_over() -> None:
    outcome = make_outcome(9, "rank 2 on n000 exited 9", 2, "n000")
    between = with_state(healthy(outcome=outcome, restarts=1, max_restarts=3), "RUNNING")
    verdict = judge(between)
    assert verdict.health is Health.REQUEUED
    assert "(restart 1 of 3), after: rank 2 on n000 exited 9" in verdict.reason
    assert judge(replace(between, attempt=1, outcome=None)).health is Health.HEALTHY
    assert judge(replace(between, attempt=1)).health is Health.DEAD
    assert judge(with_state(between, "FAILED")).health is Health.DEAD
