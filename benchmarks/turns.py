"""Whole processes timed in turn, those of this checkout and of an earlier one beside a peer's."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks import ROOT

Row = tuple[str, float, Sequence[float], Sequence[float]]
"""What is measured, its bound, and the figure of each round: now, and before."""


class Cost(NamedTuple):
    """Seconds of a process, and processor time of it and of what it waited for."""

    seconds: float
    processor_s: float


def time_process(command: Sequence[str], folder: Path, env: dict[str, str]) -> Cost:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}: {done.stderr}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(took, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime)


def time_in_turn(
    commands: Sequence[tuple[Sequence[str], dict[str, str]]], folder: Path, rounds: int
) -> list[list[Cost]]:
    """The costs of each command, round by round, after a round that does not count."""
    return [
        [time_process(command, folder, env) for command, env in commands] for _ in range(rounds + 1)
    ][1:]


def divide(
    costs: Sequence[Sequence[Cost]], what: Literal["seconds", "processor_s"] = "processor_s"
) -> tuple[list[float], list[float]]:
    """The processor time of each round, or its seconds, over that of its last command: now, and
    before."""
    now, then = (
        [getattr(each[at], what) / getattr(each[-1], what) for each in costs] for at in (0, -2)
    )
    return now, then


def describe_load() -> str:
    first = ", ours of real-time priority" if os.sched_getscheduler(0) else ""
    return f"{os.getloadavg()[0]:.0f} processes at work{first}"


def add_before(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout to compare with")


def list_envs(env: dict[str, str], before: Path | None) -> list[dict[str, str]]:
    """The environment of this checkout and, if there is one, of the earlier one."""
    trees = [ROOT] if before is None else [ROOT, before.resolve()]
    return [{**env, "PYTHONPATH": str(tree)} for tree in trees]


def render_rows(before: Path | None, rows: Sequence[Row]) -> list[str]:
    """A table of figures; the medians of an earlier checkout are below its commit."""
    heads = ["what", "bound", "smallest", "median", "largest"]
    if before is not None:
        words = ["git", "-C", str(before), "rev-parse", "--short=8", "HEAD"]
        heads.append(f"before, at {subprocess.check_output(words, text=True).strip()}")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for what, bound, now, then in rows:
        found = [min(now), statistics.median(now), max(now)]
        found += [statistics.median(then)] if before is not None and then else []
        cells = [what, f"{bound:g}", *(f"{each:.3g}" for each in found), ""][: len(heads)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
