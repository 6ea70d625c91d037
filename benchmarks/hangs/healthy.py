"""Healthy runs that are disturbed: how often the guard acts, which it never should.

    python -m benchmarks.hangs.healthy [--runs 100] [--at-once 18] [--seed 1]
    python -m benchmarks.hangs.healthy --simulated 1000

The first are real local runs in real time, with real limits; each draws two disturbances and the
ranks that have them. The second are simulations: the guard itself, from a count of steps to what it
does, over ranks, a kernel and a clock that are made up, so that hours pass in a second. They show
the rules, not how the kernel shows a process. The same simulation stages hangs, each of which the
guard has to find: it is not blind.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.hangs.__main__ import Case, Result, stage
from benchmarks.hangs.simulated import simulate
from benchmarks.hangs.staging import write_part

STEPS, NUM_EACH = 60, 2
SECONDS = {
    "compile": (30, 150),
    "evaluate": (30, 180),
    "python": (60, 170),
    "save": (20, 120),
    "data": (20, 80),
    "storage": (60, 60),
    "stopped": (5, 15),
    "debugger": (30, 100),
    "child": (20, 90),
}
BY_ALL = ("compile", "evaluate", "python", "save", "data", "storage")
"""Disturbances that all ranks may have at once; the others have one rank."""
HEADING = "Healthy runs, disturbed"


def draw(seed: int, world: int) -> list[tuple[int, str, int, int]]:
    """Step, name, rank (-1: all) and seconds of each disturbance of one run."""
    source, found = random.Random(seed), []
    for at in sorted(source.sample(range(20, STEPS - 5, 10), NUM_EACH)):
        name = source.choice(list(SECONDS))
        rank = source.randrange(-1 if name in BY_ALL else 0, world)
        found.append((at, name, rank, source.randint(*SECONDS[name])))
    return found


def run(seed: int, folder: Path, until: float) -> Result | None:
    disturbances = json.dumps(draw(seed, 2))
    case = Case(f"healthy {seed}", "", kind=("ddp", "loop")[seed % 2])
    return stage(case, folder, STEPS, {"DISTURB": disturbances}, until)


def render(results: list[Result], first: int) -> list[str]:
    counted: Counter[str] = Counter()
    for number in range(len(results)):
        counted.update(name for _, name, _, _ in draw(first + number, 2))
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(counted.items()))
    wrong = [one.case.name for one in results if not one.is_right]
    return [
        f"By `python -m benchmarks.hangs.healthy --seed {first}`, in real time with the real",
        f"limits: {len(results)} runs of two ranks with {sum(counted.values())} disturbances of 5",
        f"to 180 s ({kinds}).",
        "",
        f"Left alone: {len(results) - len(wrong)} of {len(results)}."
        + (f" Not: {', '.join(wrong)}." if wrong else ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=18)
    parser.add_argument("--minutes", type=float, default=240, help="no run begins later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the runs there, or go on with them")
    parser.add_argument("--simulated", type=int, default=0)
    options = parser.parse_args()
    if options.simulated:
        rows = simulate(options.simulated, options.seed)
        print("\n".join(rows))
        write_part(f"{HEADING}, simulated", rows)
        return
    with tempfile.TemporaryDirectory(prefix="healthy-") as text:
        folder = options.folder or Path(text)
        folder.mkdir(exist_ok=True)
        until = time.monotonic() + 60 * options.minutes
        seeds = range(options.seed, options.seed + options.runs)
        with ThreadPoolExecutor(options.at_once) as pool:
            found = pool.map(lambda seed: run(seed, folder, until), seeds)
            results = [one for one in found if one is not None]
    rows = render(results, options.seed)
    print("\n".join(rows))
    write_part(HEADING, rows)


if __name__ == "__main__":
    main()
