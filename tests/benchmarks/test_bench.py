"""`make bench`: what it does with a benchmark that takes too long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import run_benchmark
from benchmarks.catalogue import Benchmark

SLOW = """
import subprocess, sys, time
from pathlib import Path

peer = subprocess.Popen(["sleep", "1000"], start_new_session=True)
try:
    Path({pid!r}).write_text(str(peer.pid))
    time.sleep(1000)
finally:
    peer.kill()
    peer.wait()
"""


def test_one_that_takes_too_long_takes_its_peers_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(SLOW.format(pid=str(pid)))
    benchmark = Benchmark(name="slow", module="slow", title="Slow", peer="none", quick=())
    command = [sys.executable, str(tmp_path / "slow.py")]
    monkeypatch.setattr(Benchmark, "build_command", lambda *args: command)
    outcome = run_benchmark(benchmark, True, 5.0)
    assert outcome.obstacle == "it took longer than 5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
