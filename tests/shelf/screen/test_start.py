"""What the screen's keys have done: `vjob` itself, in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.shelf.screen.sample_job import EMPTY, make_snapshot
from vjob.jobs.errors import VjobError
from vjob.jobs.monitor.model.snapshot import Snapshot
from vjob.shelf.screen.actions import JobActions


@dataclass
class Reader:
    """The last look."""

    last: Snapshot | None

    def find_logs(self) -> dict[str, dict[str, str]]:
        return {}


def make_actions(last: Snapshot | None) -> JobActions:
    reader: Any = Reader(last)
    return JobActions(reader)


def test_a_key_runs_vjob_wherever_one_is_and_tells_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs.py").write_text("raise SystemExit('the wrong jobs')")
    monkeypatch.chdir(tmp_path)
    missing = replace(make_snapshot(1), folder=str(tmp_path / "nowhere"))
    with pytest.raises(VjobError, match="nowhere"):
        make_actions(missing).report()


def test_cancel_names_what_it_will_end_and_logs_alone_have_nothing_to_cancel() -> None:
    says = make_actions(make_snapshot(2)).cancel_text
    assert "4711+0 and 4711+1" in says and "60 s" in says
    assert make_actions(EMPTY).cancel_text == ""
    assert make_actions(None).cancel_text == ""


def test_before_the_first_look_nothing_can_be_done_and_no_line_is_there() -> None:
    actions = make_actions(None)
    with pytest.raises(VjobError, match="nothing is known"):
        actions.stacks()
    assert actions.lines.read_new(None) == []


def test_lines_come_from_the_jobs_folder(tmp_path: Path) -> None:
    (tmp_path / "n1.out").write_text("2: hello\n")
    (line,) = make_actions(replace(EMPTY, folder=str(tmp_path))).lines.read_new("n1")
    assert (line.text, line.rank) == ("hello", 2)
