"""`make bench`: a benchmark that takes too long, and figures beside those of an earlier page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import Outcome, render, render_before, run_benchmark
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


def test_figures_stand_beside_those_of_an_earlier_page(tmp_path: Path) -> None:
    def measure(*figures: tuple[str, float]) -> Outcome:
        benchmark = Benchmark(name="a", module="a", title="A thing", peer="none", quick=())
        rows = "".join(f"| {what} | 1.0 | {value} |\n" for what, value in figures)
        text = f"| what | bound | median |\n|---|---|---|\n{rows}"
        return Outcome(benchmark=benchmark, command="python -m a", text=text)

    page = tmp_path / "2026-01-01.md"
    then = measure(("slow", 0.9), ("fast", 1.5), ("fast", 0.5), ("gone", 0.1))
    page.write_text(render("Then", "command", "Machine.", [then], "plot.svg"))
    now = measure(("slow", 1.1), ("fast", 0.6), ("fast", 0.7), ("new", 2))
    assert render_before(page, [now])[1:] == [
        "## Beside [2026-01-01](2026-01-01.md)",
        "",
        "| figure | bound | then | now | |",
        "|---|---|---|---|---|",
        "| A thing: slow | at most 1 | 0.9 | 1.1 | **missed**, met then |",
        "| A thing: fast | at most 1 | 1.5 | 0.6 | met, missed then |",
        "| A thing: fast | at most 1 | 0.5 | 0.7 | met |",
        "| A thing: new | at most 1 |  | 2 | **missed** |",
    ]
