"""Processor time of each test, with all that it starts, forks of a server among it.

    python -m benchmarks.suite.processor [--keep FILE] [pytest's arguments]
    python -m benchmarks.suite.processor --by-room BEFORE AFTER [--write]

As root on a Linux with control groups: each pytest process puts itself into one of its own, whose
time includes that of every process it starts. Prints the files and the tests that take most. The
time of a server's start is with the test that first needs it, and a process that outlives its test
counts for the next one. `--keep` adds the times to a file; of two such files the second command
compares the test files that are in both, by room.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.durations import HEADING, RESULT

FOLDER = "VJOB_PROCESSOR_TIMES"
"""Variable: where the processes of pytest write."""
FIRST = Path("/sys/fs/cgroup/cpuacct")
"""Of control groups of version 1; version 2 has all in one tree."""
ROOT = FIRST if FIRST.exists() else FIRST.parent
NAME = "vjob-tests-"
NUM_SHOWN = 40


class Group:
    """A control group that this process and its children are in."""

    def __init__(self) -> None:
        self.path = ROOT / f"{NAME}{os.getpid()}"
        self.path.mkdir(exist_ok=True)
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def read_s(self) -> float:
        if ROOT == FIRST:
            return int((self.path / "cpuacct.usage").read_text()) / 1e9
        return int((self.path / "cpu.stat").read_text().split()[1]) / 1e6


class Recorder:
    """The plug-in of each process of pytest."""

    def __init__(self, folder: Path) -> None:
        self._group = Group()
        self._file = folder / str(os.getpid())

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._group.read_s()
        yield
        self._note(item.nodeid, self._group.read_s() - before)

    def pytest_collection_finish(self) -> None:
        self._note("collection", self._group.read_s())

    def _note(self, name: str, seconds: float) -> None:
        with self._file.open("a") as file:
            print(json.dumps([name, seconds]), file=file)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def sum_files(rows: list[tuple[str, float]]) -> dict[str, float]:
    files: dict[str, float] = defaultdict(float)
    for name, seconds in rows:
        files[name.partition("::")[0]] += seconds
    return files


def render(rows: list[tuple[str, float]]) -> str:
    """The sum, the files and the tests that take most."""
    files = sum_files(rows)
    lines = [f"{len(rows)} tests and collections: {sum(files.values()):.0f} s of processor"]
    for found in (list(files.items()), rows):
        most = sorted(found, key=lambda row: -row[1])[:NUM_SHOWN]
        lines += ["", *(f"{seconds:8.1f}  {name}" for name, seconds in most)]
    return "\n".join(lines)


def read_rows(text: str) -> list[tuple[str, float]]:
    return [(name, seconds) for name, seconds in map(json.loads, text.splitlines())]


def compare(before: dict[str, float], after: dict[str, float]) -> str:
    """The processor time of each room, of the files that were measured both times."""
    rooms: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for file in sorted(before.keys() & after.keys() - {"collection"}):
        for room in (str(Path(file).parent), "together"):
            rooms[room][0] += before[file]
            rooms[room][1] += after[file]
    rooms["together"] = rooms.pop("together")
    rows = (f"| {room} | {was:.0f} | {now:.0f} |" for room, (was, now) in rooms.items())
    return "\n".join(
        [
            HEADING,
            "",
            "Made by `python -m benchmarks.suite.processor --by-room BEFORE AFTER --write` from "
            "two measurements of the same files: seconds, with all that a test starts.",
            "",
            "| room | before | after |\n|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite.processor")
    parser.add_argument("--keep", type=Path, help="add the times to this file")
    parser.add_argument("--by-room", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    wanted, arguments = parser.parse_known_args()
    if wanted.by_room:
        page = compare(*(sum_files(read_rows(path.read_text())) for path in wanted.by_room))
        if wanted.write:
            RESULT.write_text(f"{RESULT.read_text().partition(HEADING)[0].rstrip()}\n\n{page}")
        print(page, end="")
        return 0
    with tempfile.TemporaryDirectory() as name:
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-p", __spec__.name, *arguments],
            env={**os.environ, FOLDER: name},
        )
        text = "".join(path.read_text() for path in Path(name).iterdir())
    if wanted.keep:
        with wanted.keep.open("a") as file:
            file.write(text)
    print(render(read_rows(text)))
    for group in ROOT.glob(f"{NAME}*"):
        with contextlib.suppress(OSError):  # of another run that goes on
            group.rmdir()
    return code


if __name__ == "__main__":
    sys.exit(main())
