"""Times of micro-batch sizes that a profile lacks, beside measured ones that others published.

    python -m benchmarks.planner.sizes FOLDER [--write]

FOLDER holds eth-easl/sailor's profiles (MIT): OPT-350M on six GPUs, forward and backward of each
layer by micro-batch size and tensor degree. Each size is left out in turn and derived from two
others as `Profile.estimate_cell` does. What the product adds to the band of a prediction
(`BETWEEN`, `BEYOND` in varuna_core/planner/result/covered.py) are this result's figures.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import RESULTS
from benchmarks.planner.estimates import PRODUCTS
from benchmarks.planner.public import Published
from varuna_core.planner.profile.profile import Cell, mix_cells

RESULT = RESULTS / "planner_sizes.md"


def read_cells(folder: Path) -> Iterator[tuple[str, int, dict[int, Cell]]]:
    """Cells by size of each GPU and tensor degree, with one segment a layer."""
    published = Published(folder)
    for gpu in PRODUCTS:
        by_degree: dict[int, dict[int, Cell]] = defaultdict(dict)
        for size, degrees in published.profile(gpu).items():
            for degree, layers in degrees.items():
                forward, backward, _ = zip(*layers.values(), strict=True)
                none = (0.0,) * len(forward)
                by_degree[int(degree)][int(size)] = Cell(
                    forward_s=forward,
                    backward_s=backward,
                    input_grad_s=none,
                    weight_grad_s=none,
                    recompute_s=none,
                    output_bytes=none,
                    graph_bytes=none,
                    work_bytes=none,
                )
        for degree, cells in by_degree.items():
            yield gpu, degree, dict(sorted(cells.items()))


def list_ratios(folder: Path) -> dict[str, list[tuple[float, str]]]:
    """Measured over derived, of all forwards and of all backwards, by where the size lies."""
    found = defaultdict(list)
    for gpu, degree, cells in read_cells(folder):
        for low, high, size in itertools.product(cells, repeat=3):
            if not low < high or size in (low, high):
                continue
            if size < low:
                place = f"below, {low // size} times"
            elif size > high:
                place = f"beyond, {size // high} times"
            else:
                place = f"between, {high // low} times apart"
            derived = mix_cells(cells[low], cells[high], low, high, size, "measured")
            for name in ("forward_s", "backward_s"):
                took, said = (sum(getattr(one, name)) for one in (cells[size], derived))
                where = f"{gpu}, tensor {degree}, {low} and {high} to {size}"
                found[place].append((took / said, where))
    return found


def sort_by_number(row: tuple[str, object]) -> tuple[str, int]:
    place, times, *_ = row[0].split()
    return place, int(times)


def main() -> None:
    """Print the table, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    lines = ["| size | times | 5 of 100 | median | 95 of 100 | most |", "|---|---|---|---|---|---|"]
    for place, rows in sorted(list_ratios(options.folder).items(), key=sort_by_number):
        ratios = [ratio for ratio, _ in rows]
        quantiles = " | ".join(f"{q:.2f}" for q in np.quantile(ratios, [0.05, 0.5, 0.95]))
        worst, where = max(rows)
        lines.append(f"| {place} | {len(rows)} | {quantiles} | {worst:.2f} ({where}) |")
    print("\n".join(lines))
    if options.write:
        RESULT.write_text(
            "# Planning: micro-batch sizes that were not measured\n\n"
            "Made by `python -m benchmarks.planner.sizes FOLDER --write` of eth-easl/sailor's "
            "profiles of OPT-350M on six GPUs, tensor degrees 1 to 8: measured time over the one "
            "on the line through two other sizes, all forwards or all backwards of a "
            "micro-batch.\n\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
