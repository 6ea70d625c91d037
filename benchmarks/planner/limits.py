"""Wall-clock seconds of answers beside the limit that they were given.

    python -m benchmarks.planner.limits [--limits 5,20,60]

An answer should be there within 1.1 times its limit; a busy machine needs longer.
"""

from __future__ import annotations

import argparse
import time

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


def main() -> None:
    """Answer each question within each limit, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", default="5,20,60")
    options = parser.parse_args()
    print("| cluster | limit s | took s | share | best s | gap |\n|---|---|---|---|---|---|")
    for name, cluster, batch in (
        ("1 x 4 A100, 7 x 4 A10", MIXED_8, 64),
        ("8 x 4 A10", A10_8, 64),
        ("3 kinds x 256", LARGE, 1024),
    ):
        profile = build_large_profile(GPT2_XL) if cluster is LARGE else build_gpt2_profile()
        for limit_s in map(float, options.limits.split(",")):
            began = time.monotonic()
            found = search_or_explain(
                profile, TrainingModel(batch=batch), cluster, Wishes(), deadline=within(limit_s)
            )
            took = time.monotonic() - began
            print(
                f"| {name} | {limit_s:g} | {took:.1f} | {took / limit_s:.2f} | "
                f"{found.chosen.step_s:.4g} | {found.gap:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
