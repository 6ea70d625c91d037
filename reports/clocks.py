"""Clocks that are plainly wrong, put right by what all ranks do at once: the end of a step.

Only where a rank has no measured offset and its steps end more than half a step away from those of
the reference, which no synchronised clock says. Steps end together to within far less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reports.rank_trace import RankTrace

WRONG = 0.5
"""Of a median step."""


def put_right(found: list[tuple[RankTrace, list[dict[str, Any]]]]) -> None:
    """Shift the origins of wrong clocks; `shifted_ns` says by how much."""
    for attempt in {trace.attempt: None for trace, _ in found}:
        own = [pair for pair in found if pair[0].attempt == attempt and pair[0].has_header]
        own.sort(key=lambda pair: (not pair[0].offsets, pair[0].rank))
        if not own:
            continue
        reference = _list_ends(*own[0])
        typical = float(np.median([row["took_s"] for row in own[0][1]] or [0])) * 1e9
        for trace, rows in own[1:]:
            ends = _list_ends(trace, rows)
            apart = [reference[step] - ends[step] for step in ends.keys() & reference.keys()]
            if trace.offsets or not apart:
                continue
            shift = sorted(apart)[len(apart) // 2]
            if abs(shift) > WRONG * typical:
                trace.origin += shift
                trace.shifted_ns = shift


def _list_ends(trace: RankTrace, rows: list[dict[str, Any]]) -> dict[int, int]:
    begins = trace.align(np.array([row["begin_ns"] for row in rows], dtype=np.int64))
    return {
        row["step"]: begin + round(row["took_s"] * 1e9)
        for row, begin in zip(rows, begins.tolist(), strict=True)
    }
