"""A stepped clock is seen by agents, and by nobody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.chaos.clock import Clocks

ASK = "import time; print(int(time.time()), int(time.monotonic()), time.gmtime().tm_year)"
YEAR_S = 366 * 86400


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_step_is_seen_by_agents_alone(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    clocks.build()

    def ask(**env: str) -> list[int]:
        command = [sys.executable, "-c", ASK]
        all_env = {**os.environ, **clocks.env, **env}
        said = subprocess.run(command, env=all_env, capture_output=True, text=True, check=True)
        return [int(word) for word in said.stdout.split()]

    host, year = os.uname().nodename, time.gmtime().tm_year
    assert clocks.step(host, YEAR_S)
    assert clocks.step(host, YEAR_S)
    before = time.monotonic()
    assert ask()[2] in (year + 2, year + 3)
    assert before - 1 <= ask()[1] <= time.monotonic() + 1
    assert ask(RANK="0")[2] in (year, year + 1)
    assert clocks.step(host, -3 * YEAR_S)
    assert ask()[2] in (year - 2, year - 1)


def test_without_a_compiler_nothing_is_stepped(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    assert clocks.env == {}
    assert not clocks.step("a1", 60)
