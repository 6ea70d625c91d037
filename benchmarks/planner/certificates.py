"""Certificates beside every plan of small questions, all schedules and ways of recompute.

    python -m benchmarks.planner.certificates [--questions 2000] [--from 0] [--write]

A wrong one is printed with the name from which its question is drawn again.
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections import Counter

import numpy as np

from benchmarks import RESULTS
from tests.varuna_core.planner.every_plan import check_question, draw_question

RESULT = RESULTS / "planner_certificates.md"


def main() -> None:
    """Ask, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    total, wrong = Counter[str](), 0
    began = time.process_time()
    for number in range(options.first, options.first + options.questions):
        name = f"certificates/{options.seed}/{number}"
        found, counts = check_question(draw_question(random.Random(name)))
        total.update(counts)
        if found:
            wrong += 1
            print(f"{name}: {'; '.join(found[:3])}", flush=True)
        if number % 100 == 99:
            print(f"{number + 1}: {dict(total)}, {wrong} wrong", flush=True)
    row = (
        f"| {options.questions} | {total['answered']} | {total['gap 0']} | {wrong} | "
        f"{total['outside']} | {total['plans']} | "
        f"{(time.process_time() - began) / options.questions:.2f} s |"
    )
    text = (
        "| questions | answered | with gap 0 % | wrong | a better plan is of no class searched | "
        "placed shapes tried | each |\n|---|---|---|---|---|---|---|\n" + row
    )
    print(text)
    if options.write:
        RESULT.write_text(
            "# Planning: certificates beside every plan\n\n"
            "Made by `python -m benchmarks.planner.certificates --write`: 2 to 6 GPUs of up to "
            "three kinds, 4 to 10 segments, six schedules, one to five stages a rank, replicas, "
            "tensor 1 and 2, micro-batches, ways of recompute, ZeRO 0 to 2 "
            "(tests/varuna_core/planner/every_plan.py). Wrong is a plan below a bound of its "
            "class, a plan that does not fit, a time that is not the printed plan's, or a refusal "
            f"where a plan fits. numpy {np.__version__}, Python {platform.python_version()}, seed "
            f"{options.seed}.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
