"""Recipes of examples/recipes: everything that vjob says of each, on this machine and on the lab.

    python -m benchmarks.recipes ROWS            runs the tests of recipes, which leave rows there
    python -m benchmarks.recipes ROWS --write    makes benchmarks/results/recipes.md of the rows

A row is what one run gave: the claims of tests/recipes/story.py, each with what vjob said and with
the truth that the program wrote itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.recipes.story import KNOWN, RECIPES, RESULTS

PAGE = ROOT / "benchmarks/results/recipes.md"
PLACES = {
    "local": "this machine, two ranks",
    "plain": "the lab, a plain job of two nodes",
    "het": "the lab, a het job over two queues",
}
TESTS = ("tests/recipes", "tests/cluster/test_recipes.py")
HEAD = """\
Made by `python -m benchmarks.recipes ROWS`, then with `--write`. Each program of
[recipes](../../docs/recipes.md) was trained by vjob and by its usual launcher, 40 steps each; after
step 24 the ranks were stopped for a look at the status.

*yes*: the ranks are the program's own, the losses equal to the last digit, status and report equal
to what the program itself wrote. Other cells have what vjob said, and the truth."""
MOST = 40
"""Characters of a cell."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="folder of the rows")
    parser.add_argument("--write", action="store_true", help="renew the page, run nothing")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(render_page(read_rows(options.rows)))
        return
    options.rows.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, RESULTS: str(options.rows.resolve())}
    command = [sys.executable, "-m", "pytest", *TESTS]
    sys.exit(subprocess.run(command, cwd=ROOT, env=env, check=False).returncode)


def read_rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by recipe and place."""
    rows = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    return {(row["recipe"], row["place"]): row for row in rows}


def render_page(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    return "\n".join(list_lines(rows)) + "\n"


def list_lines(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    names = ("ranks", "losses", "during", "after", "report")
    yield "# The recipes"
    yield ""
    yield HEAD
    for place, title in PLACES.items():
        yield ""
        yield f"## {title[0].upper()}{title[1:]}"
        yield f"| recipe | with | {' | '.join(names)} |"
        yield "|---" * (2 + len(names)) + "|"
        for recipe in RECIPES.values():
            row = rows.get((recipe.name, place))
            if row is None:
                why = "one rank" if place == "het" and recipe.ranks == 1 else "not run"
                yield f"| {recipe.name} | {why} |" + " |" * len(names)
                continue
            groups = group_claims(row["claims"])
            cells = [render_cell(groups.get(name, ())) for name in names]
            used = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
            yield f"| {recipe.name} | {used} | {' | '.join(cells)} |"
    yield ""
    yield "## Known not to hold"
    yield "| recipe | claim | reason |"
    yield "|---|---|---|"
    for name, claims in KNOWN.items():
        for claim, reason in claims.items():
            yield f"| {name} | {claim} | {reason} |"


def group_claims(claims: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Claims by the column that they belong to."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for claim in claims:
        last = claim["name"].split()[-1]
        column = last if last in ("ranks", "during", "after") else "report"
        found.setdefault("losses" if claim["name"] == "losses" else column, []).append(claim)
    return found


def render_cell(claims: Sequence[Mapping[str, Any]]) -> str:
    wrong = [
        f"{claim['name']}: {claim['said'][:MOST]} (true: {claim['truth'][:MOST]})"
        for claim in claims
        if not claim["holds"]
    ]
    return "; ".join(wrong) or "yes"


if __name__ == "__main__":
    main()
