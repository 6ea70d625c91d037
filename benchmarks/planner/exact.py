"""Plans of the search beside the best of all plans, on many small random questions.

    python -m benchmarks.planner.exact [--count 2000] [--seed 1] [--write]

A difference is a bug: each is printed with the name from which its question is drawn again.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Callable

import numpy as np

from benchmarks import RESULTS
from tests.varuna_core.planner.brute_force import (
    Instance,
    draw_instance,
    find_best,
    find_best_by_nodes,
    keep_front,
)
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.front import compute_front
from varuna_core.planner.search import space
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Search

RESULT = RESULTS / "planner_exact.md"
CLOSE = 1e-9
LIMIT_S = 600.0
HEAD = [
    "| objective | questions | nothing fits | differences | ours, each | trying all, each |",
    "|---|---|---|---|---|---|",
]
Answer = list[tuple[float, ...]]


def search(one: Instance) -> Answer:
    try:
        searched = Search(
            one.profile,
            one.training,
            one.cluster,
            one.wishes,
            deadline=within(LIMIT_S, time.process_time),
        ).run()
    except PlanningError:
        return []
    return [(searched.best.step_s, searched.gap)]


def try_all(one: Instance, *, grouped: bool = False) -> Answer:
    best = find_best(one, grouped=grouped)
    return [(best, 0.0)] if best < float("inf") else []


def search_front(one: Instance) -> Answer:
    front = compute_front(
        one.profile,
        one.training,
        one.cluster,
        one.wishes,
        deadline=within(LIMIT_S, time.process_time),
    )
    return [(offer.step_s, offer.price) for offer in front.offers]


def are_equal(found: Answer, wanted: Answer) -> bool:
    return len(found) == len(wanted) and all(
        abs(a - b) <= CLOSE * max(abs(b), 1e-300)
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def compare(
    name: str,
    seed: int,
    count: int,
    ours: Callable[[Instance], Answer],
    theirs: Callable[[Instance], Answer],
) -> str:
    """A row: how many questions, how many of them nothing fits, differences, processor times."""
    differ = empty = 0
    took = [0.0, 0.0]
    for number in range(count):
        named = f"{name}/{seed}/{number}"
        one = draw_instance(random.Random(named))
        answers = []
        for place, answer in enumerate((ours, theirs)):
            began = time.process_time()
            answers.append(answer(one))
            took[place] += time.process_time() - began
        empty += not answers[1]
        if not are_equal(*answers):
            differ += 1
            print(f"{named}: {answers[0]}, by trying all {answers[1]}", flush=True)
    each = [f"{1e3 * seconds / count:.0f} ms" for seconds in took]
    return f"| {name} | {count} | {empty} | {differ} | {each[0]} | {each[1]} |"


def read_rows() -> dict[str, str]:
    """Read the rows of the result file, by kind."""
    text = RESULT.read_text() if RESULT.exists() else ""
    rows = [line for line in text.splitlines() if line.startswith("| ") and line not in HEAD]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one kind; its row is the one that --write changes")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    kinds: dict[str, tuple[Callable[[Instance], Answer], Callable[[Instance], Answer]]] = {
        "fastest, every order of nodes": (search, try_all),
        "fastest, nodes of a kind together": (search, lambda one: try_all(one, grouped=True)),
        "cost against time": (
            search_front,
            lambda one: [*keep_front(one, find_best_by_nodes(one))],
        ),
    }
    rows = read_rows()
    most = space.MOST_ORDERS
    for name, (ours, theirs) in kinds.items():
        if options.only in (None, name):
            space.MOST_ORDERS = 0 if "together" in name else most
            rows[name] = compare(name, options.seed, options.count, ours, theirs)
            print(rows[name], flush=True)
    text = (
        f"numpy {np.__version__}, Python {platform.python_version()}, seed {options.seed}; "
        "processor time.\n\n" + "\n".join([*HEAD, *rows.values()]) + "\n"
    )
    if options.write:
        RESULT.write_text(
            "# Planning: equal to trying every plan\n\n"
            "Made by `python -m benchmarks.planner.exact --write`. Questions are drawn: 2 to 6 "
            "segments, up to three kinds of nodes of two kinds of GPU, memory that binds in two of "
            "three, keys fixed or free, also zero_bubble and stages without segments "
            "(tests/varuna_core/planner/brute_force.py). " + text
        )


if __name__ == "__main__":
    main()
