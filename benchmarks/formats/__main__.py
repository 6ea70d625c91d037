"""Score of the reader of steps over the corpus of formats.

    python -m benchmarks.formats [--only NAME] [--show] [--seed N]    formats for development
    python -m benchmarks.formats --apart                              those kept apart
    python -m benchmarks.formats --write                              both, on the page

The aim: steps and totals are right in nine of ten formats, and no log without training has a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import RESULTS
from benchmarks.formats.catalog import list_apart, list_formats, list_negatives
from benchmarks.formats.score import (
    FIGURES,
    Row,
    find_false_steps,
    score_format,
    summarize,
)

PAGE = RESULTS / "formats.md"
KEPT = RESULTS / "formats.json"
AIM = 0.9
HEAD = """\
Made by `python -m benchmarks.formats --write`. Formats of real training programs, each with the
source of its print statement (`benchmarks/formats`); their lines have numbers of our own. *Not
known* is no mistake, *wrong* is one; where lines count steps in epochs of unknown length and the
reader says the epoch, the step is not known. `val_loss` is the last loss of an evaluation. The aim
was steps and totals right in nine of ten, and no false step.

The formats for development were met in six parts: of the first 50 the reader had 23 right before
it learned; of 50, 18, 30, 16 and 31 more, which it met later, 33, 10, 24, 14 and 22 at the first
try. Of the 30, one step and two totals were wrong then, and one of 15 more logs without training
had a false step; of the 16, one step and one loss; of the 31, two steps, and 7 of 17 more logs
without training had a false step, one of which was unlike any program and was changed.

The formats apart were met in two parts, each when the reader was done. Of 16, 9 were right and 7
not known at the first reading; two losses were wrong. Of 31, 23 had a right step and total, 5 steps
were not known and one was wrong: the length of an episode (`episode steps: 200`) was taken for a
step. What was wrong was fixed after that reading, and nothing else for these formats.

Most steps that are not known cannot be: no line has the length of an epoch, or no word stands
beside the number."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--apart", action="store_true", help="the formats kept apart")
    parser.add_argument("--only", metavar="NAME", help="one format, or one log of no training")
    parser.add_argument("--show", action="store_true", help="print the log and its truth too")
    parser.add_argument("--seed", type=int, default=0, help="other numbers in the same formats")
    parser.add_argument("--write", action="store_true", help="keep the figures, renew the page")
    options = parser.parse_args()
    if options.write:
        keep()
        return 0
    formats = list_apart() if options.apart else list_formats()
    negatives = {} if options.apart else list_negatives()
    if options.only:
        formats = {name: item for name, item in formats.items() if name == options.only}
        negatives = {name: item for name, item in negatives.items() if name == options.only}
        if not formats and not negatives:
            parser.error(f"{options.only} is in no list")
    if options.show:
        show([*formats, *negatives], options.seed)
    rows = [score_format(item, options.seed) for item in formats.values()]
    false = find_false(tuple(negatives), options.seed)
    print("\n".join(list_lines(rows, len(negatives), false)))
    return int(bool(false) or sum(row.is_right for row in rows) < AIM * len(rows))


def find_false(names: Sequence[str], seed: int = 0) -> dict[str, str]:
    """Negatives in which a step was read, and what was read."""
    found = {name: find_false_steps(list_negatives()[name], seed) for name in names}
    return {name: said for name, said in found.items() if said}


def show(names: Sequence[str], seed: int) -> None:
    """Print logs as the node has them, and the truth."""
    for name in names:
        item = {**list_formats(), **list_apart()}.get(name)
        log, truth = item.make(seed) if item else (list_negatives()[name].make(seed), None)
        for line in log.lines:
            print(f"{line.at_s:9.2f} {line.kind} {line.rank}: {line.text}")
        print(f"\n{name}: {truth}\n")


def list_lines(rows: Sequence[Row], num_negatives: int, false: dict[str, str]) -> Iterator[str]:
    """The tables of some formats."""
    found = summarize(rows)
    yield "| figure | verdicts |"
    yield "|---|---|"
    yield f"| step and total right | {found['step and total right']} of {len(rows)} |"
    for figure in FIGURES:
        yield f"| {figure} | {found[figure]} |"
    yield f"| false steps in logs without training | {len(false)} of {num_negatives} |"
    yield ""
    yield from list_misses(found, false)


def list_misses(found: dict[str, Any], false: dict[str, str]) -> Iterator[str]:
    """All formats of which a figure is not right, and the false steps."""
    yield f"| format | {' | '.join(FIGURES)} | said |"
    yield "|---" * (2 + len(FIGURES)) + "|"
    for name, cells in found["misses"].items():
        yield f"| {name} | {cells} |"
    for name, said in false.items():
        yield f"| {name} (no training) | wrong | | | | {said} |"


def keep() -> None:
    """Score everything, and write the page."""
    kept = {
        name: summarize([score_format(item) for item in formats.values()])
        for name, formats in (("development", list_formats()), ("apart", list_apart()))
    }
    false = find_false(tuple(list_negatives()))
    KEPT.write_text(json.dumps({**kept, "false": false}, indent=1) + "\n")
    PAGE.write_text("\n".join(render_page(kept, len(list_negatives()), false)) + "\n")


def render_page(
    kept: dict[str, dict[str, Any]], num_negatives: int, false: dict[str, str]
) -> Iterator[str]:
    """The page: all figures, then the misses."""
    yield from ("# Progress formats", "", HEAD, "")
    yield "| figure | " + " | ".join(kept) + " |"
    yield "|---" * (1 + len(kept)) + "|"
    right = "step and total right"
    cells = (f"{found[right]} of {found['formats']}" for found in kept.values())
    yield f"| {right} | {' | '.join(cells)} |"
    for figure in FIGURES:
        yield f"| {figure} | {' | '.join(found[figure] for found in kept.values())} |"
    yield f"| false steps in logs without training | {len(false)} of {num_negatives} | |"
    for name, found in kept.items():
        yield from ("", f"## {name.capitalize()}")
        yield from list_misses(found, false if name == "development" else {})


if __name__ == "__main__":
    sys.exit(main())
