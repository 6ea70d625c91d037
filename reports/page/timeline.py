"""Encode events of the available steps for the page's timeline: lanes of ranks, packed columns.

```
lane (rank)   track 0   actions of the schedule, each a wait and work
              track 1   what ran beside them: sends, all-reduces, optimizer, checkpoints, data
```

Sorted by lane, track and begin, an event is a gap since the one before, a wait, a work, a label
(what it is) and a micro-batch. Times are ticks, of which a step is never more than MOST_TICKS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.records.logs.trace import COMPUTE
from vjob.reports.analysis.measures import Analysis, list_ranks
from vjob.reports.load.tables import Job
from vjob.reports.page.html import list_planes, pack_bytes

MOST_TICKS = 1 << 22
"""Ticks of the longest step: a pixel of it is thousands, so zooming in shows no rounding."""


@dataclass(frozen=True, kw_only=True)
class HeldStep:
    """A step that the page's timeline can draw."""

    facts: dict[str, Any]
    """Values that reports/web/steps.js needs to unpack `packed`, and values for the selector."""
    packed: str


def build_lanes(job: Job, analysis: Analysis) -> dict[str, list[dict[str, Any]]]:
    """Return each attempt's ranks by stage, replica and rank, ranks without events last."""
    columns = ["attempt", "rank", "stage", "replica", "host"]
    ranks = list_ranks(job).drop_duplicates(["attempt", "rank"], keep="last")[columns]
    # Events of a log have no header that would say so much.
    of_events = job.events.groupby(["attempt", "rank"], as_index=False)[["stage", "replica"]].min()
    both = [frame for frame in (ranks, of_events.assign(host="")) if len(frame)]
    if not both:
        return {}
    ranks = pd.concat(both, ignore_index=True).drop_duplicates(["attempt", "rank"])
    ranks = ranks.sort_values(["stage", "replica", "rank"])
    lanes = {
        str(attempt): own[columns[1:]].to_dict("records")
        for attempt, own in ranks.groupby("attempt", sort=False)
    }
    silent = [
        {"rank": rank, "stage": -1, "replica": -1, "host": ""} for rank in analysis.missing_ranks
    ]
    return {attempt: own + silent for attempt, own in lanes.items()}


def build_steps(job: Job, lanes: dict[str, list[dict[str, Any]]]) -> list[HeldStep]:
    """Pack all steps whose events were read, in order."""
    order = {attempt.label: at for at, attempt in enumerate(job.sources.attempts)}
    grouped = job.events.groupby(["attempt", "step"], sort=False)
    keys = sorted(grouped.groups, key=lambda key: (order.get(str(key[0]), 0), int(key[1])))
    return [_pack_step(grouped.get_group(key), lanes[str(key[0])]) for key in keys]


def _pack_step(events: pd.DataFrame, lanes: list[dict[str, Any]]) -> HeldStep:
    index = {lane["rank"]: at for at, lane in enumerate(lanes)}
    track = (~events["kind"].isin(COMPUTE)).astype(int).to_numpy()
    slot = 2 * events["rank"].map(index).to_numpy() + track
    begin = events["begin_s"].to_numpy(dtype=float)
    rows = np.lexsort((begin, slot))
    slot, events = slot[rows], events.iloc[rows]
    first_s, tick_s = float(begin.min()), _choose_tick(events)

    def count_ticks(name: str) -> Any:
        return np.rint((events[name].to_numpy(dtype=float) - first_s) / tick_s).astype(np.int64)

    start, ready, end = (count_ticks(name) for name in ("begin_s", "ready_s", "end_s"))
    ready = np.maximum(ready, start)
    end = np.maximum(end, ready)
    before = np.concatenate([[0], end[:-1]])
    before[np.concatenate([[True], np.diff(slot) != 0])] = 0
    labels, names = _find_labels(events)
    counts = np.bincount(slot, minlength=2 * len(lanes))
    columns = (start - before, ready - start, end - ready, labels, events["microbatch"].to_numpy())
    facts = {
        "attempt": str(events["attempt"].iloc[0]),
        "step": int(events["step"].iloc[0]),
        "events": len(events),
        "ticks": int(end.max()),
        "tick_s": tick_s,
        "labels": names,
    }
    packed = pack_bytes(list_planes(counts) + b"".join(map(list_planes, columns)))
    return HeldStep(facts=facts, packed=packed)


def _choose_tick(events: pd.DataFrame) -> float:
    """Return the length of a tick: a power of ten nanoseconds."""
    span = float(events["end_s"].max() - events["begin_s"].min())
    tick_s = 1e-9
    while span / tick_s > MOST_TICKS:
        tick_s *= 10
    return tick_s


def _find_labels(events: pd.DataFrame) -> tuple[Any, list[list[Any]]]:
    """Return a label for each event, and each label's meaning: kind, stage, bytes, what."""
    keys = ["kind", "stage", "bytes", "what"]
    groups = events.groupby(keys, sort=False)
    names = [
        [str(kind), int(stage), int(size), str(what)] for kind, stage, size, what in groups.groups
    ]
    return groups.ngroup().to_numpy(), names
