"""The furthest step that the ranks of a run's attempts told of, as progress of a script whose
checkpoints vjob cannot read.

The ends of their logs are read once an attempt is over; a run that fails at the same step again and
again makes no progress, as with checkpoints.
"""

from __future__ import annotations

from typing import Dict, Iterator, Optional, Pattern

from varuna_core.records.logs.progress import parse_own, parse_progress, read_pattern
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.logs.training_log import Iteration
from varuna_core.records.plan import Plan, read_attempt_plan
from varuna_core.records.runfolder import RunFolder

NUM_LINES = 400
MOST_RANKS = 32
"""Of each end of a large run: the first ranks print, or those of the last stage."""


class Furthest:
    """The furthest step of one run."""

    def __init__(self, run: RunFolder, plan: Plan) -> None:
        self._run = run
        self._pattern: Optional[Pattern[str]] = read_pattern(plan.progress)
        self._known: Dict[int, int] = {}
        """By attempts, those that are over."""

    def find(self, number: int) -> int:
        """That of all attempts up to this one, which is over; -1 where none told of a step."""
        for attempt in self._run.attempts():
            if attempt.number <= number and attempt.number not in self._known:
                self._known[attempt.number] = self._read(attempt.number)
        found = [step for known, step in self._known.items() if known <= number]
        return max(found, default=-1)

    def tells(self, number: int) -> bool:
        """True once an attempt has told of a step, by its first rank or its last."""
        return any(line.step >= 0 for line in self._list_steps(number, 1))

    def _read(self, number: int) -> int:
        return max((line.step for line in self._list_steps(number, MOST_RANKS)), default=-1)

    def _list_steps(self, number: int, num_ranks: int) -> Iterator[Iteration]:
        plan = read_attempt_plan(self._run, number)
        ranks = range(0 if plan is None else plan.world)
        for rank in sorted({*ranks[:num_ranks], *ranks[-num_ranks:]}):
            for stream in ("out", "err"):
                path = self._run.attempt(number).rank_log(rank, stream)
                for text in last_lines(path, NUM_LINES):
                    found = self._parse(text)
                    if found is not None:
                        yield found

    def _parse(self, text: str) -> Optional[Iteration]:
        return parse_progress(text) if self._pattern is None else parse_own(self._pattern, text)
