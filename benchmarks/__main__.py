"""All figures that the project states, one benchmark after another: `make bench`.

    python -m benchmarks [--quick] [--gpu] [--only NAME ...] [--limit-min 60]

Writes results/<date>.md, a summary with what was not measured and why, and a plot of all figures
as parts of their bounds beside it. A full run also renews the result file of each benchmark, which
the README quotes; --quick takes smaller inputs and leaves those files alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from benchmarks import RESULTS, ROOT
from benchmarks.catalogue import BENCHMARKS, ON_GPU, Benchmark
from benchmarks.drawing import draw_bounds
from benchmarks.figures import Figure, find_figures
from benchmarks.machine import compile_to, find_gpu, read_memory_gb, read_processor

PACKAGES = (
    "torch",
    "numpy",
    "pandas",
    "plotly",
    "pyarrow",
    "submitit",
    "deepspeed",
    "megatron-core",
)
QUICK_LIMIT_S = 150.0
LEAVE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one benchmark."""

    benchmark: Benchmark
    command: str
    text: str = ""
    """Its standard output."""

    obstacle: str | None = None
    """Why it was not measured."""

    took_s: float = 0.0

    @property
    def figures(self) -> list[Figure]:
        return list(find_figures(self.text))


def run_benchmark(benchmark: Benchmark, is_quick: bool, limit_s: float) -> Outcome:
    image = os.environ.get("VJOB_BENCH_IMAGE")
    command = benchmark.build_command(sys.executable, is_quick, image)
    if not is_quick:
        command.append("--write")
    shown = " ".join("$VJOB_BENCH_IMAGE" if word == image else word for word in command[1:])
    shown = f"python {shown}"
    if obstacle := benchmark.find_obstacle(image):
        return Outcome(benchmark=benchmark, command=shown, obstacle=obstacle)
    is_compiled = not os.environ.get("PYTHONDONTWRITEBYTECODE")
    env = dict(os.environ) if is_compiled else compile_to(ROOT / ".compiled")
    env |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    obstacle = None
    try:
        said, errors = child.communicate(timeout=limit_s)
        if child.returncode:
            obstacle = explain_failure(child.returncode, errors)
    except subprocess.TimeoutExpired:
        obstacle = f"it took longer than {limit_s:.0f} s"
        said = ""
    finally:
        end_group(child)
    took_s = time.monotonic() - start
    return Outcome(
        benchmark=benchmark, command=shown, text=said, obstacle=obstacle, took_s=took_s
    )  # fmt: skip


def end_group(child: subprocess.Popen[str]) -> None:
    """The benchmark and whatever it started, where any of it is left: first as Ctrl-C does, for
    peers are sessions of their own, which it alone knows."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=LEAVE_S)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.communicate()


def explain_failure(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"exit {code}: {lines[-1][:200] if lines else 'without a word'}"


def describe_machine() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return (
        f"{cores} cores of {read_processor()}, {read_memory_gb():.0f} GB of memory; "
        f"{load:.1f} processes ran as it began. {', '.join(found)}."
    )


def render(title: str, command: str, machine: str, outcomes: Sequence[Outcome], plot: str) -> str:
    lines = [f"# {title}", "", f"Made by `{command}`. {machine}", ""]
    lines += [
        "| benchmark | beside | figures with a bound | met | seconds |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        met = sum(figure.is_met for figure in one.figures)
        counts = (
            f"not measured: {one.obstacle} | " if one.obstacle else f"{len(one.figures)} | {met}"
        )
        row = f"| {one.benchmark.title} | {one.benchmark.peer} | {counts} | {one.took_s:.0f} |"
        lines.append(row.replace("  ", " "))
    measured = [one for one in outcomes if one.text and not one.obstacle]
    if any(one.figures for one in measured):
        lines += ["", f"![Figures as parts of their bounds]({plot})"]
    for one in measured:
        lines += ["", f"## {one.benchmark.title}", "", f"`{one.command}`"]
        if one.figures:
            lines += ["", "| figure | bound | measured | spread | |", "|---|---|---|---|---|"]
        for figure in one.figures:
            verdict = "met" if figure.is_met else "**missed**"
            lines.append(
                f"| {figure.what} | {figure.shown_bound} | {figure.value:g} | "
                f"{figure.shown_spread} | {verdict} |"
            )
        lines += ["", "<details><summary>All that it printed</summary>", ""]
        lines += [
            "#" * 2 + line if line.startswith("#") else line for line in one.text.splitlines()
        ]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small inputs, in minutes")
    parser.add_argument("--gpu", action="store_true", help="what needs a GPU, and only that")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of benchmarks/")
    parser.add_argument("--limit-min", type=float, default=60.0, help="for each benchmark")
    options = parser.parse_args()
    every = ON_GPU if options.gpu else BENCHMARKS
    names = [one.name for one in every]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    machine = describe_machine()
    gpu = find_gpu() if options.gpu else None
    today = datetime.date.today().isoformat()
    stem = today + "-gpu" * options.gpu + "-quick" * options.quick
    path, plot = RESULTS / f"{stem}.md", RESULTS / f"{stem}.svg"
    title = f"Figures of {today}" + ", on a GPU" * options.gpu + ", a quick look" * options.quick
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    about = f"{machine} GPU: {gpu or 'none, so nothing was run'}." if options.gpu else machine
    outcomes = []
    for one in every:
        if options.only and one.name not in options.only:
            continue
        if options.gpu and gpu is None:
            outcome = Outcome(benchmark=one, command="", obstacle="there is no GPU here")
        else:
            limit_s = QUICK_LIMIT_S if options.quick else 60 * options.limit_min
            outcome = run_benchmark(one, options.quick, limit_s)
        print(outcome.text or f"{one.title}: not measured: {outcome.obstacle}", flush=True)
        outcomes.append(outcome)
        # After each of them: the whole takes an hour, and may be cut off.
        if groups := {one.benchmark.title: one.figures for one in outcomes if one.figures}:
            plot.write_text(draw_bounds(groups))
        path.write_text(render(title, command, about, outcomes, plot.name))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
