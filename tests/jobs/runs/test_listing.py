"""`vjob list` in a pipe and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command import Vjob
from varuna_core.facts.hang import Hang, HangWitness
from varuna_core.hang.signs import end_hang, tell_suspicion, write_hang
from varuna_core.records.files import append_line
from varuna_core.records.record import REFUSED, RunRecord, write_record
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.runs.listing import choose_message, render

MESSAGE = "rank 5 on b3 exited 9: ValueError: " + " ".join(["xxx"] * 60)
ROW = {
    "run": "one-20260102-030405",
    "jobs": ["77"],
    "state": "FAILED",
    "submitted": 0.0,
    "message": MESSAGE,
    "folder": "/log/one-20260102-030405",
}


def test_in_a_pipe_a_message_is_whole_and_one_line() -> None:
    assert render([ROW]).endswith(MESSAGE)
    table = render([{**ROW, "message": "refused:\n    sbatch: error: x\n  lower count"}])
    assert table.splitlines()[1].endswith("  refused: sbatch: error: x; lower count")


@pytest.mark.parametrize("width", [30, 59, 80, 100, 200])
def test_on_a_terminal_a_message_wraps_and_is_whole(width: int) -> None:
    message = "rank 5 on b3 exited 9: ValueError: no file " + "and no other file " * 12
    _, *lines = render([{**ROW, "message": message}], width).splitlines()
    assert " ".join(" ".join(lines).split()).endswith(" ".join(message.split()))
    assert max(map(len, lines)) <= max(width, 50)


def test_a_run_that_stands_says_so_until_it_goes_on(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(0)
    attempt.make()
    record = SimpleNamespace(message="", state="submitted")
    view: Any = SimpleNamespace(run=RunFolder(tmp_path), record=record, is_under_way=True)
    assert choose_message(view) == ""
    hang = Hang(HangWitness.STOPPED, since=1.0, seen_at=30.0, rank=1, node="n1")
    write_hang(attempt, hang)
    assert choose_message(view) == "hangs: rank 1 on n1 is stopped (SIGSTOP)"
    ended = SimpleNamespace(message="cancelled with vjob cancel", state="ended")
    over: Any = SimpleNamespace(**{**vars(view), "record": ended, "state": "CANCELLED"})
    assert choose_message(over) == f"{ended.message}; hung: rank 1 on n1 is stopped (SIGSTOP)"
    end_hang(attempt, replace(hang, until=40.0))
    assert choose_message(view) == "" and choose_message(over) == ended.message
    attempt.hang.unlink()
    tell_suspicion(attempt, hang)
    assert choose_message(over).endswith("; may have hung: rank 1 on n1 is stopped (SIGSTOP)")


def test_the_command_looks_whether_it_writes_to_a_terminal(tmp_path: Path) -> None:
    vjob = Vjob(tmp_path)
    vjob.env.pop("COLUMNS", None)
    run = RunFolder(tmp_path / "log" / "r")
    run.path.mkdir(parents=True)
    write_record(
        run,
        RunRecord(
            run="r",
            name="n",
            state=REFUSED,
            scheduler="local",
            layout="single",
            num_jobs=1,
            jobs=(),
            submitted=0.0,
            user="u",
            host="h",
            conf="c",
            version="0",
            pid=0,
            pid_start=None,
            message=MESSAGE,
        ),
    )
    index = tmp_path / "state" / "vjob" / "runs.jsonl"
    index.parent.mkdir(parents=True)
    append_line(index, {"run": "r", "name": "n", "path": str(run.path)})
    assert MESSAGE in vjob("list").stdout
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    command = [sys.executable, "-m", "vjob", "list"]
    subprocess.run(command, cwd=tmp_path, env=vjob.env, stdout=slave, timeout=60, check=True)
    os.close(slave)
    shown = os.read(master, 65536).decode().splitlines()
    os.close(master)
    assert max(map(len, shown)) <= 120 and " ".join(" ".join(shown).split()).endswith(MESSAGE)
