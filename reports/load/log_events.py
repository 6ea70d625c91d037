"""Megatron's timers as events, where a log lists when each call began and ended.

Such a list holds the calls of all iterations since the log's line before; they are told apart by
the number of micro-batches. Stages follow from Megatron's order of ranks: tensor, data, pipeline. A
call that receives is a wait of the action after it, as in our own trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

ACTIONS = {"forward-compute": "F", "backward-compute": "B"}
AROUND = ("forward-backward", "interval-time")
"""Timers around all others."""


def build_log_events(calls: pd.DataFrame, info: Mapping[str, str]) -> pd.DataFrame | None:
    """As of read_events, of attempt ""; None where the calls hold no forwards."""
    calls = calls[~calls["timer"].isin(AROUND)]
    if not (calls["timer"] == "forward-compute").any():
        return None
    if (calls["timer"] == "optimizer").any():  # its parts lie within it
        calls = calls[~calls["timer"].str.startswith("optimizer-")]
    calls = calls.drop_duplicates(["step", "timer", "rank", "begin"])
    sizes = _Sizes(info, int(calls["rank"].max()) + 1)
    rows = [
        row
        for (step, rank), own in calls.groupby(["step", "rank"])
        for row in _list_rows(own.sort_values("begin"), int(step), int(rank), sizes)
    ]
    events = pd.DataFrame(rows)
    zero = events["begin_s"].min()
    for name in ("begin_s", "ready_s", "end_s"):
        events[name] -= zero
    return events.assign(attempt="", bytes=0)


class _Sizes:
    """What the job's settings say of its layout; where they say nothing, all is one stage."""

    def __init__(self, info: Mapping[str, str], num_ranks: int) -> None:
        def read(name: str, other: int) -> int:
            text = info.get(name, "")
            return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else other

        self.tensor = read("TENSOR_MP_SIZE", 1)
        world = max(read("WORLD_SIZE", num_ranks), num_ranks)
        self.ranks_per_stage = max(1, world // read("PIPELINE_MP_SIZE", 1))
        replicas = max(1, self.ranks_per_stage // self.tensor)
        samples = read("MICRO_BATCH_SIZE", 1) * replicas
        self.microbatches = read("GLOBAL_BATCH_SIZE", 0) // samples

    def find_stage(self, rank: int) -> int:
        return rank // self.ranks_per_stage

    def find_replica(self, rank: int) -> int:
        return rank % self.ranks_per_stage // self.tensor


def _list_rows(
    calls: pd.DataFrame, last: int, rank: int, sizes: _Sizes
) -> Iterator[dict[str, Any]]:
    """The calls of one rank in one list, the last of which are of step `last`."""
    forwards = calls[calls["timer"] == "forward-compute"]["begin"].to_numpy()
    each = sizes.microbatches or len(forwards) or 1
    if len(forwards) % each:
        each = len(forwards)
    first = last + 1 - max(1, len(forwards) // each)
    starts = forwards[each::each]  # of every iteration but the first
    counts: dict[tuple[int, str], int] = {}
    waits: list[tuple[float, float, str]] = []
    place = {"rank": rank, "replica": sizes.find_replica(rank), "stage": sizes.find_stage(rank)}
    for timer, begin, end in calls[["timer", "begin", "end"]].itertuples(index=False):
        if timer not in ACTIONS and "recv" in timer:
            waits.append((begin, end, timer))
            continue
        step = first + int(np.searchsorted(starts, begin, side="right"))
        row = {**place, "step": step, "ready_s": begin, "end_s": max(begin, end)}
        if timer in ACTIONS:
            kind = ACTIONS[timer]
            number = counts.setdefault((step, kind), 0)
            counts[step, kind] += 1
            since = min((wait[0] for wait in waits), default=begin)
            yield {**row, "kind": kind, "microbatch": number, "begin_s": since, "what": ""}
            waits = []
        else:
            kind, what = _find_kind(timer), timer
            yield {**row, "kind": kind, "microbatch": -1, "begin_s": begin, "what": what}
    for begin, end, timer in waits:
        row = {**place, "step": last, "kind": "send", "microbatch": -1, "what": timer}
        yield {**row, "begin_s": begin, "ready_s": begin, "end_s": max(begin, end)}


def _find_kind(timer: str) -> str:
    """Of the trace's kinds the one that a timer is."""
    marks = (
        ("send", "send"),
        ("all-reduce", "all-reduce"),
        ("reduce-scatter", "all-reduce"),
        ("all-gather", "all-reduce"),
        ("optimizer", "optimizer"),
        ("checkpoint", "checkpoint"),
        ("batch-generator", "data"),
    )
    return next((kind for mark, kind in marks if mark in timer), "other")
