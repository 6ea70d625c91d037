"""Compute which micro-batches a stage recomputes with `recompute: auto`, for each run of segments.

The runtime keeps as many graphs as fit (varuna_core/schedule/recompute.py), so the answer depends
on the size of a run's graphs and on the free memory. It is computed once for each way in which
graphs and inputs fit side by side, since many runs share it.

```
room for     4 graphs and 0 inputs, 3 and 1, 2 and 4, ..   ─► F0 F1 F2 f3 B0 F4 B1 f5 ..
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from varuna_core.planner.model.schedule_model import make_alone
from varuna_core.schedule.actions import ScheduleError
from varuna_core.schedule.recompute import Memory, apply_recompute

Array = Any
Known = dict[Any, "frozenset[int] | None"]
"""Micro-batches that are recomputed, keyed by forwards ahead, number of micro-batches and room in
memory; None if even a recompute of all does not fit."""


@dataclass(frozen=True, kw_only=True)
class KeptGraphs:
    """Micro-batches that a stage recomputes, by begin and end of a run of consecutive segments."""

    room: Array
    """Bytes available for micro-batches."""
    fits: Array
    counts: Array
    """Number of recomputed micro-batches."""
    patterns: Array
    """Distinct choices as rows of a mask, True for a recomputed micro-batch."""
    which: Array
    """For each run, the row of `patterns` that applies."""


def choose_kept(
    ahead: int, num_microbatches: int, graph: Array, inputs: Array, room: Array, known: Known
) -> KeptGraphs:
    """Choose the graphs to keep on a stage that runs `ahead` forwards, then backwards in turn."""
    m = num_microbatches
    begins = np.broadcast_to(inputs[:, None], room.shape)
    is_kept = ahead * graph <= room
    least = np.maximum(graph + (ahead - 1) * begins, ahead * begins)
    cells = np.nonzero(~is_kept & (least <= room))
    # Of a cell, how many graphs fit beside 0, 1, .. inputs: alike cells keep alike.
    graphs, rooms = graph[cells][:, None], room[cells][:, None]
    most = np.arange(ahead + 1)[None, :] * begins[cells][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        beside = np.floor((rooms - most) / graphs)
    beside = np.where(graphs > 0, beside, np.where(rooms >= most, ahead, -1))
    keys = np.clip(beside, -1, ahead).astype(np.int32)
    packed = keys.view(f"V{keys.itemsize * (ahead + 1)}").ravel()  # sorted faster than rows
    _, first, same = np.unique(packed, return_index=True, return_inverse=True)
    patterns = np.zeros((2 + len(first), m), dtype=bool)
    fits = np.zeros(len(patterns), dtype=bool)
    fits[0] = True  # all is kept; in row 1 nothing fits
    for row, place in enumerate(first.tolist(), 2):
        full = ahead, m, tuple(keys[place].tolist())
        if full not in known:
            a, e = cells[0][place], cells[1][place]
            known[full] = _choose(ahead, m, float(graph[a, e]), float(inputs[a]), float(room[a, e]))
        chosen = known[full]
        if chosen is not None:
            fits[row] = True
            patterns[row, list(chosen)] = True
    which = np.where(is_kept, 0, 1)
    which[cells] = 2 + same
    return KeptGraphs(
        room=room,
        fits=fits[which],
        counts=patterns.sum(axis=1)[which],
        patterns=patterns,
        which=which,
    )


def _choose(ahead: int, m: int, graph: float, inputs: float, room: float) -> frozenset[int] | None:
    """Return the micro-batches that a stage recomputes, chosen as the runtime does for `recompute:
    auto`; None if the memory `room` does not suffice."""
    memory = Memory(graphs=(graph,), inputs=(inputs,), limits=(room,))
    try:
        (rewritten,) = apply_recompute(make_alone(ahead, m), "auto", memory).ranks
    except ScheduleError:
        return None
    return frozenset(action.microbatch for action in rewritten if action.kind == "R")
