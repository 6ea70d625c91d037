"""Start-up time of the command, and growth of plan and render with the number of nodes.

    python -m benchmarks.commands.spine [--before TREE] [--rounds 15] [--write]

Whole processes run in turn, and their processor times are compared pair by pair, so that a machine
whose speed drifts drifts for both. Growth is the slope of a line through log(seconds) over
log(nodes).
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
)
from varuna_core.records.plan import render_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.conf.loading.load import read_conf
from vjob.jobs.submit.build_plan import PlanContext, build_plan
from vjob.jobs.submit.scripts import render_scripts

RESULT = RESULTS / "spine.md"
NUM_NODES = (100, 300, 1000, 3000, 10000)

CONF = """\
name: big
program: {{script: train.py}}
parallel: {{pipeline: 8}}
cluster:
  scheduler: slurm
  nodes:
    - {{group: a, count: {half}, queue: gpu1, gpus: "a100:4"}}
    - {{group: b, count: {half}, queue: gpu2, gpus: "a10:4", cpus: 14}}
"""


def time_best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the median run."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure_growth(folder: Path, repeats: int) -> list[tuple[int, float]]:
    """Seconds from a read conf to plan, plan.json and scripts."""
    points = []
    for number in NUM_NODES:
        path = write_conf(folder, number)
        conf = read_conf(path)
        here = PlanContext(
            run="big-1", scheduler="slurm", python=sys.executable, base=str(folder), user_id=0,
            environ={}, folder=str(folder / "big-1"),
        )  # fmt: skip

        def work() -> None:
            plan = build_plan(conf, here)  # noqa: B023 - called before the loop goes on
            render_plan(plan)
            render_scripts(conf, plan, RunFolder(folder / "big-1"))  # noqa: B023 - the same

        points.append((number, time_best(work, repeats)))
    return points


def fit_slope(points: Sequence[tuple[int, float]]) -> float:
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mean_x) ** 2 for x in xs)


def write_conf(folder: Path, num_nodes: int) -> Path:
    (folder / "train.py").touch()
    path = folder / f"conf-{num_nodes}.yaml"
    path.write_text(CONF.format(half=num_nodes // 2))
    return path


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    add_before(parser)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = sys.executable
        help_command = [python, "-m", "vjob", "--help"]
        plain = [python, "-c", "import click, yaml"]
        conf = str(write_conf(folder, 1024))
        # A stand-in on PATH is not needed: a dry run asks Slurm nothing. `local` avoids the
        # refusal where there is no sbatch, and renders the same scripts.
        dry = [python, "-m", "vjob", "submit", conf, "--dry-run"]
        dry += ["--set", "cluster.scheduler=local"]
        lines = [
            f"Python {platform.python_version()}, {platform.machine()}, {options.rounds} rounds, "
            f"{describe_load()}.",
            "",
        ]
        rows = (
            ("`vjob --help` over `python -c 'import click, yaml'`", 2.0, help_command, plain),
            ("`submit --dry-run`, 2 groups, 1,024 nodes, over `--help`", 6.0, dry, help_command),
        )
        envs = list_envs(compile_to(folder / "compiled"), options.before)
        figures: list[Row] = []
        for text, bound, ours, other in rows:
            turns = [(command, env) for env in envs for command in (ours, other)]
            costs = time_in_turn(turns, folder, options.rounds)
            now, then = (divide([each[at:][:2] for each in costs])[0] for at in (0, -2))
            figures.append((text, bound, now, then))
        lines += render_rows(options.before, figures)
        points = measure_growth(folder, repeats=21)
        lines += [
            "",
            "Plan, plan.json and scripts (median of 21):",
            "",
            "| nodes | ms |",
            "|---|---|",
        ]
        lines += [f"| {number} | {seconds * 1000:.2f} |" for number, seconds in points]
        lines += [
            "",
            f"Log-log slope from 100 to 10,000 nodes: {fit_slope(points):.2f} (bound 1.1).",
        ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        RESULT.write_text(
            "# The spine: start-up and growth\n\n"
            "Made by `python -m benchmarks.commands.spine --before TREE "
            f"--rounds {options.rounds} --write`. {text}\n"
        )


if __name__ == "__main__":
    main()
