"""Clocks that are plainly wrong, put right by what all ranks do at once: the end of a step.

Only where a rank has no measured offset and its steps end more than half a step away from those of
the reference, which no synchronised clock says. Steps end together to within far less.
"""

from __future__ import annotations

import pandas as pd

from reports.rank_trace import RankTrace

WRONG = 0.5
"""Of a median step."""


def put_right(found: list[tuple[RankTrace, pd.DataFrame]]) -> None:
    """Shift the origins of wrong clocks; `shifted_ns` says by how much."""
    for attempt in {trace.attempt: None for trace, _ in found}:
        own = [pair for pair in found if pair[0].attempt == attempt]
        own.sort(key=lambda pair: (not pair[0].offsets, pair[0].rank))
        reference = _list_ends(*own[0])
        typical_ns = float(own[0][1]["took_s"].median()) * 1e9
        for trace, rows in own[1:]:
            if trace.offsets:
                continue
            apart = (reference - _list_ends(trace, rows)).dropna().sort_values()
            shift = int(apart.iloc[len(apart) // 2]) if len(apart) else 0
            if abs(shift) > WRONG * typical_ns:
                trace.origin += shift
                trace.shifted_ns = shift


def _list_ends(trace: RankTrace, rows: pd.DataFrame) -> pd.Series:
    """When each step ended, by step."""
    ends = trace.align(rows["begin_ns"].to_numpy()) + (rows["took_s"] * 1e9).astype("int64")
    found = pd.Series(ends.to_numpy(), index=rows["step"].to_numpy(), dtype=object)
    return found[~found.index.duplicated(keep="last")]
