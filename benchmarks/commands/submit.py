"""Time of a submit beside submitit's, imports included.

    python -m benchmarks.commands.submit [--rounds 9] [--write]

Whole processes in turn: `vjob submit` of a conf, and a program that imports submitit and submits a
function with its SlurmExecutor, the shortest way to its job. Slurm's tools are scripts that answer
at once, so that what is left is the submitting side. Ours writes the run folder, the plan, the
agent for the nodes and the scripts, and goes through submitit's own submission; submitit writes a
pickle and a script. A profile of both processes' imports stands below the ratio.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
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


def profile_imports(command: Sequence[str], folder: Path, env: dict[str, str]) -> dict[str, float]:
    """Milliseconds of import by package, each without what it imports itself."""
    words = [command[0], "-X", "importtime", *command[1:]]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = {}
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", done.stderr):
        top = name.partition(".")[0]
        package = "the standard library" if top in sys.stdlib_module_names else top
        found[package] = found.get(package, 0.0) + int(own) / 1000
    return found


def render_imports(ours: dict[str, float], peer: dict[str, float]) -> str:
    """A row for each package that takes a millisecond or more of either."""
    names = sorted({*ours, *peer}, key=lambda name: -ours.get(name, 0.0))
    rows = [
        f"| {name} | {ours.get(name, 0.0):.0f} | {peer.get(name, 0.0):.0f} |\n"
        for name in names
        if max(ours.get(name, 0.0), peer.get(name, 0.0)) >= 1
    ]
    total = f"| all | {sum(ours.values()):.0f} | {sum(peer.values()):.0f} |\n"
    head = "| imports of, under -X importtime | ours, ms | submitit's, ms |\n|---|---|---|\n"
    return head + "".join(rows) + total


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
        ours = [sys.executable, "-m", "vjob", "submit", "conf.yaml"]
        peer = [sys.executable, "peer.py"]
        pairs = compare(
            lambda: time_process(ours, folder, env),
            lambda: time_process(peer, folder, env),
            options.rounds,
        )
        calls = (folder / "calls").read_text().split().count("sbatch")
        imports = render_imports(
            profile_imports(ours, folder, env), profile_imports(peer, folder, env)
        )
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
        f"{statistics.median(p for _, p in pairs):.2f} s.\n\n{imports.rstrip()}"
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
