"""The verdict and the line that `vjob logs --errors` begins with, and when the line has a mark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs.confs import HETJOB, make_conf, make_plan
from tests.jobs.monitor.builders import (
    NOW,
    change_node,
    change_rank,
    healthy,
    make_exit,
    make_outcome,
    over,
    silent,
)
from tests.jobs.runs.test_last import RECORD
from varuna_core.records.exits import RankExit, end_of_rank
from varuna_core.records.files import write_json
from varuna_core.records.plan import write_plan
from varuna_core.records.record import write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.log_lines import print_logs
from vjob.jobs.monitor.log_lines.print_logs import LineFilter
from vjob.jobs.monitor.log_lines.stream import Log
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.jobs.monitor.readers import first_error
from vjob.jobs.monitor.readers.first_error import find_first_error, print_errors, render
from vjob.jobs.monitor.rules.doubts import Doubt
from vjob.jobs.monitor.rules.judge import judge

STACK = '6: Traceback (most recent call last):\n6:   File "x.py", line 5, in <module>\n'
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


def end(*exits: RankExit) -> Snapshot:
    """A job that the first of these exits ended."""
    first = exits[0]
    reason = f"rank {first.rank} on {first.node} {first.how}"
    outcome = make_outcome(first.code, reason, first.rank, first.node, culprit_signal=first.signal)
    snapshot = over(healthy(), outcome=outcome, attempt_end=end_of_rank(first))
    for one in exits:
        snapshot = change_rank(snapshot, one.rank, exit=one)
    return snapshot


def say(folder: Path, snapshot: Snapshot, err: str) -> list[str]:
    path = folder / "n001.err"
    path.write_text(err)
    verdict = judge(snapshot)
    found = find_first_error(snapshot, verdict, lambda: [Log(path, "n001")], wanted=LineFilter())
    return list(render(found, verdict))


def test_the_last_line_of_a_rank_is_the_cause_and_what_it_caught_is_not(tmp_path: Path) -> None:
    """An exception that the rank had caught steps before had the mark of the cause."""
    own = make_exit(6, "n001", 3, last_error="data file shard-17 has a bad checksum")
    said = say(tmp_path, end(own), f"{STACK}6: {OOM}\n6: data file shard-17 has a bad checksum\n")
    assert said[0] == "DEAD: rank 6 on n001 exited 3: data file shard-17 has a bad checksum"
    assert [line for line in said if line[0] == ">"] == ["> data file shard-17 has a bad checksum"]
    assert said[-1] == f"  rank 6 on n001: {OOM} ({first_error.NOT_THE_CAUSE[Doubt.CAUGHT.value]})"


def test_a_warning_of_torch_is_neither_quoted_nor_marked_as_the_cause(tmp_path: Path) -> None:
    """`exited 7: [W1130 ... socket.cpp:207]`, a line that healthy ranks print, had the mark."""
    warned = "[W1130 05:19:54.507728910 socket.cpp:207] [c10d] The hostname of the client socket"
    said = say(tmp_path, end(make_exit(6, "n001", 7, last_error=warned)), f"6: {warned}\n")
    assert said[0] == "DEAD: rank 6 on n001 exited 7" and "printed no error" in said[1]
    assert said[-1] == "no line is known as an error"


def test_a_kill_is_told_and_what_it_did_to_another_rank_has_no_mark(tmp_path: Path) -> None:
    """Rank 6 lost rank 7, and its agent ended it as it died of that: it caught nothing."""
    killed = make_exit(7, "n001", 137, "SIGKILL")
    lost = make_exit(6, "n001", 143, "SIGTERM", stopped=True, ended=NOW + 1)
    said = say(tmp_path, end(killed, lost), f"{STACK}6: {LOST}\n")
    assert said[0].startswith("DEAD: rank 7 on n001 was ended by SIGKILL; sender unknown")
    assert f"  {LOST}" in said and not any(line.startswith((">", "caught")) for line in said)
    assert said[-1] == first_error.NOT_THE_CAUSE[Doubt.OTHER_RANK.value]


def test_the_last_step_of_a_stalled_job_is_no_error(tmp_path: Path) -> None:
    snapshot = silent(change_node(healthy(), "n003", out=("step 200 loss 2.5",)), 400)
    assert judge(snapshot).evidence[0].text == "step 200 loss 2.5"
    said = say(tmp_path, snapshot, "step 200 loss 2.5\n")
    assert said[0].startswith("STALLED: no step for") and said[-1] == "no line is known as an error"


def test_an_exception_is_the_cause_only_if_it_ended_its_rank(tmp_path: Path) -> None:
    own = make_exit(6, "n001", 0)
    well = replace(over(healthy(), "COMPLETED"), outcome=make_outcome(0, "all exited 0"))
    text = f"{STACK}6: ValueError: x\n"
    said = say(tmp_path, change_rank(well, 6, exit=own), text)
    assert said[-1] == first_error.NOT_THE_CAUSE[Doubt.OTHER_RANK.value]
    own = replace(own, code=1, last_error="ValueError: x", exception="ValueError: x")
    said = say(tmp_path, end(own), text)
    assert said[-1] == "> ValueError: x"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Ended, of eight nodes and 32 ranks."""
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    write_plan(run.plan, make_plan(make_conf(HETJOB)))
    write_record(run, replace(RECORD, state="ended", verdict="FAILED", message="it failed"))
    run.attempt(0).make()
    return run


def test_an_error_of_the_batch_script_names_its_file_once(run: RunFolder) -> None:
    """It was headed `scheduler.out, scheduler.out`: the file's name is all there is of a place."""
    (run.path / "scheduler.out").write_text("slurmstepd: error: Detected 1 oom_kill event\n")
    said: list[str] = []
    print_errors(run, said.append, LineFilter(), attempt=None)
    assert "scheduler.out" in said


@pytest.mark.parametrize("mark", ["", "[rank1]: "])
def test_an_error_begins_with_its_traceback(mark: str, run: RunFolder) -> None:
    stack = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>',
             "    main()", "ValueError: bad sample"]  # fmt: skip
    lines = ["1: [W1129] a warning", *(f"1: {mark}{line}" for line in stack)]
    (run.attempt(0).path / "n0.err").write_text("\n".join(lines) + "\n")
    write_json(run.attempt(0).node_report(0), {"host": "n0"})
    said: list[str] = []
    print_errors(run, said.append, LineFilter(), attempt=None)
    at = said.index("rank 1 on n0, n0.err")
    assert [line[2:].removeprefix(mark) for line in said[at + 1 :]] == stack


def test_an_earlier_attempt_is_judged_by_its_own_files(run: RunFolder) -> None:
    for number, text in enumerate(("KeyError: 'first'", "ValueError: second")):
        attempt = run.attempt(number)
        attempt.make()
        lines = f"{STACK}6: {text}\n"
        (attempt.path / "n0.err").write_text(lines)
        write_json(attempt.node_report(0), {"host": "n0"})
    for number, text in ((0, "KeyError: 'first'"), (None, "ValueError: second")):
        said: list[str] = []
        print_errors(run, said.append, LineFilter(as_json=True), attempt=number)
        told = json.loads(said[0])
        assert text in told["reason"] and told["error"]["text"] == text


def test_the_search_of_an_error_ends_where_its_processor_time_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_error, "MOST_CPU_S", -1.0)
    print_logs.tell_once.cache_clear()
    said = say(tmp_path, healthy(), "0: RuntimeError: first\n" + "0 0 0\n" * 20_000)
    assert any("RuntimeError: first" in line for line in said)
    assert "lines of n001.err are read; -n 99 shows its end" in capsys.readouterr().err
