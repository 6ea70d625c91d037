"""Lines that look like the cause of an end and are not: printed, of another rank, old, overcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.jobs.monitor.builders import (
    NOW,
    change_rank,
    healthy,
    make_exit,
    make_line,
    make_outcome,
    make_points,
    over,
    with_points,
)
from vjob.jobs.monitor.model.snapshot import Line, Snapshot
from vjob.jobs.monitor.rules.doubts import Doubt, weigh_lines
from vjob.jobs.monitor.rules.judge import judge

BROKEN_DISK = "OSError: [Errno 5] Input/output error"


def failed(line: Line, **exits: Any) -> Snapshot:
    """Rank 6 on n001 exited 3 and wrote nothing; rank 7 was stopped by its agent."""
    outcome = make_outcome(3, "rank 6 on n001 exited 3", 6, "n001")
    snapshot = over(healthy(), outcome=outcome, errors=(line,))
    points = tuple(replace(one, at=NOW - 20) for one in make_points([1.0] * 200))
    snapshot = with_points(snapshot, points)
    snapshot = change_rank(snapshot, 6, exit=make_exit(6, "n001", 3, ended=NOW - 10))
    stopped = make_exit(7, "n001", 143, "SIGTERM", stopped=True, ended=NOW - 9)
    return change_rank(snapshot, 7, exit=replace(stopped, **exits))


def disk_line(rank: int, **facts: Any) -> Line:
    usual = {"stream": "stderr", "last_at": NOW - 11, "node": "n001", "rank": rank}
    return make_line(BROKEN_DISK, **{**usual, **facts})


def test_an_error_of_the_rank_that_failed_is_the_cause() -> None:
    verdict = judge(failed(disk_line(6)))
    assert "Input/output error" in verdict.reason and "file system" in verdict.advice


@pytest.mark.parametrize(
    "line",
    [
        disk_line(6, stream="stdout"),
        disk_line(7),
        disk_line(6, last_at=NOW - 10 - 3600),
    ],
    ids=["printed", "another rank's", "an hour old"],
)
def test_what_ended_nothing_is_shown_and_not_explained(line: Line) -> None:
    """A script caught an exception and printed it: a file system was said to fail."""
    verdict = judge(failed(line))
    assert verdict.reason == "rank 6 on n001 exited 3"
    assert "file system" not in verdict.advice
    assert any("Input/output error" in note for note in verdict.remarks)
    assert not any("file system" in note for note in verdict.remarks)


def test_an_error_with_steps_after_it_is_no_cause() -> None:
    points = tuple(replace(one, at=NOW - 12 + one.step - 200) for one in make_points([1.0] * 200))
    snapshot = with_points(failed(disk_line(6, last_at=NOW - 30)), points)
    assert judge(snapshot).reason == "rank 6 on n001 exited 3"
    assert weigh_lines(snapshot).errors[0].doubt == Doubt.WENT_ON.value


@pytest.mark.parametrize(
    ("late_s", "node", "doubt"),
    [
        (-1.0, "n001", ""),
        (1.0, "n001", Doubt.OTHER_RANK.value),
        (1.0, "n002", ""),
        (60.0, "n002", Doubt.OTHER_RANK.value),
    ],
)
def test_of_two_ranks_that_failed_the_first_has_the_cause(
    late_s: float, node: str, doubt: str
) -> None:
    """Clocks of two nodes may differ by some seconds."""
    facts = {"stopped": False, "code": 1, "signal": None, "ended": NOW - 10 + late_s}
    snapshot = failed(disk_line(7, node=node), **facts, node=node)
    assert weigh_lines(snapshot).errors[0].doubt == doubt


@pytest.mark.parametrize(
    ("raised", "code", "exception", "doubt"),
    [
        ("last", 1, "", ""),
        ("last", 3, "", Doubt.CAUGHT.value),
        ("earlier", 1, "", Doubt.CAUGHT.value),
        ("aside", 1, "", Doubt.CAUGHT.value),
        ("printed", 1, "", Doubt.CAUGHT.value),
        ("printed", 1, BROKEN_DISK, ""),
        ("last", 139, "", ""),
        ("quoted", 1, "", ""),
        ("quoted", 3, "", Doubt.CAUGHT.value),
        ("", 3, "", ""),
    ],
)
def test_an_exception_ends_a_process_that_exits_1(
    raised: str, code: int, exception: str, doubt: str
) -> None:
    snapshot = failed(disk_line(6, raised=raised))
    own = replace(make_exit(6, "n001", code, ended=NOW - 10), exception=exception)
    snapshot = change_rank(snapshot, 6, exit=own)
    assert weigh_lines(snapshot).errors[0].doubt == doubt


def test_an_error_that_a_living_rank_printed_may_be_its_end() -> None:
    snapshot = replace(healthy(), errors=(disk_line(6, raised="printed"),))
    assert weigh_lines(snapshot).errors[0].doubt != Doubt.CAUGHT.value


def test_the_error_that_a_failed_rank_quotes_is_its_peers() -> None:
    """Rank 7 raised, and its Python still shut down when rank 6 had failed for it."""
    error = "LeakError: a float32[4] made before cut 3 is used after it"
    raised = make_line(f"split.{error}", last_at=NOW - 11, node="n001", rank=7, stream="stderr")
    quoted = f"RankFailed: rank 6 cannot begin: rank 7: {error}"
    snapshot = failed(raised, last_error=f"[rank7]: split.{error}")
    outcome = make_outcome(1, f"rank 6 on n001 exited 1: {quoted}", 6, "n001")
    first = make_exit(6, "n001", 1, ended=NOW - 10)
    first = replace(first, last_error=quoted, exception=quoted, is_uncaught=True)
    snapshot = change_rank(replace(snapshot, outcome=outcome), 6, exit=first)
    verdict = judge(snapshot)
    assert (verdict.rank, "LeakError" in verdict.reason) == (7, True)
    (line,) = weigh_lines(snapshot).errors
    assert not line.doubt
    other = change_rank(snapshot, 7, exit=replace(snapshot.ranks[7].exit, last_error="x: y"))
    (line,) = weigh_lines(other).errors
    assert line.doubt == Doubt.OTHER_RANK.value
