"""Processor seconds of answers beside the limit that they were given.

    python -m benchmarks.planner.limits [--limits 5,20,60] [--write]

An answer should be there within 1.1 times its limit. `vjob plan` reads the wall clock; here it is
the processor's, so that what others do on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

import numpy as np

from benchmarks import RESULTS
from benchmarks.planner.cases import (
    A10_8,
    GPT2_XL,
    LARGE,
    MIXED_8,
    build_gpt2_profile,
    build_large_profile,
)
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.result.refusal import search_or_explain
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.space import Wishes

RESULT = RESULTS / "planner_limits.md"


def main() -> None:
    """Answer each question within each limit, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", default="5,20,60")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    lines = [
        "| cluster | limit s | wall clock s | processor s | share | best s | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name, cluster, batch in (
        ("1 x 4 A100, 7 x 4 A10", MIXED_8, 64),
        ("8 x 4 A10", A10_8, 64),
        ("3 kinds x 256", LARGE, 1024),
    ):
        profile = build_large_profile(GPT2_XL) if cluster is LARGE else build_gpt2_profile()
        for limit_s in map(float, options.limits.split(",")):
            deadline = within(limit_s, time.process_time)
            began, worked = time.monotonic(), time.process_time()
            found = search_or_explain(
                profile, TrainingModel(batch=batch), cluster, Wishes(), deadline=deadline
            )
            took, work = time.monotonic() - began, time.process_time() - worked
            lines.append(
                f"| {name} | {limit_s:g} | {took:.1f} | {work:.1f} | {work / limit_s:.2f} | "
                f"{found.chosen.step_s:.4g} | {found.gap:.1%} |"
            )
            print(lines[-1], flush=True)
    if options.write:
        RESULT.write_text(
            "# Planning: the time that a search may take\n\n"
            "Made by `python -m benchmarks.planner.limits --write`: the limits are by the "
            "processor's clock, as others use these machines; share is processor time over the "
            f"limit. numpy {np.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
