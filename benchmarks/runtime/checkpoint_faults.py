"""Faults of a file system in one rank of a save while the others stand still: what is left.

    python -m benchmarks.runtime.checkpoint_faults [--draws 6] [--write]

Three ranks save, each a thread of which one call of the file system at a time is let through. Each
error is given to each rank at each of its calls, the others paused at drawn calls of theirs, with
drawn turns after it. tests/varuna_core/checkpoint/test_faults.py has the stepper and what must hold
in each round: what was complete stays loadable, or is replaced by a newer one; every error lets
training go on; the next save is complete and clears the rest away.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import RESULTS
from tests.ranks.checkpoint_world import IN_MEMORY
from tests.varuna_core.checkpoint.test_faults import ERRORS, hear, run

RESULT = RESULTS / "checkpoint_faults.md"


@dataclass
class Tally:
    """Rounds of one error."""

    rounds: int = 0
    """In which the fault came."""
    calls: int = 0
    """The last call of a rank that it came at."""
    complete: int = 0
    """The save was completed all the same, by a rank or at the next save's start."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rounds in which the worst that a rank raised was this."""


def run_all(draws: int, seed: int = 0) -> dict[int, Tally]:
    found = {code: Tally() for code in ERRORS}
    draw = random.Random(seed)
    store = Path(tempfile.mkdtemp(dir=IN_MEMORY))
    try:
        for code, faulty in itertools.product(ERRORS, range(3)):
            for number in itertools.count(1):
                if not run_call(store, found[code], code, faulty, number, draws, draw):
                    break
    finally:
        shutil.rmtree(store)
    return found


def run_call(
    store: Path, tally: Tally, code: int, faulty: int, number: int, draws: int, draw: random.Random
) -> bool:
    """Rounds with the fault at this call; True if it came in any, as after the last it does not."""
    hit = False
    for _ in range(draws):
        pauses = draw.randrange(60), draw.randrange(60)
        turns = [draw.choice((1, 2, 3, 5, 8, 30)) for _ in range(draw.randrange(12))]
        lost = draw.random() < 0.3
        outcome = run(store, faulty, number, code, pauses, turns, lost_answer=lost)
        if not outcome.hit:
            continue
        hit = True
        tally.rounds += 1
        tally.calls = max(tally.calls, number)
        tally.complete += outcome.newest == 2
        tally.errors[max(outcome.errors, default="none")] += 1
    return hit


def render(found: dict[int, Tally], draws: int) -> str:
    rows = [
        f"| {errno.errorcode[code]} | {one.rounds} | 1 to {one.calls} | {one.complete} | "
        f"{one.rounds - one.complete} | {one.errors['none']} | 0 | 0 |"
        for code, one in found.items()
    ]
    total = sum(one.rounds for one in found.values())
    return "\n".join(
        [
            "# A call of the file system fails in one rank of a save",
            "",
            f"Made by `python -m benchmarks.runtime.checkpoint_faults --draws {draws} --write`: "
            f"{total} rounds.",
            "",
            "Three ranks save over a complete checkpoint, with `keep: 1`. One rank's k-th call "
            "fails, for each rank and every",
            "k; the other two were brought to drawn calls of theirs before it, and take drawn "
            "turns after it. In three of ten rounds",
            "a rename or link does its work before it fails, as where a file server's answer is "
            "lost. The last two columns",
            "are asserted to be 0 in each round: nothing complete and whole in the folder at any "
            "moment; an error for which training would end.",
            "",
            "| error | rounds | at calls | this save complete | the one before is the newest "
            "| no rank saw an error | nothing loadable | training ends |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "After each round the next save was complete, bit by bit, and alone in the folder.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--write", action="store_true")
    wanted = parser.parse_args(arguments)
    sys.addaudithook(hear)
    text = render(run_all(wanted.draws), wanted.draws)
    print(text)
    if wanted.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
