"""All figures that the project states, one benchmark after another: `make bench`.

    python -m benchmarks [--quick] [--only NAME ...] [--before PAGE] [--limit-min 60]

Writes results/<date>.md, a summary with what was not measured and why, and a plot of all figures
as parts of their bounds beside it; with --before each figure beside that of an earlier page. A full
run also renews the result file of each benchmark, which
benchmarks/README.md quotes; --quick takes smaller inputs and leaves those files alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.drawing import draw_bounds
from benchmarks.figures import Figure, find_figures
from benchmarks.machine import compile_to
from benchmarks.running import describe_machine, render_measured, run_bounded

QUICK_LIMIT_S = 150.0


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
    ended = run_bounded(command, limit_s, env)
    return Outcome(
        benchmark=benchmark,
        command=shown,
        text=ended.text,
        obstacle=ended.obstacle,
        took_s=ended.took_s,
    )


def render_before(page: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """A table of each figure beside that of an earlier page."""
    earlier = list_earlier(page.read_text())
    lines = ["", f"## Beside [{page.stem}]({page.name})", ""]
    lines += ["| figure | bound | then | now | |", "|---|---|---|---|---|"]
    for one in outcomes:
        for figure in one.figures:
            known = earlier.get((one.benchmark.title, figure.what))
            then = known.pop(0) if known else None
            verdict = "met" if figure.is_met else "**missed**"
            if then is not None and not figure.is_met:
                verdict += ", met then" if then.is_met else ", as then"
            elif then is not None and not then.is_met:
                verdict += ", missed then"
            lines.append(
                f"| {one.benchmark.title}: {figure.what} | {figure.shown_bound} | "
                f"{'' if then is None else describe(then)} | {describe(figure)} | {verdict} |"
            )
    return lines


def list_earlier(text: str) -> dict[tuple[str, str], list[Figure]]:
    """The figures of a page, by benchmark and name, in their order."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        for figure in find_figures(rest.partition("<details>")[0]):
            found.setdefault((title, figure.what), []).append(figure)
    return found


def describe(figure: Figure) -> str:
    return f"{figure.value:g}" + (f" ({figure.shown_spread})" if figure.spread else "")


def render(
    title: str,
    command: str,
    machine: str,
    outcomes: Sequence[Outcome],
    plot: str,
    before: Path | None = None,
) -> str:
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
    if before is not None:
        lines += render_before(before, outcomes)
    for one in measured:
        lines += ["", f"## {one.benchmark.title}", "", f"`{one.command}`"]
        lines += render_measured(one.text, one.figures)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small inputs, in minutes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of benchmarks/")
    parser.add_argument("--before", type=Path, metavar="PAGE", help="an earlier page")
    parser.add_argument("--limit-min", type=float, default=60.0, help="for each benchmark")
    options = parser.parse_args()
    names = [one.name for one in BENCHMARKS]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names)}")
    machine = describe_machine()
    today = datetime.date.today().isoformat()
    stem = today + "-quick" * options.quick
    path, plot = RESULTS / f"{stem}.md", RESULTS / f"{stem}.svg"
    title = f"Figures of {today}" + ", a quick look" * options.quick
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    outcomes = []
    for one in BENCHMARKS:
        if options.only and one.name not in options.only:
            continue
        limit_s = QUICK_LIMIT_S if options.quick else 60 * options.limit_min
        outcome = run_benchmark(one, options.quick, limit_s)
        print(outcome.text or f"{one.title}: not measured: {outcome.obstacle}", flush=True)
        outcomes.append(outcome)
        # After each of them: the whole takes an hour, and may be cut off.
        if groups := {one.benchmark.title: one.figures for one in outcomes if one.figures}:
            plot.write_text(draw_bounds(groups))
        path.write_text(render(title, command, machine, outcomes, plot.name, options.before))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
