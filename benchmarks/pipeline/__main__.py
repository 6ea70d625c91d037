"""Speed of the runtime, beside other engines and beside its own theory.

    python -m benchmarks.pipeline [torch] [deepspeed] [theory] [staged] [adaptive] [overhead]
                                  [best] [gpu] [gpu_stages]
                                  [--microbatches 8 16] [--rounds 5] [--write]

Without names all parts, in about ten minutes on two cores. Every figure is a ratio within one run:
each round runs everything once, in an order that turns, and the median over the rounds is taken.
One core a process, one thread. torch, deepspeed and theory share one job, so that they are paired.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import read_processor
from benchmarks.pipeline import adaptive, gpu, overhead, paired, staged
from benchmarks.pipeline.ranks import RanksFailed
from benchmarks.pipeline.table import Part

RESULT = Path(__file__).parent.parent / "results" / "pipeline.md"
PAIRED = ("torch", "deepspeed", "theory")
OTHERS = {
    "staged": staged.run,
    "adaptive": adaptive.run,
    "overhead": overhead.run,
    "gpu": gpu.run,
    "gpu_stages": gpu.run_stages,
    "best": paired.run_best,
}


def describe_machine() -> str:
    try:
        deepspeed = f", DeepSpeed {version('deepspeed')}"
    except PackageNotFoundError:
        deepspeed = ""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}{deepspeed}, "
        f"{os.cpu_count()} cores of {read_processor()}, load {os.getloadavg()[0]:.1f} at the start."
    )


def run_parts(names: list[str], options: dict[str, Any]) -> list[Part]:
    parts = []
    shared = [name for name in PAIRED if name in names]
    wanted = [("two stages", paired.run)] if shared else []
    wanted += [(name, run) for name, run in OTHERS.items() if name in names]
    for name, run in wanted:
        try:
            parts.append(run({**options, "parts": shared}))
        except RanksFailed as error:
            parts.append(Part(title=name, notes=[f"Failed: {error}"]))
        print(parts[-1].render(), end="\n\n", flush=True)
    return parts


def main() -> None:
    """Measure, print, and with --write keep the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*PAIRED, *OTHERS]
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(every))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write {RESULT.name}; of adaptive or best alone a page of their name",
    )
    given = parser.parse_args()
    if unknown := [name for name in given.parts if name not in every]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(every)}")
    machine = describe_machine()
    print(machine, end="\n\n")
    options = {"rounds": given.rounds, "microbatches": given.microbatches}
    parts = run_parts(given.parts or every, options)
    if given.write:
        alone = len(given.parts) == 1 and given.parts[0] in ("adaptive", "best")
        page = RESULT.with_name(f"{given.parts[0]}.md") if alone else RESULT
        command = " ".join(["python -m benchmarks.pipeline", *sys.argv[1:]])
        text = "\n\n".join(part.render() for part in parts)
        page.write_text(
            "# The runtime's speed, as ratios in one run\n\n"
            f"Made by `{command}`. {machine} Medians over {given.rounds} rounds with the smallest "
            f"and the largest.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
