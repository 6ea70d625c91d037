"""A small sample of the staged runs: the right cause first, and none for a healthy run; and the
count that real runs' reports are compared with."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.commands.findings import STAGED, Run, judge, stage
from tests.reports.analysis.test_accounting import NOW, write_run
from tests.reports.counted import Held, compare, parse_held

SMALL = Run(stages=2, replicas=2, micros=8, layers=8, layer_s=0.03, steps=16, start_s=10)


@pytest.mark.parametrize("cause", STAGED)
def test_the_report_names_what_is_wrong_first(tmp_path: Path, cause: str) -> None:
    row = judge(cause, stage(cause, SMALL, 0.5), 7, tmp_path)
    assert row.first is not None
    assert row.first.cause == cause
    assert row.first.key or cause == "slowdown", "of a slowdown nothing tells why"
    assert row.first.cost, "it says what it costs"
    assert row.unknown < 0.02
    assert row.overlap < 0.001


def test_a_healthy_run_has_nothing_to_change(tmp_path: Path) -> None:
    row = judge("", SMALL, 7, tmp_path)
    assert row.first is None
    assert row.unknown < 0.02


def write_time(second: float) -> str:
    return datetime.fromtimestamp(NOW + second).isoformat(timespec="seconds")


def test_the_count_agrees_with_the_report_of_a_run_by_its_lines(tmp_path: Path) -> None:
    write_run(tmp_path)
    row = "|".join(["7", "COMPLETED", *map(write_time, (0, 29, 100))])
    sacct = f"JobID|State|Submit|Start|End\n{row}\n"
    result = compare(tmp_path, sacct)
    found = {row.name: row.counted for row in result.rows}
    assert found["queue"] == 2 * 29
    assert found["lost"] == pytest.approx(2 * (1 + 5 + 5))
    assert found["steps"] == pytest.approx(2 * (4 + 5))
    # Its saves are known by lines alone, which the count does not read.
    assert [problem.partition(":")[0] for problem in result.find_problems()] == ["saves"]
    path = tmp_path / "attempt-1" / "n0.out"
    path.write_text(path.read_text().replace("500.0", "9000.0"))
    assert "steps" in " ".join(compare(tmp_path, sacct).find_problems())


def test_sacct_has_rows_for_sizes_and_for_parts_of_one_job() -> None:
    rows = {
        ("7+0", "RESIZING"): (0, 1, 50),
        ("7+1", "CANCELLED"): (0, 1, 40),
        ("7+0", "REQUEUED"): (50, 50, 60),
        ("7+0", "COMPLETED"): (60, 70, 90),
    }
    text = [["JobID"], *([*words, *map(write_time, times)] for words, times in rows.items())]
    assert parse_held("\n".join(map("|".join, text))) == [
        Held(submitted=NOW, started=NOW + 1, ended=NOW + 60),
        Held(submitted=NOW + 60, started=NOW + 70, ended=NOW + 90),
    ]
