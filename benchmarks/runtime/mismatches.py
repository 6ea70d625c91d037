"""Two ranks of which one differs, in each of several ways: who names it, and after how long.

    python -m benchmarks.runtime.mismatches [--only KIND] [--write]

The seconds count from when both ranks have met, so building the model and the dry run are in them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time

from benchmarks import RESULTS
from tests.ranks.mismatch_rank import KINDS
from tests.ranks.start import Rank, start_ranks

RESULT = RESULTS / "mismatches.md"
LIMIT_S = 30.0
BOUND_S = 10.0

Said = tuple[float, str]
"""Seconds until a rank named the difference, and the line."""


def listen(rank: Rank, words: str, began: threading.Barrier, said: list[Said]) -> None:
    assert rank.read_line(LIMIT_S) == "begins\n"
    began.wait(LIMIT_S)
    start = time.monotonic()
    while line := rank.read_line(LIMIT_S):
        if words in line:
            said.append((time.monotonic() - start, line.strip()))
            return


def measure(kind: str) -> list[list[Said]]:
    """Measure when each rank first names the difference: one line a rank, or none."""
    said: list[list[Said]] = [[], []]
    began = threading.Barrier(2)
    with (
        tempfile.TemporaryDirectory() as folder,
        start_ranks("tests.ranks.mismatch_rank", 2, folder, kind) as ranks,
    ):
        threads = [
            threading.Thread(target=listen, args=(rank, KINDS[kind][1], began, said[number]))
            for number, rank in enumerate(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=[*KINDS], default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, late = [], 0
    for kind in options.only or KINDS:
        said = measure(kind)
        expected = 2 - KINDS[kind][0].is_silent
        named = [times[0] for times in said if times]
        seconds = max((at for at, _ in named), default=LIMIT_S)
        late += len(named) < expected or seconds > BOUND_S
        line = named[0][1] if named else "-"
        rows.append(f"| {kind} | {len(named)} of {expected} | {seconds:.1f} | {line[:160]} |")
        print(rows[-1], flush=True)
    if options.write:
        RESULT.write_text(
            "# A rank that differs\n\nMade by `python -m benchmarks.runtime.mismatches --write`: "
            "two ranks over gloo, one of which differs.\nSeconds count from the meeting of the "
            f"ranks; the bound is {BOUND_S:g} s. Not named in time: {late} of {len(rows)}.\n\n"
            "| kind | ranks that name it | seconds | the line |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
