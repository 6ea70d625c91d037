"""Why a run ended: the scheduler's word and the ranks' own, put together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.varuna_core.agent.local_run import make_plan
from varuna_core.agent.setup.known_lines import write_known_lines
from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.facts.catalogue.remedies import do
from varuna_core.facts.cause import EndCause
from varuna_core.facts.sentences import describe_end
from varuna_core.records import record as records
from varuna_core.records.exits import (
    Judgement,
    NodeExits,
    Outcome,
    parse_judged,
    rank_exit,
    write_outcome,
)
from varuna_core.records.plan import write_plan
from varuna_core.records.record import (
    JobRecord,
    RunRecord,
    append_event,
    is_cancel_asked,
    read_record,
    write_record,
)
from varuna_core.records.requests import read_stop, write_stop
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs import find as runs
from vjob.jobs.runs.outcome import choose_deciding_job, decide_end, end_of_job, judge_run
from vjob.jobs.schedulers.job import END_CAUSES, JobState, SchedulerJob

TOLD = "n0 was told to end by SIGTERM"
HAS_LEFT = "has left: its job ends, or somebody ended its agent"
BY_SCHEDULER = "from the scheduler (cancel or time limit)"
"""As the manager of a run that may morph wrote it while stop.json had no cause."""


def make_run(folder: Path, *, started: bool = True, reason: str = TOLD) -> RunFolder:
    run = RunFolder(folder / "demo-1")
    run.path.mkdir()
    write_plan(run.plan, make_plan())
    if started:
        run.attempt(0).make()
        write_stop(run.attempt(0), "signal", 143, TOLD)
        write_outcome(run.attempt(0), make_outcome(reason))
    return run


def make_outcome(reason: str) -> Outcome:
    return Outcome(143, reason, None, None, None, [], 1.0)


def make_row(pattern: str) -> KnownLine:
    return KnownLine("row", pattern, Scope.CONTAINER, remedies=(do("mend it"),))


def make_job(word: str) -> SchedulerJob:
    state = JobState(word)
    return SchedulerJob(id="7", state=state, native_word=word, end_cause=END_CAUSES.get(state))


def explain(run: RunFolder, word: str, outcome: Outcome | None) -> str:
    """The message of a run whose last attempt left this outcome and no end.json."""
    attempts = run.attempts()
    judged = None
    if outcome is not None:
        stop = read_stop(attempts[-1])
        judged = Judgement(parse_judged(outcome, None, stop), outcome)
    is_asked, started = is_cancel_asked(run), None if attempts else False
    job = end_of_job(make_job(word), is_asked=is_asked, started=started)
    return describe_end(decide_end(run, judged, job))


@pytest.mark.parametrize(
    ("verdict", "asked", "message"),
    [
        ("TIMEOUT", False, "the time limit was reached"),
        ("DEADLINE", False, "its deadline passed"),
        ("PREEMPTED", False, "preempted"),
        ("NODE_FAIL", False, "the scheduler reports that a node failed"),
        ("BOOT_FAIL", False, "a node did not boot"),
        ("CANCELLED", True, "cancelled with vjob cancel"),
        ("CANCELLED", False, "cancelled"),
        ("FAILED", False, TOLD),
    ],
)
def test_who_was_told_to_end_learns_why(
    tmp_path: Path, verdict: str, asked: bool, message: str
) -> None:
    run = make_run(tmp_path)
    if asked:
        append_event(run.vjob_events, "cancel-asked")
    assert explain(run, verdict, make_outcome(TOLD)) == message


@pytest.mark.parametrize(
    ("stop", "code", "reason"),
    [
        (("signal", 143), 113, "agent on n1 exited without a message: rank 3 left no exit code"),
        (("group", 143), 143, "group weak: SIGTERM from the scheduler (cancel or time limit)"),
        (("lost", 113), 113, f"n1 {HAS_LEFT}; SIGTERM from the scheduler"),
    ],
)
def test_a_bare_scancel_is_a_cancel_whatever_the_agents_saw_of_it(
    tmp_path: Path, stop: tuple[str, int], code: int, reason: str
) -> None:
    """A split run, one whose ranks left no exits, one that may morph."""
    run = make_run(tmp_path, started=False)
    run.attempt(0).make()
    write_stop(run.attempt(0), *stop, reason)
    outcome = Outcome(code, reason, 3 if code == 113 else None, None, None, [3], 1.0)
    assert explain(run, "CANCELLED", outcome) == "cancelled"


def test_a_cancel_of_a_run_that_may_morph_is_one_whoever_hears_of_it_first(tmp_path: Path) -> None:
    """The manager itself, and a node that is leaving as its ranks are ended."""
    run = make_run(tmp_path, started=False)
    run.attempt(0).make()
    write_stop(run.attempt(0), "lost", 113, f"SIGTERM {BY_SCHEDULER}")
    outcome = Outcome(113, f"n1 {HAS_LEFT}; SIGTERM {BY_SCHEDULER}", None, None, None, [3], 1.0)
    assert explain(run, "CANCELLED", outcome) == "cancelled"


@pytest.mark.parametrize("kind", ["rank", "lost"])
def test_a_cancel_after_a_failure_leaves_the_failure_its_reason(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path, started=False)
    run.attempt(0).make()
    write_stop(run.attempt(0), kind, 113, "n1 was lost")
    outcome = Outcome(113, "n1 was lost", 3, "n1", None, [3], 1.0)
    assert explain(run, "CANCELLED", outcome) == "n1 was lost"


def test_a_split_run_has_the_word_of_the_job_that_was_ended_from_outside() -> None:
    failed, cancelled = (
        SchedulerJob(id=job, state=state, native_word=state.value, end_cause=END_CAUSES.get(state))
        for job, state in (("1", JobState.FAILED), ("2", JobState.CANCELLED))
    )
    done = SchedulerJob(id="3", state=JobState.COMPLETED, native_word="COMPLETED")
    assert choose_deciding_job([failed, cancelled], has_cause=False) is cancelled
    assert choose_deciding_job([failed, cancelled], has_cause=True) is failed
    assert choose_deciding_job([done, failed], has_cause=False) is failed
    assert choose_deciding_job([done], has_cause=False) is done


def test_a_failure_before_the_time_limit_stays_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, reason="rank 0 on n0 exited 9")
    outcome = Outcome(9, "rank 0 on n0 exited 9", 0, "n0", None, [], 1.0)
    assert explain(run, "TIMEOUT", outcome).endswith("exited 9")


def test_ranks_that_nobody_told_to_begin_were_not_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path, started=False)
    run.attempt(0).make()
    facts: dict[str, Any] = {
        "state": JobState.FAILED,
        "native_word": "FAILED",
        "reason_text": "JobLaunchFailure",
    }
    facts["end_cause"] = EndCause.BATCH_KILLED
    outcome = judge_run(run, [SchedulerJob(id="7", code=0, signal=10, **facts)])
    assert outcome is not None and outcome.outcome.code != 0 and outcome.end.rank is None
    assert outcome.outcome.reason == "the batch script was ended by SIGUSR1"
    ended = rank_exit(0, "n0", 9, stopped=False, started=0.0, ended=1.0, error="")
    NodeExits(run.attempt(0), 0, 1).write(ended)
    outcome = judge_run(run, [SchedulerJob(id="7", code=0, signal=10, **facts)])
    assert outcome is not None and outcome.outcome.reason == "rank 0 on n0 exited 9"


def test_a_job_cancelled_in_the_queue_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, started=False)
    assert explain(run, "CANCELLED", None) == "cancelled before it started"
    assert explain(run, "NODE_FAIL", None) == "the scheduler reports that a node failed"
    assert explain(run, "DEADLINE", None) == "its deadline passed before it started"


def test_a_failed_node_is_named_by_srun(tmp_path: Path) -> None:
    run = make_run(tmp_path, reason="SIGTERM from outside, seen first on n0")
    fallout = "slurmstepd-n0: error: *** JOB 7 ON n0 CANCELLED DUE TO NODE FAILURE ***\n"
    log = run.path / "scheduler.out"
    log.write_text(f"srun: error: Node failure on n9\nattempt 0: ranks meet at x\n{fallout}")
    outcome = Outcome(113, "the agent on n0 exited without a message", 0, "n0", None, [0], 1.0)
    assert explain(run, "NODE_FAIL", None) == "the scheduler reports that a node failed"
    log.write_text(log.read_text() + "srun: error: Node failure on n1\n")
    for left in (None, outcome):
        assert explain(run, "NODE_FAIL", left) == "the scheduler reports that node n1 failed"


@pytest.mark.parametrize("place", ["reason", "node's log", "scheduler's log", "nowhere"])
def test_a_known_message_of_the_runtime_brings_its_remedy(tmp_path: Path, place: str) -> None:
    said = "FATAL ERROR: Can't find a SQUASHFS superblock"
    run = make_run(tmp_path)
    write_known_lines(run, [make_row("SQUASHFS superblock")])
    reason = f"rank 0 on n0 exited 1{f': {said}' if place == 'reason' else ''}"
    outcome = replace(make_outcome(reason), culprit_node="n0", code=1)
    noise = "".join(f"line {number}\n" for number in range(15))
    if place == "node's log":
        run.attempt(0).node_log("n0", "err").write_text(f"0 err | {said}\n{noise}")
    elif place == "scheduler's log":
        run.scheduler_log().write_text(f"slurmstepd: error: pyxis:  {said}\n{noise}")
    remedy = "" if place == "nowhere" else " -> mend it"
    assert explain(run, "FAILED", outcome) == f"{reason}{remedy}"


def test_a_remedy_that_the_reason_has_already_is_not_repeated(tmp_path: Path) -> None:
    run = make_run(tmp_path, started=False)
    run.attempt(0).make()
    write_stop(run.attempt(0), "not-ready", 112, "not ready: n0: torn -> mend it")
    write_known_lines(run, [make_row("torn")])
    outcome = replace(make_outcome("not ready: n0: torn -> mend it"), code=112)
    assert explain(run, "FAILED", outcome) == outcome.reason
    assert explain(run, "COMPLETED", replace(outcome, code=0, reason="torn")) == "torn"


def test_what_cannot_be_recorded_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A colleague looks at a run, or the disk is full."""
    run = make_run(tmp_path, reason="rank 0 on n0 exited 9")
    write_record(run, make_record(run))

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(runs, "write_record", refuse)
    view = runs.view_run(run)
    assert (view.state, view.record.message) == ("UNKNOWN", "rank 0 on n0 exited 9")
    assert "could not be recorded: Permission denied" in caplog.text
    assert (read_record(run) or view.record).outcome is None, "nothing was written"


def make_record(run: RunFolder) -> RunRecord:
    """As after a run whose outcome came late."""
    return RunRecord(
        run=run.name,
        name="demo",
        scheduler="local",
        layout="single",
        state=records.ENDED,
        num_jobs=1,
        jobs=(JobRecord(id="L1", group=None),),
        submitted=1.0,
        user="ann",
        host="login",
        conf="conf.yaml",
        version="0",
        pid=1,
        pid_start=None,
        verdict="UNKNOWN",
    )
