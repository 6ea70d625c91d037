"""A measurement as a process: bounded, with whatever it started; and the machine that it ran on."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from benchmarks import ROOT
from benchmarks.figures import Figure
from benchmarks.machine import read_memory_gb, read_processor

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
LEAVE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended, or was ended."""

    text: str = ""
    """Its standard output; empty where it took too long."""
    obstacle: str | None = None
    """What went wrong."""
    took_s: float = 0.0


def run_bounded(command: Sequence[str], limit_s: float, env: Mapping[str, str]) -> Ended:
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
    return Ended(text=said, obstacle=obstacle, took_s=time.monotonic() - start)


def end_group(child: subprocess.Popen[str]) -> None:
    """The process and whatever it started, where any of it is left: first as Ctrl-C does, for
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


def render_measured(text: str, figures: Sequence[Figure]) -> list[str]:
    """Lines of a page: the figures beside their bounds, then all that was printed."""
    lines = []
    if figures:
        lines += ["", "| figure | bound | measured | spread | |", "|---|---|---|---|---|"]
    for figure in figures:
        verdict = "met" if figure.is_met else "**missed**"
        lines.append(
            f"| {figure.what} | {figure.shown_bound} | {figure.value:g} | "
            f"{figure.shown_spread} | {verdict} |"
        )
    lines += ["", "<details><summary>All that it printed</summary>", ""]
    lines += ["#" * 2 + line if line.startswith("#") else line for line in text.splitlines()]
    return [*lines, "", "</details>"]
