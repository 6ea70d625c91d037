"""Time of a submit beside submitit's, imports included.

    python -m benchmarks.commands.submit [--rounds 9] [--write]

Whole processes in turn: `vjob submit` of a conf, and a program that imports submitit and submits a
function with its SlurmExecutor, the shortest way to its job. Slurm's tools are scripts that answer
at once, so that what is left is the submitting side. Ours writes the run folder, the plan, the
agent for the nodes and the scripts; submitit writes a pickle and a script.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.machine import compile_to

RESULT = RESULTS / "submit.md"
BOUND = 1.5

CONF = """\
name: one
program: {script: train.py}
cluster:
  scheduler: slurm
  walltime_min: 10
  nodes: [{group: all, count: 4, queue: gpu1}]
"""
PEER = """\
import submitit
executor = submitit.SlurmExecutor(folder="peer")
executor.update_parameters(time=10, nodes=4, partition="gpu1", ntasks_per_node=1)
executor.submit(print, "a function")
"""
ANSWERS = {
    "sbatch": "echo sbatch >> {calls}\n"
    'for word; do [ "$word" = --parsable ] && {{ echo 77; exit; }}; done\n'
    'echo "Submitted batch job 77"',
    "squeue": "true",
    "scontrol": "true",
    "sacct": "true",
    "sinfo": "true",
    "srun": "true",
}


def time_process(command: Sequence[str], folder: Path, env: dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}: {done.stderr}")
    return took


def compare(
    ours: Callable[[], float], peer: Callable[[], float], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of each, round by round, after one of each that does not count."""
    ours(), peer()
    return [(ours(), peer()) for _ in range(rounds)]


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tools = Path(name), Path(name, "bin")
        tools.mkdir()
        for tool, body in ANSWERS.items():
            (tools / tool).write_text("#!/bin/sh\n" + body.format(calls=folder / "calls") + "\n")
            (tools / tool).chmod(0o755)
        (folder / "conf.yaml").write_text(CONF)
        (folder / "train.py").touch()
        (folder / "peer.py").write_text(PEER)
        env = {
            **compile_to(folder / "compiled"),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        pairs = compare(
            lambda: time_process(
                [sys.executable, "-m", "vjob", "submit", "conf.yaml"], folder, env
            ),
            lambda: time_process([sys.executable, "peer.py"], folder, env),
            options.rounds,
        )
        calls = (folder / "calls").read_text().split().count("sbatch")
    if calls != 2 * len(pairs) + 2:
        raise SystemExit(f"sbatch was called {calls} times in {len(pairs)} rounds")
    ratios = sorted(ours / peer for ours, peer in pairs)
    middle = statistics.median(ratios)
    text = (
        f"Python {platform.python_version()}, submitit {version('submitit')}, "
        f"{platform.machine()}, {options.rounds} rounds.\n\n"
        "| what | bound | smallest | median | largest |\n|---|---|---|---|---|\n"
        f"| `vjob submit` over submitit's submit, whole processes | {BOUND} | {ratios[0]:.2f} | "
        f"{middle:.2f} | {ratios[-1]:.2f} |\n\n"
        f"Ours takes {statistics.median(o for o, _ in pairs):.2f} s, submitit's "
        f"{statistics.median(p for _, p in pairs):.2f} s."
    )
    print(text)
    if options.write:
        RESULT.write_text(
            "# A submit, beside submitit's\n\n"
            f"Made by `python -m benchmarks.commands.submit --rounds {options.rounds} --write`. "
            f"{text}\n"
        )


if __name__ == "__main__":
    main()
