"""Growth from 64 to 10,240 nodes, and a simulated cluster of 10,240 nodes x 8 ranks.

    python -m benchmarks.scale [--most 10240] [--only NAME ...] [--write]

Processor seconds, which a busy machine stretches little, and the peak of memory of a process that
makes its inputs and does the part. Files lie wherever temporary ones do. The slope is that of the
growth over the two largest sizes: 1 is in proportion to the nodes, 2 is their square.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.commands.report import measure
from benchmarks.machine import read_memory_gb, read_processor
from benchmarks.scale.cluster import measure_cluster
from benchmarks.scale.parts import PARTS, count_calls

RESULT = RESULTS / "scale.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"
"""What stands between these lines of the page is written here; the rest is written by hand."""
SIZES = (64, 256, 1024, 4096, 10240)
BOUNDS: Mapping[str, tuple[float, float]] = {
    "status: first look": (1.05, 2.0),
    "manager: all nodes are new": (1.05, math.inf),
    "search for a plan": (math.inf, 5.0),
}
"""The largest slope, and the most seconds with the most nodes."""


def measure_parts(sizes: Sequence[int], parts: Sequence[str]) -> list[str]:
    """Return a table of all parts, and one of those that have bounds."""
    rows, figures = [], []
    for part in parts:
        found: dict[str, list[float]] = {}
        for nodes in sizes:
            with tempfile.TemporaryDirectory() as name:
                _, peak_mb, points = measure(PARTS[part], Path(name), nodes)
            for what, seconds in points.items():
                found.setdefault(what, []).append(seconds)
            print(f"{part}, {nodes:,} nodes: {points}, {peak_mb:.0f} MB", file=sys.stderr)
        for what, seconds in found.items():
            slope = math.log(seconds[-1] / seconds[-2]) / math.log(sizes[-1] / sizes[-2])
            cells = [what, *(f"{one:.4f}" for one in seconds), f"{slope:.2f}", f"{peak_mb:.0f}"]
            rows.append(f"| {' | '.join(cells)} |")
            measured = (("slope", slope), (f"seconds, {sizes[-1]:,} nodes", seconds[-1]))
            for (name, value), bound in zip(measured, BOUNDS.get(what, ()), strict=False):
                if bound < math.inf:
                    figures.append(f"| {what}, {name} | {bound} | {value:.2f} |")
    head = ["what", *(f"{size:,} nodes" for size in sizes), "slope", "peak MB at the end"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]
    return (
        [*lines, "", "| what | bound | measured |", "|---|---|---|", *figures] if figures else lines
    )


def count_file_calls() -> str:
    """Return a sentence with the calls on files of two looks; the difference of two sizes leaves
    out what Python itself opens."""
    small, large = SIZES[0], SIZES[2]
    found = {}
    for nodes, looks in itertools.product((small, large), (1, 2, 3)):
        with tempfile.TemporaryDirectory() as name:
            found[nodes, looks] = count_calls(Path(name), nodes, looks)
    each = [found[large, looks] - found[small, looks] for looks in (1, 2, 3)]
    first, later = each[0] / (large - small), (each[2] - each[1]) / (large - small)
    return (
        f"Calls on files, by strace, from {small} to {large:,} nodes: a first look of status makes "
        f"{first:.1f} a node, a later one {later:.1f}; for {SIZES[-1]:,} nodes that would be "
        f"{first * SIZES[-1]:,.0f} and {later * SIZES[-1]:,.0f}."
    )


def main() -> None:
    """Measure, print, and with --write put the tables in place of those of the result page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=SIZES[-1], help="nodes")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "cluster"])
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    sizes = [size for size in SIZES if size <= options.most]
    if len(sizes) < 2:
        parser.error("growth needs two sizes: --most 256 at least")
    parts = options.only or [*PARTS, "cluster"]
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores of {read_processor()}, "
        f"{read_memory_gb():.0f} GB of memory, load {os.getloadavg()[0]:.0f} at the beginning.",
        "",
        *measure_parts(sizes, [part for part in PARTS if part in parts]),
        "",
    ]
    if "status" in parts:
        lines += [count_file_calls(), ""]
    if "cluster" in parts:
        lines += measure_cluster([sizes[2], sizes[-1]] if len(sizes) > 2 else sizes)
    text = "\n".join(lines).strip()
    print(text)
    if options.write:
        before, _, after = RESULT.read_text().partition(BEGIN)
        RESULT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after.partition(END)[2]}")


if __name__ == "__main__":
    main()
