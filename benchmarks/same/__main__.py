"""Compare two commits on the same inputs; exit 1 on a difference that allowed.yaml does not have.

    python -m benchmarks.same [--before COMMIT] [--after COMMIT] [--only PATTERN ...] [--page FILE]

Without --before, the base that allowed.yaml is written for is compared; from any other commit,
differences are listed and not judged. Without --after it is the working tree. --page lists every
path that differs, allowed or not, by document. Each commit gets a worktree in a temporary folder,
and both run in this Python, so it needs their dependencies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.same.collect import (
    Command,
    collect_live,
    collect_plans,
    collect_runs,
    collect_submits,
)
from benchmarks.same.difference import Difference, compare, read_allowances, sort_out
from benchmarks.same.inputs import Case, make_runs, write_confs

ALLOWED = Path(__file__).parent / "allowed.yaml"
KINDS = ("came", "went", "changed")
SHOWN = 5
"""Outputs named of those that differ in one place."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="COMMIT", help="default: the base of allowed.yaml")
    parser.add_argument("--after", metavar="COMMIT", help="default: the working tree")
    parser.add_argument("--allowed", type=Path, default=ALLOWED, help="default: allowed.yaml here")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN",
                        help="outputs to show, such as 'status/*'")  # fmt: skip
    parser.add_argument("--page", type=Path, metavar="FILE", help="for the paths that differ")
    options = parser.parse_args(words)
    base, allowances = read_allowances(options.allowed)
    options.before = options.before or base
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same-")))
        checkouts = [
            stack.enter_context(checked_out(commit, temporary / name)) if commit else ROOT
            for name, commit in (("before", options.before), ("after", options.after))
        ]
        before, after = collect_both(checkouts, temporary)
    found = [one for one in compare(before, after) if is_asked(one.name, options.only)]
    if options.page:
        commits = f"{options.before} and {options.after or 'the working tree'}"
        options.page.write_text(render_page(commits, base, len(before), found))
    if options.before != base:
        show(found)
        print(f"{len(before)} and {len(after)} outputs compared, {len(found)} differences, which "
              f"allowed.yaml does not judge: its base is {base}")  # fmt: skip
        return 0 if before else 1
    refused, allowed = sort_out(found, allowances)
    show(refused)
    for step, number in allowed.items():
        print(f"allowed  {number:5d}  {step}")
    print(f"{len(before)} and {len(after)} outputs compared, {len(refused)} differences refused")
    return 1 if refused or not before else 0


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of `commit`, which goes away again."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "-q", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=False)


def collect_both(checkouts: Sequence[Path], temporary: Path) -> tuple[dict[str, Any], ...]:
    """Outputs of each checkout, from copies of the same inputs at the same path."""
    stored, place = temporary / "stored", temporary / "place"
    stored.mkdir()
    write_confs(stored / "confs")
    cases = make_stored_runs(checkouts[0], place)
    shutil.copytree(place / "runs", stored / "runs", symlinks=True)
    clock = time.time()
    found = []
    for checkout in checkouts:
        shutil.rmtree(place)
        shutil.copytree(stored, place, symlinks=True)
        vjob = Command(checkout, place, clock)
        outputs = collect_runs(vjob, place / "runs", cases)
        outputs |= collect_plans(vjob, place / "confs")
        outputs |= collect_submits(vjob, place / "confs")
        (place / "live").mkdir()
        outputs |= collect_live(Command(checkout, place, None), place / "live")
        found.append(outputs)
    return tuple(found)


def make_stored_runs(checkout: Path, place: Path) -> list[Case]:
    runs = place / "runs"
    runs.mkdir(parents=True)
    vjob = Command(checkout, place, None)
    return make_runs(lambda *words: vjob(*words, folder=runs), runs)


def is_asked(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def show(differences: Sequence[Difference]) -> None:
    """Differences by place, each with the first outputs that have it and the first values."""
    groups: dict[str, list[Difference]] = {}
    for one in differences:
        groups.setdefault(re.sub(r"\[\d+\]", "[*]", one.place), []).append(one)
    for found in sorted(groups.values(), key=len, reverse=True):
        names = list(dict.fromkeys(one.name for one in found))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        print(f"{str(found[0])[:500]}\n    {len(found)} in {', '.join(names[:SHOWN])}{more}")


def render_page(
    commits: str, base: str, num_outputs: int, differences: Sequence[Difference]
) -> str:
    """Render the paths of JSON documents that came, went and have other values, and how many lines
    of texts came and went, by document."""
    paths: dict[str, dict[str, set[str]]] = {}
    lines: dict[str, Counter[str]] = {}
    for one in differences:
        first, *rest = one.name.split("/")
        is_file = first in ("submit", "live") or rest[-1:] in (["said"], ["text"])
        document = f"{first}/*/{rest[-1]}" if is_file and rest else first
        if one.place[:1] in ("+", "-") or one.place.startswith("only "):
            lines.setdefault(document, Counter())[one.place[:1]] += 1
        else:
            kinds = paths.setdefault(document, {kind: set() for kind in KINDS})
            kinds[one.kind].add(re.sub(r"\[\d+\]", "[*]", one.place))
    rows = [f"| document | {' | '.join(KINDS)} |", "|---|---|---|---|"]
    for document, kinds in sorted(paths.items()):
        cells = (
            ", ".join(f"`{path}`" for path in sorted(found)) or "-" for found in kinds.values()
        )
        rows.append(f"| {document} | {' | '.join(cells)} |")
    rows += ["", "| text | lines that went | lines that came |", "|---|---|---|"]
    for document, number in sorted(lines.items()):
        rows.append(f"| {document} | {number['-']} | {number['+']} |")
    return (
        f"# Outputs of two commits on the same inputs\n\nMade by `python -m benchmarks.same`: "
        f"{num_outputs} outputs of {commits}. What is not listed is equal. A path came if it is in "
        "some document of the second commit alone, went if in one of the first alone, and changed "
        "if its values differ in one that both have; it may have done all three in different "
        f"documents. `allowed.yaml` judges differences from {base} alone: from another commit "
        "they are listed here, and nothing says that each was meant.\n\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
