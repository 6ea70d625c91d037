"""Processor time of each test, with all that it starts, forks of a server among it.

    python -m benchmarks.suite.processor [pytest's arguments]

As root on a Linux with control groups: each pytest process puts itself into one of its own, whose
time includes that of every process it starts. Prints the files and the tests that take most. The
time of a server's start is with the test that first needs it, and a process that outlives its test
counts for the next one.
"""

from __future__ import annotations

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


def render(rows: list[tuple[str, float]]) -> str:
    """The sum, the files and the tests that take most."""
    files: dict[str, float] = defaultdict(float)
    for name, seconds in rows:
        files[name.partition("::")[0]] += seconds
    lines = [f"{len(rows)} tests and collections: {sum(files.values()):.0f} s of processor"]
    for found in (list(files.items()), rows):
        most = sorted(found, key=lambda row: -row[1])[:NUM_SHOWN]
        lines += ["", *(f"{seconds:8.1f}  {name}" for name, seconds in most)]
    return "\n".join(lines)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-p", __spec__.name, *sys.argv[1:]],
            env={**os.environ, FOLDER: name},
        )
        texts = (path.read_text() for path in Path(name).iterdir())
        rows = [json.loads(line) for text in texts for line in text.splitlines()]
    print(render([(test, seconds) for test, seconds in rows]))
    for group in ROOT.glob(f"{NAME}*"):
        with contextlib.suppress(OSError):  # of another run that goes on
            group.rmdir()
    return code


if __name__ == "__main__":
    sys.exit(main())
