"""Score of the reader of steps over the corpus of formats.

    python -m benchmarks.formats [--only NAME] [--show] [--seed N]    the half for development
    python -m benchmarks.formats --fresh                              18 others, and 10 logs
    python -m benchmarks.formats --apart                              the half kept apart: once
    python -m benchmarks.formats --write LABEL                        both, kept for the page

The aim: steps and totals are right in nine of ten formats, and no log without training has a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import RESULTS
from benchmarks.formats import fresh
from benchmarks.formats.catalog import list_formats, list_negatives, split_formats, split_negatives
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
HALVES = ("development", "apart")
HEAD = """\
Made by `python -m benchmarks.formats --write LABEL`. 100 formats of real training programs, each
with the source of its print statement (`benchmarks/formats`), were written before the reader that
learns formats; their lines have numbers of our own. 50, drawn by a seed, were there for
development; the other 50 were kept apart. *Not known* is no mistake, *wrong* is one.
That half was scored once, and nothing was changed for it in the reader. In the scorer one thing
was, after that run: a reading that names an epoch as such, and the right one, says no step; it had
been called wrong for icefall and vits. `val_loss` is the last loss of an evaluation. The aim was 45
of 50 in each half and no false step."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--apart", action="store_true", help="the half kept apart")
    parser.add_argument("--fresh", action="store_true", help="the second corpus, both halves")
    parser.add_argument("--only", metavar="NAME", help="one format of this half, or one negative")
    parser.add_argument("--show", action="store_true", help="print the log and its truth too")
    parser.add_argument("--seed", type=int, default=0, help="other numbers in the same formats")
    parser.add_argument("--write", metavar="LABEL", help="keep the figures, renew the page")
    options = parser.parse_args()
    if options.write:
        keep(options.write)
        return 0
    if options.fresh:
        print("\n".join(list_fresh(options.seed)))
        return 0
    names = split_formats()[options.apart]
    negatives = split_negatives()[options.apart]
    if options.only:
        names = tuple(name for name in names if name == options.only)
        negatives = tuple(name for name in negatives if name == options.only)
        if not names and not negatives:
            parser.error(f"{options.only} is not in this half")
    if options.show:
        show([*names, *negatives], options.seed)
    rows = [score_format(list_formats()[name], options.seed) for name in names]
    false = find_false(negatives, options.seed)
    print("\n".join(list_lines(rows, len(negatives), false)))
    return int(bool(false) or sum(row.is_right for row in rows) < AIM * len(rows))


def list_fresh(seed: int) -> Iterator[str]:
    """The tables of the second corpus; misses of the half kept apart are not named."""
    formats, negatives = fresh.list_formats(), fresh.list_negatives()
    halves = zip(HALVES, fresh.split(tuple(formats)), fresh.split(tuple(negatives)), strict=True)
    for half, names, others in halves:
        rows = [score_format(formats[name], seed) for name in names]
        false = {name: said for name in others if (said := find_false_steps(negatives[name], seed))}
        lines = list(list_lines(rows, len(others), false))
        yield from (f"## {half.capitalize()}", *(lines[:8] if half == "apart" else lines), "")


def find_false(names: Sequence[str], seed: int = 0) -> dict[str, str]:
    """Negatives in which a step was read, and what was read."""
    found = {name: find_false_steps(list_negatives()[name], seed) for name in names}
    return {name: said for name, said in found.items() if said}


def show(names: Sequence[str], seed: int) -> None:
    """Print logs as the node has them, and the truth."""
    for name in names:
        item = list_formats().get(name)
        log, truth = item.make(seed) if item else (list_negatives()[name].make(seed), None)
        for line in log.lines:
            print(f"{line.at_s:9.2f} {line.kind} {line.rank}: {line.text}")
        print(f"\n{name}: {truth}\n")


def list_lines(rows: Sequence[Row], num_negatives: int, false: dict[str, str]) -> Iterator[str]:
    """The tables of one half."""
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


def keep(label: str) -> None:
    """Score everything, keep it under `label`, and write the page of all that is kept."""
    halves = dict(zip(HALVES, split_formats(), strict=True))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[label] = {
        half: summarize([score_format(list_formats()[name]) for name in names])
        for half, names in halves.items()
    }
    kept[label]["negatives"] = len(list_negatives())
    kept[label]["false"] = find_false(tuple(list_negatives()))
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text("\n".join(render_page(kept)) + "\n")


def render_page(kept: dict[str, Any]) -> Iterator[str]:
    """The page: the figures of each label side by side, then the misses of the last."""
    yield "# Progress formats"
    yield ""
    yield HEAD
    yield ""
    yield "| figure | half | " + " | ".join(kept) + " |"
    yield "|---" * (2 + len(kept)) + "|"
    for figure in ("step and total right", *FIGURES):
        for half in HALVES:
            cells = (f"{found[half][figure]}" for found in kept.values())
            yield f"| {figure} | {half} | {' | '.join(cells)} |"
    cells = (f"{len(found['false'])} of {found['negatives']}" for found in kept.values())
    yield f"| false steps in logs without training | | {' | '.join(cells)} |"
    last = next(reversed(kept))
    for half in HALVES:
        yield ""
        yield f"## {half.capitalize()}, {last}"
        yield from list_misses(kept[last][half], kept[last]["false"] if half == "apart" else {})


if __name__ == "__main__":
    sys.exit(main())
