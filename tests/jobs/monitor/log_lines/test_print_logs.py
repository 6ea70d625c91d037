"""Which lines `vjob logs` is asked for, and whether there can be any."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import HETJOB, make_conf, make_plan
from varuna_core.records.files import write_json
from varuna_core.records.plan import write_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.quantities import parse_moment
from vjob.jobs.errors import InputError
from vjob.jobs.monitor.log_lines import print_logs as print_logs_module
from vjob.jobs.monitor.log_lines.print_logs import (
    MANY,
    LineFilter,
    RunLines,
    check_nodes,
    check_ranks,
    follow_lines,
    print_logs,
)
from vjob.jobs.schedulers.job import JobState, SchedulerJob


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Of eight nodes and 32 ranks."""
    run = RunFolder(tmp_path / "r")
    run.path.mkdir()
    write_plan(run.plan, make_plan(make_conf(HETJOB)))
    run.attempt(0).make()
    return run


def report(run: RunFolder, *numbers: int) -> None:
    for number in numbers:
        write_json(run.attempt(0).node_report(number), {"host": f"n{number}"})


def check(run: RunFolder, *nodes: str, wait: bool) -> bool:
    return check_nodes(run, run.attempts(), LineFilter(nodes=nodes), wait=wait)


def test_a_rank_that_is_none_is_told_with_those_that_are(run: RunFolder) -> None:
    check_ranks(run, LineFilter(ranks=(0, 31)))
    with pytest.raises(InputError, match="r has no rank -1, 32, only 0 to 31"):
        check_ranks(run, LineFilter(ranks=(-1, 5, 32)))


def test_a_follower_waits_for_a_name_until_all_nodes_have_reported(run: RunFolder) -> None:
    assert not check(run, "n7", wait=True)
    report(run, 0, 1)
    assert not check(run, "n7", wait=True)
    with pytest.raises(InputError, match="r has no node n7; so far it has n0, n1"):
        check(run, "n7", wait=False)
    report(run, *range(8))
    assert check(run, "n7", "n0", wait=True) and check(run, wait=True)
    with pytest.raises(InputError, match="r has no node n8; it has n0, n1, n2, n3, n4, n5, n6, n7"):
        check(run, "n7", "n8", wait=True)


def test_a_follower_of_a_job_that_never_starts_says_that_it_waits(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vjob run` for three nodes of a queue with two was silent until it was killed."""
    reason = "PartitionNodeLimit"
    info = SchedulerJob(id="7", state=JobState.PENDING, native_word="PENDING", reason_text=reason)
    record = SimpleNamespace(scheduler="local", state="submitted")
    ended = SimpleNamespace(
        scheduler="local", state="ended", verdict="CANCELLED", outcome=None, message="cancelled"
    )
    views = [
        SimpleNamespace(run=run, record=record, infos=[info], state="PENDING"),
        SimpleNamespace(run=run, record=ended, infos=[], state="CANCELLED"),
    ]
    monkeypatch.setattr(print_logs_module, "view_run", lambda run: views.pop(0))
    said: list[str] = []
    assert follow_lines(RunLines(run, said.append, LineFilter())) == 1
    waits = ", but the job cannot start; waiting for the run to end"
    assert said[:2] == [f"-- r is PENDING ({reason}){waits}", "-- r is CANCELLED"]


def test_of_many_names_a_message_lists_some(run: RunFolder) -> None:
    asked = tuple(range(100, 100 + MANY + 3))
    with pytest.raises(InputError, match=f"no rank 100, .*, {99 + MANY} and 3 more, only"):
        check_ranks(run, LineFilter(ranks=asked))


def test_without_a_plan_that_can_be_read_nothing_is_refused(run: RunFolder) -> None:
    """A colleague who was shown the run has no plan: it holds secrets."""
    run.plan.unlink()
    check_ranks(run, LineFilter(ranks=(99,)))
    assert check(run, "zz", wait=False)


@pytest.fixture
def timed(run: RunFolder) -> RunFolder:
    """One node's log; a line a second from 1700000000 on, and one that has no mark of its own."""
    attempt = run.attempts()[-1]
    text, marks = "", ""
    for number in range(4):
        marks += f"{1700000000 + number}.000 {len(text)} 0\n"
        text += f"0: step {number}\n"
    (attempt.path / "n1.out").write_text(text)
    (attempt.path / "n1.times").write_text(marks)
    return run


def print_all(run: RunFolder, **wanted: Any) -> list[str]:
    lines: list[str] = []
    print_logs(run, lines.append, LineFilter(**wanted), attempt=None, num_lines=None)
    return lines


def test_lines_of_a_time_are_chosen(timed: RunFolder) -> None:
    start = 1700000000.0
    found = print_all(timed, since=start + 1, until=start + 2)
    assert [line.rpartition("step ")[2] for line in found] == ["1", "2"]
    assert len(print_all(timed, since=start + 3)) == 1 and print_all(timed, until=start - 1) == []
    assert print_all(timed, since=start + 1, pattern="step 3") == ["n1 | 0: step 3"]
    with pytest.raises(InputError, match="--since is later than --until"):
        LineFilter(since=2.0, until=1.0)


def test_each_line_begins_with_its_time(timed: RunFolder) -> None:
    first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1700000000))
    assert print_all(timed, with_times=True)[0] == f"{first} n1 | 0: step 0"


def test_a_line_is_an_object_of_json(timed: RunFolder) -> None:
    values = [json.loads(line) for line in print_all(timed, as_json=True)]
    assert values[1] == {
        "format": 1,
        "time": 1700000001.0,
        "node": "n1",
        "rank": 0,
        "is_err": False,
        "text": "step 1",
    }


@given(st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)))
def test_a_moment_is_read_back_as_it_was_written(then: datetime) -> None:
    now = datetime(2100, 1, 1, tzinfo=timezone.utc)
    then = then.replace(microsecond=0, tzinfo=timezone.utc)
    for text in (f"{then:%Y-%m-%d %H:%M:%S}", then.isoformat(), f"{then:%Y-%m-%dT%H:%M:%SZ}"):
        assert parse_moment(text, now) == then


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("11:59", "2026-11-23 11:59:00"),
        ("12:30", "2026-11-22 12:30:00"),  # today it has not been yet
        ("0:00:05", "2026-11-23 00:00:05"),
        ("2h", "2026-11-23 10:00:00"),
        ("1d12h", "2026-11-22 00:00:00"),
        ("2026-11-20", "2026-11-20 00:00:00"),
        ("25:00", None),
        ("30", None),
        ("soon", None),
        ("", None),
    ],
)
def test_a_moment_is_a_time_of_day_a_date_or_an_age(text: str, expected: str | None) -> None:
    now = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)
    found = parse_moment(text, now)
    assert (found and f"{found:%Y-%m-%d %H:%M:%S}") == expected
