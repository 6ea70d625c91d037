"""The furthest step that the ranks of a run's attempts printed, as progress of a script whose
checkpoints vjob cannot read.

The ends of their logs are read once an attempt is over; a run that fails at the same step again and
again makes no progress, as with checkpoints. An attempt that goes on in a later epoch counts its
steps from 1 again, so epochs count before steps.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Optional, Pattern, Tuple

from varuna_core.records.logs.literals import find_marks
from varuna_core.records.logs.progress import MARKS, read_pattern
from varuna_core.records.logs.rank_output import RankOutput, locate_output
from varuna_core.records.logs.steps import StepReader
from varuna_core.records.plan import Plan, read_attempt_plan
from varuna_core.records.runfolder import RunFolder

MOST_RANKS = 32
"""Logs read from each end of a large run, since the first ranks print, or the last stage's."""
ALL_BYTES = 8 * 1024 * 1024
"""Bytes read of all these logs together, which take a few seconds if each line is a step."""
MOST_BYTES = 2 * 1024 * 1024
"""Bytes read from the end of one log."""
LOOK_BYTES = 64 * 1024
"""Bytes read from the end of a log while its rank runs."""
SHARE = 8
"""The number of ranks assumed to share a node's log."""
EPOCH = 10**9
"""Number by which an epoch is weighed, larger than the number of steps of any epoch."""


class Furthest:
    """Finds the furthest step of a run."""

    def __init__(self, run: RunFolder, plan: Plan) -> None:
        self._run = run
        self._pattern: Optional[Pattern[str]] = read_pattern(plan.progress)
        self._marks: Tuple[bytes, ...] = (*MARKS, b"poch")
        """Words of which every line about a step contains at least one; empty if all lines must be
        parsed."""
        if self._pattern is not None:
            self._marks = find_marks(self._pattern.pattern)
        self._known: Dict[int, int] = {}
        """The furthest step of each ended attempt, keyed by the attempt's number."""

    def find(self, number: int) -> int:
        """Return the furthest step of all ended attempts up to this one; -1 without any.

        A step of a named epoch is greater than all steps of earlier epochs.
        """
        for attempt in self._run.attempts():
            if attempt.number <= number and attempt.number not in self._known:
                self._known[attempt.number] = self._read(attempt.number)
        found = [step for known, step in self._known.items() if known <= number]
        return max(found, default=-1)

    def has_step(self, number: int) -> bool:
        """Return True once an attempt's first or last rank has printed a step."""
        logs = self._list_logs(number, 1)
        return any(self._read_log(output, LOOK_BYTES) is not None for output in logs)

    def _read(self, number: int) -> int:
        logs = self._list_logs(number, MOST_RANKS)
        most = min(MOST_BYTES, ALL_BYTES // max(1, len(logs)))
        found = [place for place in (self._read_log(output, most) for output in logs) if place]
        epoch, step = max(found, default=(0, -1))
        return epoch * EPOCH + min(step, EPOCH - 1)

    def _list_logs(self, number: int, num_ranks: int) -> List[RankOutput]:
        plan = read_attempt_plan(self._run, number)
        ranks = range(0 if plan is None else plan.world)
        chosen = sorted({*ranks[:num_ranks], *ranks[-num_ranks:]})
        attempt = self._run.attempt(number)
        return [locate_output(attempt, plan, r, kind) for r in chosen for kind in ("out", "err")]

    def _read_log(self, output: RankOutput, most: int) -> Optional[Tuple[int, int]]:
        """Return the furthest epoch and step in the end of a log, which other ranks may share."""
        most = most if output.is_own else min(SHARE * most, MOST_BYTES)
        reader, best, strength = StepReader(self._pattern, is_partial=True), None, -1
        for line in _read_end(output, most):
            if self._marks and not any(mark in line for mark in self._marks):
                continue
            if reader.read(line.decode(errors="replace")) is None or reader.place is None:
                continue
            # What is surer than all before makes them none: a bar of something else, maybe.
            is_surer, strength = reader.strength > strength, reader.strength
            best = reader.place if best is None or is_surer else max(best, reader.place)
        return best


def _read_end(output: RankOutput, most: int) -> Iterator[bytes]:
    """Yield the last lines of a log; for a progress bar, only its last state."""
    for line in output.read_end(most).split(b"\n"):
        yield line.rstrip(b"\r").rpartition(b"\r")[2]
