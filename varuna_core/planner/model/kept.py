"""Which micro-batches a stage recomputes with `recompute: auto`, for each run of segments.

The runtime keeps what fits (varuna_core/schedule/recompute.py), so this depends on what a run's
graphs hold, and on the room that is left. Many runs have the same answer: it is asked once for each
way in which graphs and inputs fit beside one another.

```
room for     4 graphs and 0 inputs, 3 and 1, 2 and 4, ..   ─► F0 F1 F2 f3 B0 F4 B1 f5 ..
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from varuna_core.schedule.actions import Action, Schedule, ScheduleError
from varuna_core.schedule.recompute import Memory, apply_recompute

Array = Any
Known = dict[Any, "frozenset[int] | None"]
"""By forwards ahead, micro-batches and what fits: those that are recomputed; None if not even that
fits."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Arrays are by begin and end."""

    room: Array
    """Bytes for micro-batches."""
    fits: Array
    counts: Array
    """Micro-batches that are recomputed."""
    patterns: Array
    """In rows those that are: True."""
    which: Array
    """The row of a run."""


def find_kept(
    ahead: int, num_microbatches: int, graph: Array, inputs: Array, room: Array, known: Known
) -> Kept:
    """Of a stage that runs so many forwards before its first backward, then one of each in turn."""
    m = num_microbatches
    most = np.arange(ahead + 1)[None, None, :] * inputs[:, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        beside = np.floor((room[:, :, None] - most) / graph[:, :, None])
    beside = np.where(graph[:, :, None] > 0, beside, np.where(room[:, :, None] >= most, ahead, -1))
    beside = np.clip(beside, -1, ahead).astype(int)
    rows, which = np.unique(beside.reshape(-1, ahead + 1), axis=0, return_inverse=True)
    which = which.reshape(room.shape)
    patterns = np.zeros((len(rows), m), dtype=bool)
    fits = np.zeros(len(rows), dtype=bool)
    first = np.zeros(len(rows), dtype=int)
    first[which.ravel()[::-1]] = np.arange(which.size)[::-1]
    for row, key in enumerate(map(tuple, rows.tolist())):
        full = ahead, m, key
        if full not in known:
            a, e = np.unravel_index(first[row], room.shape)
            known[full] = _choose(ahead, m, float(graph[a, e]), float(inputs[a]), float(room[a, e]))
        chosen = known[full]
        if chosen is not None:
            fits[row] = True
            patterns[row, list(chosen)] = True
    return Kept(
        room=room,
        fits=fits[which],
        counts=patterns.sum(axis=1)[which],
        patterns=patterns,
        which=which,
    )


def _choose(ahead: int, m: int, graph: float, inputs: float, room: float) -> frozenset[int] | None:
    """As the runtime rewrites such a stage's list."""
    actions = [Action("F", 0, number) for number in range(ahead)]
    for number in range(m):
        actions.append(Action("B", 0, number))
        if number + ahead < m:
            actions.append(Action("F", 0, number + ahead))
    plain = Schedule(name="", ranks=(tuple(actions),), placement=(0,), num_microbatches=m)
    memory = Memory(graphs=(graph,), inputs=(inputs,), limits=(room,))
    try:
        (rewritten,) = apply_recompute(plain, "auto", memory).ranks
    except ScheduleError:
        return None
    return frozenset(action.microbatch for action in rewritten if action.kind == "R")
