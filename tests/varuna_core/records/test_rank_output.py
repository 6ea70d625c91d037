"""The output of a rank, out of the log of its node or of a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.varuna_core.agent.local_run import make_group, make_plan
from varuna_core.records.files import write_json
from varuna_core.records.logs.rank_output import list_outputs, locate_output
from varuna_core.records.runfolder import AttemptFolder, RunFolder

PLAN = make_plan(make_group("a", 2, 12))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    found = RunFolder(tmp_path).attempt(0)
    found.make()
    for index in range(2):
        write_json(found.node_report(index), {"host": f"n{index}"})
    return found


def test_a_ranks_lines_come_out_of_its_nodes_log(attempt: AttemptFolder) -> None:
    text = "1: one\n11: eleven\nvjob: no rank's\n1: 11: quoted\n1: \n1: \x1b[2Jlast\n"
    attempt.node_log("n0", "out").write_text(text)
    output = locate_output(attempt, PLAN, 1, "out")
    assert output.read() == b"one\n11: quoted\n\n\x1b[2Jlast\n"
    assert locate_output(attempt, PLAN, 11, "out").read() == b"eleven\n"
    assert output.last_lines(2) == ["11: quoted", "\\x1b[2Jlast"]
    assert output.read_end(len("1: \x1b[2Jlast\n") + 2) == b"\x1b[2Jlast\n"
    assert locate_output(attempt, PLAN, 12, "out").read() == b"", "n1 has written nothing"
    assert list_outputs(attempt) == [attempt.node_log("n0", "out")]


def test_a_file_of_its_own_is_read_as_it_is(attempt: AttemptFolder) -> None:
    attempt.rank_log(1, "out").write_bytes(b"half\r a line")
    attempt.node_log("n0", "out").write_text("1:  a line\n")
    assert locate_output(attempt, PLAN, 1, "out").read() == b"half\r a line"
    assert list_outputs(attempt) == [attempt.rank_log(1, "out")]


@pytest.mark.parametrize("host", ["../../elsewhere", "/etc/passwd", "", None, 7])
def test_a_report_names_no_file_outside(attempt: AttemptFolder, host: object) -> None:
    write_json(attempt.node_report(0), {"host": host})
    (attempt.path.parents[1] / "elsewhere.out").write_text("1: secret\n")
    assert locate_output(attempt, PLAN, 1, "out").read() == b""


def test_a_pipe_is_not_waited_for(attempt: AttemptFolder) -> None:
    os.mkfifo(attempt.node_log("n0", "out"))
    assert locate_output(attempt, PLAN, 1, "out").read() == b""
    assert locate_output(attempt, PLAN, 1, "out").last_lines(3) == []
