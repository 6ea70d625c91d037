"""Time of a submit beside submitit's, imports included, and of a local run to its first line.

    git worktree add ../before COMMIT
    python -m benchmarks.commands.submit --before ../before [--rounds 9] [--write]

Whole processes in turn: `vjob submit` of a conf, and a program that imports submitit and submits a
function with its SlurmExecutor, the shortest way to its job. Slurm's tools are scripts that answer
at once, so that what is left is the submitting side. Ours writes the run folder, the plan, the
agent for the nodes and the scripts, and goes through submitit's own submission; submitit writes a
pickle and a script. A profile of both processes' imports stands below the ratio. A local run is
timed from the start of `vjob run` until the first line of its script, less the same of `python`.
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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.machine import compile_to
from benchmarks.turns import (
    Row,
    add_before,
    describe_load,
    divide,
    list_envs,
    render_rows,
    time_in_turn,
    time_process,
)

RESULT = RESULTS / "submit.md"
BOUND = 1.5
BOUND_S = 0.6

CONF = """\
name: one
program: {script: train.py}
cluster:
  scheduler: slurm
  walltime_min: 10
  nodes: [{group: all, count: 4, queue: gpu1}]
"""
SCRIPT = """\
import time
with open("first", "w") as file:
    file.write(repr(time.time()))
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


def time_first_line(command: Sequence[str], folder: Path, env: dict[str, str]) -> float:
    """Seconds from the start of a command to the first line of the script that it runs."""
    start = time.time()
    time_process(command, folder, env)
    return float((folder / "first").read_text()) - start


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


LEFT = """\
What bounds a submit: others' modules, which it needs for submitit's own submission, templates,
confs and the command line. Of the rest no part is large: the classes of 150 modules of ours, the
patterns of secrets, the packing of the agent, and the Slurm tools that are asked for warnings.

What bounds a local run: six Pythons that start one after another before the script's, none of
which waits for a clock: the command, a wrapper that cleans its environment, the supervisor, the
agent's `open`, the stand-in for srun, and the agent."""


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    add_before(parser)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, tools = Path(name), Path(name, "bin")
        tools.mkdir()
        for tool, body in ANSWERS.items():
            (tools / tool).write_text("#!/bin/sh\n" + body.format(calls=folder / "calls") + "\n")
            (tools / tool).chmod(0o755)
        (folder / "conf.yaml").write_text(CONF)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "peer.py").write_text(PEER)
        env = {
            **compile_to(folder / "compiled"),
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        envs = list_envs(env, options.before)
        python = sys.executable
        ours, peer = [python, "-m", "vjob", "submit", "conf.yaml"], [python, "peer.py"]
        floor = [python, "-c", "import click, yaml, submitit, jinja2"]
        turns = [(floor, envs[0]), *((ours, each) for each in envs), (peer, envs[0])]
        costs = time_in_turn(turns, folder, options.rounds)
        least = statistics.median(divide(costs)[0])
        costs = [each[1:] for each in costs]
        local, plain = [python, "-m", "vjob", "run", "train.py"], [python, "train.py"]
        firsts = [
            [time_first_line(local, folder, each) for each in envs]
            + [time_first_line(plain, folder, env)]
            for _ in range(options.rounds + 1)
        ][1:]
        calls = (folder / "calls").read_text().split().count("sbatch")
        imports = render_imports(
            profile_imports(ours, folder, envs[0]), profile_imports(peer, folder, envs[0])
        )
    if calls != (options.rounds + 1) * (len(envs) + 1):
        raise SystemExit(f"sbatch was called {calls} times in {options.rounds} rounds")
    now, then = ([each[at] - each[-1] for each in firsts] for at in (0, -2))
    rows: list[Row] = [
        ("`vjob submit` over submitit's submit, processor time", BOUND, *divide(costs)),
        (
            "seconds from `vjob run` to a script's first line, less those of `python`",
            BOUND_S,
            now,
            then,
        ),
    ]
    seconds, others = (statistics.median(each[at].seconds for each in costs) for at in (0, -1))
    text = (
        f"Python {platform.python_version()}, submitit {version('submitit')}, "
        f"{platform.machine()}, {options.rounds} rounds, {describe_load()}.\n\n"
        + "\n".join(render_rows(options.before, rows))
        + f"\n\nOurs takes {seconds:.2f} s, submitit's {others:.2f} s. A Python that imports "
        f"click, yaml, submitit and jinja2, and ends, takes {least:.2f} times submitit's processor "
        f"time.\n\n{imports.rstrip()}"
    )
    print(text)
    if options.write:
        command = "python -m benchmarks.commands.submit --before TREE"
        RESULT.write_text(
            "# A submit, beside submitit's\n\n"
            f"Made by `{command} --rounds {options.rounds} --write`. {text}\n\n{LEFT}\n"
        )


if __name__ == "__main__":
    main()
