"""Makes a table of reports: `python -m benchmarks.chaos.summary FILE... > results/chaos.md`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.fault_actions import NO_TARGET


def render_summary(reports: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# Chaos: what was done to runs, and what came of it",
        "",
        "Each row is made by `python -m benchmarks.chaos --testbed TESTBED --seed SEED --faults",
        "COUNT --report FILE`, the table by `python -m benchmarks.chaos.summary FILE...`. Four",
        "ranks on two CPUs that others used too: the seconds are no measure of a morph.",
        "A run is well if it ended as COMPLETED with every step's loss as undisturbed (2e-5), no",
        "complete checkpoint was lost, no two managers were seen, and nothing ran on.",
        "",
        "| testbed | seed | faults, in order | attempts | morphs | seconds | ended | problems |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(reports, key=lambda one: (one["testbed"], one["seed"])):
        kinds = ", ".join(list_kinds(one))
        wrong = "; ".join(one["problems"]) or "none"
        lines.append(
            f"| {one['testbed']} | {one['seed']} | {kinds} | {one['attempts']} | "
            f"{len(one['morphs'])} | {one['seconds']:.0f} | {one['verdict']} | {wrong} |"
        )
    count = Counter(kind for one in reports for kind in list_kinds(one) if "(" not in kind)
    faults = ", ".join(f"{kind} {number}" for kind, number in sorted(count.items()))
    well = sum(not one["problems"] for one in reports)
    lines += ["", f"{well} of {len(reports)} runs were well. Faults: {faults}.", ""]
    return "\n".join(lines)


def list_kinds(report: dict[str, Any]) -> list[str]:
    """List the kinds of faults in order, and mark those that hit nothing."""
    applied = [seen["said"] for seen in report["seen"] if seen["what"] == "applied"]
    said = [*applied, *[NO_TARGET] * len(report["faults"])]
    return [
        fault["kind"] + (" (no hit)" if text.startswith(NO_TARGET) else "")
        for fault, text in zip(report["faults"], said, strict=False)
    ]


if __name__ == "__main__":
    print(render_summary([json.loads(Path(name).read_text()) for name in sys.argv[1:]]), end="")
