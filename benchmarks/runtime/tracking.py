"""Cost of the tracker beside a training: CPU time and memory against a run without one.

    python -m benchmarks.runtime.tracking [--rounds 3] [--write]

Local runs of one rank that does a fixed amount of work and prints its steps, in turn without
`track` and with TensorBoard and OpenMetrics. CPU time is that of the agent
and all that it started, by the kernel's account. Memory is the tracker's highest, read in the
process, over that of a Python that imports the tracker and does nothing: with the short run's
points, and with an attempt before it of many thousand steps that no tool has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import RESULTS, ROOT
from tests.varuna_core.agent.local_run import Stage, make_plan
from varuna_core.records.logs.times import format_mark
from varuna_core.records.plan import Plan, Timing, TrackPlan
from varuna_core.records.runfolder import RunFolder

RESULT = RESULTS / "tracking.md"
CPU_BOUND, MEMORY_BOUND = 1.25, 3.0
WORK = 8000
"""Sums a step: about a tenth of a second."""
SCRIPT = """
for step in range(1, STEPS + 1):
    for _ in range(WORK):
        sum(range(1000))
    print(f"step {step}/STEPS loss {1 / step:.6f} lr 0.001", flush=True)
"""
MEASURED = """
import resource, sys
from pathlib import Path
from varuna_core.agent.track import tracker
if sys.argv[1:]:
    def leave(code):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        sys.stdout.flush()
        real(code)
    real, tracker.os._exit = tracker.os._exit, leave
    tracker.run_tracker(Path(sys.argv[1]), 0 if len(sys.argv) < 3 else int(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make_run(folder: Path, steps: int, *, is_tracked: bool) -> Stage:
    script = SCRIPT.replace("STEPS", str(steps)).replace("WORK", str(WORK))
    track = TrackPlan(
        id="run", python=sys.executable, config={}, tensorboard=True,
        openmetrics=str(folder / "run.prom"),
    )  # fmt: skip
    plan: Plan = make_plan(command=(sys.executable, "-c", script))
    timing: Timing = replace(plan.timing, sample_s=5.0)
    return Stage(folder, replace(plan, timing=timing, track=track if is_tracked else None))


def measure_run(folder: Path, steps: int, *, is_tracked: bool) -> float:
    """CPU seconds of the agent with all that it started."""
    stage = make_run(folder, steps, is_tracked=is_tracked)
    stage.open()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    stage.start(0).wait(timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_long_attempt(folder: Path, steps: int) -> RunFolder:
    """An attempt that is over, with lines, their times, and samples of eight GPUs."""
    stage = make_run(folder, 1, is_tracked=True)
    stage.open()
    stage.start(0).wait(timeout=600)
    attempt, now = stage.attempt, time.time()
    with (
        attempt.node_log("n0", "out").open("ab") as out,
        attempt.node_log("n0", "times").open("ab") as times,
        attempt.node_log("n0", "gpu.jsonl").open("a") as samples,
    ):
        for step in range(2, steps + 1):
            times.write(format_mark(now + step, out.tell(), 0))
            out.write(f"0: step {step}/{steps} loss 0.5 lr 0.001\n".encode())
            gpus = [
                {"index": index, "utilization": 97, "memory_used_mb": 70000, "power_w": 600,
                 "temperature": 60}
                for index in range(8)
            ]  # fmt: skip
            sample = {"time": now + step, "cpu_percent": 5.0, "memory_used_mb": 9000, "gpus": gpus}
            samples.write(json.dumps(sample) + "\n")
    forget(folder)
    return stage.run


def forget(folder: Path) -> None:
    """As if no tool had seen the run."""
    for path in (folder / "track").iterdir():
        path.unlink()


def measure_memory_kb(*words: str) -> int:
    """The highest memory of a process that tracks, or of one that only imports the tracker."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURED, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def render_row(what: str, bound: float, ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"| {what} | {bound} | {low:.2f} | {statistics.median(ratios):.2f} | {high:.2f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--long", type=int, default=20_000, help="steps of the long attempt")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            plain = measure_run(Path(name, f"p{number}"), options.steps, is_tracked=False)
            tracked = measure_run(Path(name, f"t{number}"), options.steps, is_tracked=True)
            cpu.append(tracked / plain)
        long = write_long_attempt(Path(name, "long"), options.long)
        idle_kb = measure_memory_kb()
        forget(Path(name, "t0"))
        short_kb = measure_memory_kb(str(Path(name, "t0")))
        long_kb = measure_memory_kb(str(long.path))
    rows = [
        render_row("CPU time of the whole run, tracked over not", CPU_BOUND, cpu),
        render_row(
            "memory with a short run, over an idle tracker", MEMORY_BOUND, [short_kb / idle_kb]
        ),
        render_row(
            "memory with a long attempt, over an idle tracker", MEMORY_BOUND, [long_kb / idle_kb]
        ),
    ]
    text = (
        f"Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds of "
        f"{options.steps} steps of about 0.1 s; the long attempt has {options.long:,} steps and as "
        "many samples of eight GPUs.\n\n"
        f"| what | bound | smallest | median | largest |\n|---|---|---|---|---|\n{''.join(rows)}\n"
        f"An idle tracker has {idle_kb / 1024:.0f} MB, with the short run {short_kb / 1024:.0f} "
        f"MB, with the long attempt {long_kb / 1024:.0f} MB."
    )
    print(text)
    if options.write:
        RESULT.write_text(
            "# The tracker, beside a run without one\n\n"
            f"Made by `python -m benchmarks.runtime.tracking --rounds {options.rounds} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()
