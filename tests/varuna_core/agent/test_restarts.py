"""Restart budget: what may be started anew, how often, and what the outcome says of it."""

from __future__ import annotations

import errno
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pythons import OLDEST, list_pythons
from tests.varuna_core.agent.local_run import Stage, make_group, make_plan, shell
from varuna_core.agent import restarts
from varuna_core.agent.restarts import (
    LONGEST_WAIT_S,
    Again,
    Budget,
    Failure,
    decide,
    find_last_step,
    find_obstacle,
    get_wait_s,
    number_attempt,
)
from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.known import Evidence
from varuna_core.facts.sentences import LAST_LINE
from varuna_core.records.exits import Outcome
from varuna_core.records.files import write_json
from varuna_core.records.record import append_event, read_restarts

FAILED = Outcome(9, "rank 2 on n1 exited 9", 2, "n1", None, [], 1.0)
SAME = Failure("exit 9: x", 12)
FAILURES = st.builds(
    Failure, st.sampled_from(["exit 9: x", "SIGKILL"]), st.sampled_from([None, 0, 12, 13])
)


def test_a_rank_that_failed_is_started_anew_until_the_budget_is_used_up() -> None:
    waits = []
    for used in range(7):
        decision = decide(None, Failure("exit 9: x", None), None, Budget(7, used, False), None)
        waits.append(decision.wait_s)
    assert waits == [3, 6, 12, 24, 48, 60, 60]
    decision = decide(None, SAME, None, Budget(7, 7, False), None)
    assert (decision.wait_s, decision.why_not) == (None, "cluster.restarts: 7 is used up")
    assert get_wait_s(10**9) == LONGEST_WAIT_S


def test_the_same_error_in_the_same_step_twice_running_is_not_started_anew() -> None:
    decision = decide(None, SAME, SAME, Budget(5, 1, False), None)
    assert decision.wait_s is None
    assert "after step 12 twice in a row: not started again" in decision.why_not
    assert "cluster.restart_same: true" in decision.why_not
    assert decide(None, SAME, SAME, Budget(5, 1, True), None).wait_s == 6
    for other in (Failure("exit 9: x", 13), Failure("exit 8: x", 12), Failure("exit 9: x", None)):
        assert decide(None, other, SAME, Budget(5, 1, False), None).wait_s == 6


def test_where_no_step_is_known_the_budget_alone_counts() -> None:
    unknown = Failure("exit 9: x", None)
    assert decide(None, unknown, unknown, Budget(5, 1, False), None).wait_s == 6


def test_what_the_time_limit_would_cut_off_is_not_started() -> None:
    assert decide(None, SAME, None, Budget(5, 0, False), 3.0).why_not.startswith("the time limit")
    assert decide(None, SAME, None, Budget(5, 0, False), 4.0).wait_s == 3


@given(
    allowed=st.integers(0, 6),
    starts_same=st.booleans(),
    story=st.lists(st.tuples(st.sampled_from([None, None, None, "", "no"]), FAILURES), max_size=30),
)
def test_no_story_is_started_anew_too_often(
    allowed: int, starts_same: bool, story: list[tuple[str | None, Failure]]
) -> None:
    """Attempts of a job, each failing as told, for as long as they are started anew."""
    used, before = 0, None
    for obstacle, failure in story:
        decision = decide(obstacle, failure, before, Budget(allowed, used, starts_same), None)
        if obstacle is not None:
            assert decision.wait_s is None
        if before == failure and failure.step is not None and not starts_same:
            assert decision.wait_s is None
        if decision.wait_s is None:
            break
        assert decision.why_not == "" and 0 < decision.wait_s <= LONGEST_WAIT_S
        used, before = used + 1, failure
    assert used <= allowed


@pytest.mark.parametrize(
    ("change", "facts", "said"),
    [
        ({}, {}, None),
        ({"code": 0, "culprit_rank": None}, {}, ""),
        ({"code": 137, "culprit_signal": "SIGKILL"}, {}, None),
        ({}, {"called": True}, ""),
        ({"code": 143, "culprit_rank": None}, {"kind": "signal"}, ""),
        ({"code": 143, "culprit_rank": None}, {"kind": "cancel"}, ""),
        ({"code": 143, "culprit_signal": "SIGTERM"}, {"kind": "rank"}, "SIGTERM is a call to end"),
        ({"code": 112, "culprit_rank": None}, {"began": False}, "the ranks never started"),
        ({"code": 113}, {}, "no other node"),
        ({"code": 2}, {}, "wrong input"),
        ({"code": 1, "culprit_rank": None}, {}, "no rank failed"),
        ({"code": 9, "culprit_rank": None}, {"kind": "rank"}, None),
    ],
)
def test_what_no_budget_starts_anew(
    change: dict[str, object], facts: dict[str, object], said: str | None
) -> None:
    outcome = Outcome(**{**vars(FAILED), **change})
    found = find_obstacle(
        outcome,
        {"kind": facts.get("kind", "rank")} if facts.get("kind") else None,
        began=bool(facts.get("began", True)),
        called=bool(facts.get("called", False)),
    )
    assert (found is None) is (said is None) and (said or "") in (found or "")
    assert bool(found) is bool(said)


FAILS = shell(
    'echo "step 7/50 loss 2.5"; echo "at 0x$VJOB_ATTEMPT$RANK: lost shard $$" >&2; exit 4'
)


def test_the_last_step_is_the_furthest_of_traces_and_logs(tmp_path: Path) -> None:
    """Rank 1 was killed, and with it the end of its trace; rank 2 is of no interest."""
    plan = make_plan(make_group("only", 4, 1))
    attempt = Stage(tmp_path / "run", plan).attempt
    attempt.make()
    assert find_last_step(plan, attempt, 1) is None
    for rank, steps in ((0, (46, 47)), (1, (46,)), (2, (90,))):
        lines = "".join(f'{{"step": {step}, "begin": 1, "took": 2}}\n' for step in steps)
        attempt.trace(rank).write_text(f'{{"trace": 1}}\n["F", 47, 1]\n{lines}{{"step": 9')
    assert find_last_step(plan, attempt, 1) == 47


def make_stage(folder: Path, **changes: object) -> Stage:
    plan = make_plan(make_group("only", 2, 1), **{"command": FAILS, "restarts": 3, **changes})
    return Stage(folder / "run", plan)


def play(stage: Stage, attempt: int, *words: str) -> str:
    """A whole attempt; what `close` says that the batch script is to do."""
    assert stage.open(attempt=attempt).returncode == 0
    for index in range(stage.plan.num_nodes):
        stage.start(index, attempt)
    codes = stage.wait()
    stage.end()
    done = stage.call("close", "--status", str(max(codes)), *words, attempt=attempt)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("version", [sys.version_info[:2], OLDEST])
def test_close_says_the_next_attempt_and_then_why_there_is_none(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    """The error's addresses and process ids differ from one attempt to the next."""
    stage = make_stage(tmp_path)
    stage.python = list_pythons().get(version) or pytest.skip("no Python 3.8 on this machine")
    assert number_attempt(stage.run, 0) == 0
    assert play(stage, 0) == "4 1 3"
    (event,) = read_restarts(stage.run)
    assert (event["attempt"], event["next"], event["left"]) == (0, 1, 2)
    assert (event["step"], event["wait_s"]) == (7, 3)
    assert "lost shard" in event["reason"] and event["error"] == "exit 4: at #: lost shard #"
    assert (number_attempt(stage.run, 0), number_attempt(stage.run, 2)) == (1, 3)
    assert play(stage, 1) == "4"
    said = (stage.run.attempt(1).outcome).read_text()
    assert "the same error after step 7 twice in a row: not started again" in said
    assert len(read_restarts(stage.run)) == 1


def test_asked_for_the_same_error_is_started_anew_too(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, restart_same=True, restarts=2)
    assert [play(stage, number) for number in range(3)] == ["4 1 3", "4 2 6", "4"]
    assert "cluster.restarts: 2 is used up" in stage.run.attempt(2).outcome.read_text()


def test_nothing_is_started_anew_once_the_job_was_told_to_end(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    assert play(stage, 0, "--called", " TERM") == "4"
    assert stage.call("signal", "--name", "USR1").returncode == 0
    assert stage.call("close", "--status", "4").stdout == "4\n"
    assert not read_restarts(stage.run)


def test_nothing_is_started_anew_that_the_time_limit_would_end(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    assert play(stage, 0, "--left", "-1") == "4"
    assert "the time limit comes first: not started again" in stage.attempt.outcome.read_text()
    assert stage.call("close", "--status", "4", "--left", "60").stdout == "4 1 3\n"


def test_without_a_budget_nothing_is_said_of_it(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, restarts=None)
    assert play(stage, 0) == "4"
    assert "again" not in stage.attempt.outcome.read_text()


def test_other_jobs_of_a_split_run_wait_for_the_word_of_the_first(tmp_path: Path) -> None:
    """The group `small` ends well and waits; then a rank of the first fails."""
    groups = make_group("big", 1, 1), make_group("small", 1, 1)
    text = '[ $RANK = 1 ] || { while [ ! -e "$VJOB_RUN/on" ]; do sleep 0.05; done; exit 4; }'
    plan = make_plan(*groups, layout="split", command=shell(text), restarts=1)
    stage = Stage(tmp_path / "run", plan)
    for name in ("small", "big"):
        assert stage.open("--group", name).returncode == 0
    stage.start_all()
    assert stage.nodes[1].wait(timeout=20) == 0
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(stage.call, "close", "--status", "0", "--group", "small")
        (stage.run.path / "on").touch()
        assert stage.nodes[0].wait(timeout=20) == 4
        first = stage.call("close", "--status", "4", "--group", "big")
        assert first.stdout == "4 1 3\n", first.stderr
        assert waits.result().stdout == "0 1 3\n"
    stage.end()


def test_no_job_waits_for_a_first_group_that_was_told_to_end(tmp_path: Path) -> None:
    groups = make_group("big", 1, 1), make_group("small", 1, 1)
    stage = Stage(tmp_path / "run", make_plan(*groups, layout="split", restarts=1))
    for name in ("small", "big"):
        assert stage.open("--group", name).returncode == 0
    stage.start_all()
    stage.wait()
    stage.end()
    assert stage.call("stop", "--reason", "cancelled").returncode == 0
    assert stage.call("close", "--status", "0", "--group", "small").stdout == "0\n"


@pytest.mark.parametrize(("cancelled", "again"), [(False, Again(1, 3)), (True, None)])
def test_other_jobs_of_a_split_run_wait_while_the_first_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool, again: Again | None
) -> None:
    groups = make_group("big", 1, 1), make_group("small", 1, 1)
    plan = make_plan(*groups, layout="split", restarts=1)
    timing = replace(plan.timing, grace_s=0, lost_s=0)
    run = Stage(tmp_path / "run", replace(plan, timing=timing)).run
    attempt = run.attempt(0)
    attempt.make()
    write_json(attempt.go, {})
    looks: list[None] = []

    def find_full(run_folder: Path, store: Path | None) -> Path:
        looks.append(None)
        if len(looks) == 3:
            write_json(attempt.next, asdict(Again(1, 3)))
            write_json(attempt.outcome, {})
        if cancelled:
            append_event(run.events(), "cancel-asked")
        return run_folder

    monkeypatch.setattr(restarts, "find_full", find_full)
    monkeypatch.setattr(restarts, "DECIDING_S", 0)
    monkeypatch.setattr(restarts, "POLL_S", 0.01)
    monkeypatch.setattr(restarts, "ROOM_LOOK_S", 0.01)
    assert restarts.await_first_group(run, replace(plan, timing=timing), attempt) == again


def test_a_job_ends_where_the_first_one_died_while_the_folder_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waited until its time limit: a full folder alone was taken for a first job that waits."""
    groups = make_group("big", 1, 1), make_group("small", 1, 1)
    plan = make_plan(*groups, layout="split", restarts=1)
    plan = replace(plan, timing=replace(plan.timing, grace_s=0, lost_s=0))
    run = Stage(tmp_path / "run", plan).run
    attempt = run.attempt(0)
    attempt.make()
    write_json(attempt.go, {})
    left = [5]  # as often the first job shows that it waits

    def find_full(run_folder: Path, store: Path | None) -> Path:
        if left[0]:
            left[0] -= 1
            restarts.show_waiting(attempt)
            monkeypatch.setattr(restarts, "SILENT_S", 0.05 if not left[0] else 600)
        return run_folder

    monkeypatch.setattr(restarts, "find_full", find_full)
    monkeypatch.setattr(restarts, "DECIDING_S", 0)
    monkeypatch.setattr(restarts, "POLL_S", 0.01)
    monkeypatch.setattr(restarts, "ROOM_LOOK_S", 0.01)
    assert restarts.await_first_group(run, plan, attempt) is None
    assert left == [0], "not before it is silent"
    said = capsys.readouterr().err
    assert "the first group's job" in said and str(run.path) in said


def test_a_full_folder_is_looked_at_no_more_often_than_the_first_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look writes a file of 1 MiB where a quota may be what is full."""
    groups = make_group("big", 1, 1), make_group("small", 1, 1)
    plan = make_plan(*groups, layout="split", restarts=1)
    plan = replace(plan, timing=replace(plan.timing, grace_s=0, lost_s=0))
    run = Stage(tmp_path / "run", plan).run
    attempt = run.attempt(0)
    attempt.make()
    write_json(attempt.go, {})
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write_json(attempt.outcome, {})

    monkeypatch.setattr(restarts, "find_full", lambda run_folder, store: run_folder)
    monkeypatch.setattr(restarts, "DECIDING_S", 0)
    monkeypatch.setattr("time.sleep", sleep)
    assert restarts.await_first_group(run, plan, attempt) is None
    assert waits == 3 * [restarts.ROOM_LOOK_S]


def test_a_first_job_that_waits_for_room_shows_it_without_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Stage(tmp_path / "run", make_plan(make_group("a", 1, 1), restarts=1)).run
    attempt = run.attempt(0)
    attempt.make()
    write_json(attempt.go, {})
    os.utime(attempt.go, (1, 1))
    looks = iter([run.path, run.path, None])
    monkeypatch.setattr(restarts, "find_full", lambda folder, store: next(looks))
    monkeypatch.setattr(restarts, "ROOM_LOOK_S", 0.01)
    said = Evidence(LAST_LINE, text=os.strerror(errno.ENOSPC))
    end = End(EndCause.RANK_EXIT, code=1, rank=2, node="n1", evidence=(said,))
    plan = make_plan(make_group("a", 1, 1), restarts=1)
    assert restarts.await_room(run, plan, attempt, end, None) is not None
    assert attempt.go.stat().st_mtime > 1
    attempt.go.unlink()
    restarts.show_waiting(attempt)
