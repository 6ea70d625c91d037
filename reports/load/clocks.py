"""Clocks that are plainly wrong, put right by what all ranks do at once: the end of a step.

Only where a rank has no measured offset and its steps end more than half a step away from those of
the reference, which no synchronised clock says. Steps end together to within far less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vjob.reports.load.rank_trace import RankTrace
from vjob.reports.load.trace_lines import Column

WRONG = 0.5
"""Of a median step."""


@dataclass(frozen=True)
class Ends:
    """Of each whole step of a trace, as columns."""

    step: Column
    begin_ns: Column
    took_s: Column

    def list_by_step(self, trace: RankTrace) -> dict[int, int]:
        """When each step ended, where it ran again the last time."""
        ends = trace.align(self.begin_ns) + (self.took_s * 1e9).astype(np.int64)
        return dict(zip(self.step.tolist(), ends.tolist(), strict=True))


def put_right(found: Iterable[tuple[RankTrace, Ends]]) -> None:
    """Shift the origins of wrong clocks; `shifted_ns` says by how much."""
    attempts: dict[str, list[tuple[RankTrace, Ends]]] = {}
    for trace, ends in found:
        attempts.setdefault(trace.attempt, []).append((trace, ends))
    for own in attempts.values():
        own.sort(key=lambda pair: (not pair[0].offsets, pair[0].rank))
        (first, ends), *others = own
        doubtful = [(trace, ends) for trace, ends in others if not trace.offsets]
        if not doubtful:
            continue
        reference = ends.list_by_step(first)
        typical_ns = float(np.median(ends.took_s)) * 1e9
        for trace, own_ends in doubtful:
            by_step = own_ends.list_by_step(trace)
            apart = sorted(
                reference[step] - by_step[step] for step in by_step.keys() & reference.keys()
            )
            shift = apart[len(apart) // 2] if apart else 0
            if abs(shift) > WRONG * typical_ns:
                trace.origin += shift
                trace.shifted_ns = shift
