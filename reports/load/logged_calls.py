"""Convert calls of Megatron's timers to traces: the original Varuna's logs list the begin and end
of each call on each rank, so a report can show what it shows for a trace.

    blocks     each line about steps has the calls since the one before. A block in which a rank
               lacks calls, or a timer that it had in an earlier block, is left out, and said
    layout     stage, replica and micro-batch of a call by the job's settings; without micro-batches
               where these do not explain the number of calls
    clocks     times are those of the nodes' clocks. A message comes after it was sent, and no sum
               ends before all have joined, so differences of clocks have bounds:

                   stage 0 |  F0 ends 5.00 ─┐                 ┌─► B0 begins 5.75
                   stage 1 |                └─► F0 begins 4.70 ─ B0 ends 5.41
                               its clock is behind, by 0.30 s at least and 0.34 s at most

               If no clocks that agree explain a block's calls, its times are put right by the
               middle of the bounds. If no clocks do at all, nothing is said across nodes
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from varuna_core.records.files import as_whole
from varuna_core.records.logs.trace import COMPUTE
from vjob.reports.load.trace_file import RankTrace
from vjob.reports.load.trace_lines import Column
from vjob.reports.load.trace_reader import STEP_COLUMNS, ClockConflict, LeftOut, Traces

ACTIONS = {"forward-compute": "F", "backward-compute": "B"}
AROUND = ("forward-backward", "interval-time")
"""Timers that contain all others."""
SUMS = ("grads-all-reduce", "grads-reduce-scatter", "all-grads-sync")
"""Timers of an all-reduce over the ranks of a stage, which runs once a step."""
TIMES = ("begin_s", "ready_s", "end_s")
MOST_CLOCKS = 512
"""The most clocks that are compared with each other."""
LEAST_S = 0.001
"""A smaller difference between clocks is not reported."""


class Layout:
    """The ranks of each stage, from the sizes that Megatron prints at its start.

    Without these sizes, all ranks are in one stage.
    """

    def __init__(self, info: Mapping[str, str], num_ranks: int) -> None:
        self.tensor = read_size(info, "TENSOR_MP_SIZE") or 1
        self.world = max(read_size(info, "WORLD_SIZE") or 0, num_ranks)
        self.stages = read_size(info, "PIPELINE_MP_SIZE") or 1
        self.are_replicas_together = info.get("ORDER") == "pipeline"
        self.ranks_per_stage = max(1, self.world // self.stages)
        replicas = max(1, self.ranks_per_stage // self.tensor)
        samples = (read_size(info, "MICRO_BATCH_SIZE") or 1) * replicas
        self.microbatches = (read_size(info, "GLOBAL_BATCH_SIZE") or 0) // samples

    def compute_stage(self, rank: int) -> int:
        if self.are_replicas_together:
            return rank // self.tensor % self.stages
        return rank // self.ranks_per_stage

    def compute_replica(self, rank: int) -> int:
        if self.are_replicas_together:
            return rank // (self.tensor * self.stages)
        return rank % self.ranks_per_stage // self.tensor


def read_size(info: Mapping[str, str], name: str) -> int | None:
    """Return a setting as a positive number; None if it is not one."""
    text = info.get(name, "")
    return as_whole(text) or None


@dataclass(frozen=True, kw_only=True)
class Places:
    """The node, device and logs of each rank, as far as known."""

    hosts: Mapping[int, str]
    """The node of each rank."""
    devices: Mapping[int, str]
    """The kind of GPU of each rank."""
    logs: Mapping[tuple[str, str], Path]
    """The log of each (attempt, node)."""


def read_calls(
    logs: Mapping[str, pd.DataFrame], info: Mapping[str, str], places: Places
) -> tuple[Traces, pd.DataFrame] | None:
    """Return the traces of logged calls and their events; None if no timer shows the work of ranks.

    `info` has the job's settings as its log spells them, with ORDER for the numbering of ranks:
    data (ranks of a stage are neighbours) or pipeline (ranks of a replica are).
    """
    calls, works = _choose_calls(logs["timer_calls"]), logs["rank_works"]
    if calls.empty and works.empty:
        return None
    most = max(int(table["rank"].max()) for table in (calls, works) if len(table))
    layout = Layout(info, most + 1)
    found, left_out, conflicts = [], [], []
    clocks: dict[tuple[str, int], Clock] = {}
    usual = int(calls["num_steps"].max()) if len(calls) else 0
    timed: dict[str, set[tuple[int, str]]] = {}
    for (attempt, node, step), own in calls.groupby(["attempt", "node", "step"]):
        usually = timed.setdefault(str(attempt), set())
        block = Block(own, int(step), int(own["num_steps"].iloc[0]) or usual, layout, usually)
        usually |= block.timed
        if not block.is_whole:
            log = places.logs.get((str(attempt), str(node)), Path(str(node)))
            left_out.append(
                LeftOut(
                    attempt=str(attempt), file=log.name, first=block.first, last=int(step),
                    num_whole=block.num_whole, num_ranks=layout.world,
                )
            )  # fmt: skip
            continue
        events = block.build_events().assign(attempt=str(attempt))
        compared = compare_clocks(events, layout, places.hosts)
        if isinstance(compared, float):
            conflicts.append(
                ClockConflict(
                    attempt=str(attempt), first=block.first, last=int(step), seconds=compared
                )
            )
            events["is_torn"] = True
        else:
            for rank, clock in compared.items():
                held = clocks.setdefault((str(attempt), rank), clock)
                if abs(clock.ahead_s) > abs(held.ahead_s):
                    clocks[str(attempt), rank] = clock
            ahead_s = events["rank"].map({rank: clock.ahead_s for rank, clock in compared.items()})
            for name in TIMES:
                events[name] -= ahead_s
        found.append(events)
    events = pd.concat(found, ignore_index=True) if found else pd.DataFrame()
    zero = float(events["begin_s"].min()) if found else 0.0
    for name in TIMES if found else ():
        events[name] -= zero
    steps = sum_up(events) if found else pd.DataFrame(columns=STEP_COLUMNS)
    told = {(one.attempt, one.last) for one in left_out}
    told |= set(zip(steps["attempt"], steps["step"], strict=True)) if found else set()
    is_new = [key not in told for key in zip(works["attempt"], works["step"], strict=True)]
    works = works[np.array(is_new, dtype=bool)]
    works = works.assign(stage=works["rank"].map(layout.compute_stage))
    seen = [table[["attempt", "rank"]] for table in (steps, works) if len(table)]
    ranks = pd.concat(seen).drop_duplicates().sort_values(["attempt", "rank"]) if seen else None
    traces = Traces(
        ranks=[
            _build_rank(str(attempt), int(rank), layout, places, clocks)
            for attempt, rank in (() if ranks is None else ranks.itertuples(index=False))
        ],
        steps=steps,
        works=works,
        zero_ns=round(zero * 1e9),
        is_log=True,
        left_out=tuple(left_out),
        conflicts=tuple(conflicts),
    )
    return traces, events.drop(columns="is_torn") if found else events


def _choose_calls(calls: pd.DataFrame) -> pd.DataFrame:
    """Return the calls that are not nested in others; none if no forward is among them."""
    calls = calls[~calls["timer"].isin(AROUND)]
    if not (calls["timer"] == "forward-compute").any():
        return calls.iloc[:0]
    if (calls["timer"] == "optimizer").any():  # its parts lie within it
        calls = calls[~calls["timer"].str.startswith("optimizer-")]
    return calls.drop_duplicates(["attempt", "step", "timer", "rank", "begin"])


class Block:
    """The calls of all ranks in the steps up to and including step `last`."""

    def __init__(
        self,
        calls: pd.DataFrame,
        last: int,
        num_steps: int,
        layout: Layout,
        usual: Collection[tuple[int, str]] = (),
    ) -> None:
        """`num_steps` counts the steps since the previous line; 0 means not known. `usual` has each
        rank's timers in earlier blocks: a cut log lacks the timers printed last."""
        self._calls, self._layout = calls, layout
        pairs = calls[["rank", "timer"]].drop_duplicates().itertuples(index=False)
        self.timed = {(int(rank), timer) for rank, timer in pairs if _is_in_each_step(timer)}
        counts = calls.groupby(["rank", "timer"]).size().unstack(fill_value=0)
        counts = counts.reindex(columns=list(ACTIONS), fill_value=0)
        most = int(counts["forward-compute"].max())
        torn = {rank for rank, _ in set(usual) - self.timed}
        whole = counts[(counts == most).all(axis=1) & ~counts.index.isin(torn)]
        self.num_whole = len(whole) if most else 0
        by_settings = most // layout.microbatches if layout.microbatches else 0
        self._num_steps = min(num_steps, last) or by_settings or 1
        self.first = last + 1 - self._num_steps
        self._each = most // self._num_steps
        self.is_whole = self.num_whole == layout.world and most % self._num_steps == 0
        self._has_microbatches = layout.microbatches in (0, self._each)
        """False for stages in several pieces, whose calls cannot be told apart."""

    def build_events(self) -> pd.DataFrame:
        """Return the events, with the columns of read_events except the attempt."""
        rows = [
            row
            for rank, own in self._calls.groupby("rank")
            for row in self._list_rows(own.sort_values(["begin", "end"]), int(rank))
        ]
        return pd.DataFrame(rows).assign(bytes=0, is_torn=False)

    def _list_rows(self, calls: pd.DataFrame, rank: int) -> Iterator[dict[str, Any]]:
        forwards = calls[calls["timer"] == "forward-compute"]["begin"].to_numpy()
        starts = forwards[self._each :: self._each]  # of every step but the first
        last = self.first + self._num_steps - 1
        counts: dict[tuple[int, str], int] = {}
        waits: list[tuple[float, float, str]] = []
        free = -np.inf
        """The time at which the previous action ended."""
        layout = self._layout
        place = {"rank": rank, "replica": layout.compute_replica(rank)}
        place["stage"] = layout.compute_stage(rank)
        begins = calls["begin"].to_numpy()
        steps = self.first + np.searchsorted(starts, begins, side="right")
        columns = (calls["timer"].tolist(), begins.tolist(), calls["end"].tolist(), steps.tolist())
        for timer, begin, end, step in zip(*columns, strict=True):
            if timer not in ACTIONS and "recv" in timer:
                waits.append((begin, end, timer))
                continue
            row = {**place, "step": step, "ready_s": begin, "end_s": max(begin, end)}
            if timer in ACTIONS:
                kind = ACTIONS[timer]
                number = counts.setdefault((step, kind), 0)
                counts[step, kind] += 1
                number = number if self._has_microbatches else -1
                since = max(free, min((wait[0] for wait in waits), default=begin))
                since, free = min(since, begin), max(begin, end)
                yield {**row, "kind": kind, "microbatch": number, "begin_s": since, "what": ""}
                waits = []
            else:
                kind = _match_kind(timer)
                yield {**row, "kind": kind, "microbatch": -1, "begin_s": begin, "what": timer}
        for begin, end, timer in waits:
            row = {**place, "step": last, "kind": "send", "microbatch": -1, "what": timer}
            yield {**row, "begin_s": begin, "ready_s": begin, "end_s": max(begin, end)}


def _is_in_each_step(timer: str) -> bool:
    return timer in (*ACTIONS, *SUMS, "optimizer") or "recv" in timer or "send" in timer


def _match_kind(timer: str) -> str:
    """Return the kind of trace action that a timer stands for."""
    marks = (
        ("send", "send"),
        ("all-reduce", "all-reduce"),
        ("reduce-scatter", "all-reduce"),
        ("all-gather", "all-reduce"),
        ("all-grads-sync", "all-reduce"),
        ("optimizer", "optimizer"),
        ("checkpoint", "checkpoint"),
        ("batch-generator", "data"),
    )
    return next((kind for mark, kind in marks if mark in timer), "other")


def sum_up(events: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each rank and step, as traces have. If clocks contradict each other, the
    times of the first and the last action are missing."""
    keys = ["attempt", "rank", "stage", "replica", "step"]
    took = events["end_s"] - events["ready_s"]
    is_work = events["kind"].isin(COMPUTE)
    table = events.assign(
        took_s=took,
        work_s=took.where(is_work, 0.0),
        wait_s=(events["ready_s"] - events["begin_s"]).where(is_work, 0.0),
        first_s=events["begin_s"].where(is_work & ~events["is_torn"]),
        last_s=events["end_s"].where(is_work & ~events["is_torn"]),
    )
    steps = table.groupby(keys).agg(
        begin_s=("begin_s", "min"), end_s=("end_s", "max"), first_s=("first_s", "min"),
        last_s=("last_s", "max"), wait_s=("wait_s", "sum"), work_s=("work_s", "sum"),
    )  # fmt: skip
    steps.insert(1, "took_s", steps.pop("end_s") - steps["begin_s"])
    kinds = table.pivot_table("took_s", keys, "kind", "sum", fill_value=0.0)
    return steps.join(kinds.add_suffix("_s")).reset_index()


def _build_rank(
    attempt: str,
    rank: int,
    layout: Layout,
    places: Places,
    clocks: Mapping[tuple[str, int], Clock],
) -> RankTrace:
    logs = [path for (label, _), path in places.logs.items() if label == attempt]
    clock = clocks.get((attempt, rank))
    found = RankTrace(
        path=logs[-1] if logs else Path(),
        attempt=attempt,
        rank=rank,
        stages=(layout.compute_stage(rank),),
        replica=layout.compute_replica(rank),
        host=places.hosts.get(rank, ""),
        device=places.devices.get(rank, ""),
        has_header=True,
    )
    if clock is not None and clock.within_s is not None:
        found.offsets.append((0, 0, round(clock.within_s * 1e9)))
    if clock is not None and clock.is_wrong:
        found.shifted_ns = -round(clock.ahead_s * 1e9)
    return found


# Clocks.


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The offset of a rank's clock from that of most ranks."""

    ahead_s: float
    """Seconds ahead; 0 if the calls do not prove that clocks differ."""
    within_s: float | None
    """The largest possible error of `ahead_s`; None if not known."""

    @property
    def is_wrong(self) -> bool:
        return self.within_s is not None and abs(self.ahead_s) > max(LEAST_S, self.within_s)


def compare_clocks(
    events: pd.DataFrame, layout: Layout, hosts: Mapping[int, str]
) -> dict[int, Clock] | float:
    """Return the clock of each rank in one block, equal for ranks of a node; or the seconds by
    which the calls contradict any constant difference of clocks."""
    ranks = sorted(map(int, events["rank"].unique()))
    names = {rank: hosts.get(rank) or str(rank) for rank in ranks}
    nodes = list(dict.fromkeys(names.values()))
    index = {name: at for at, name in enumerate(nodes)}
    unknown = Clock(ahead_s=0.0, within_s=None)
    if len(nodes) == 1 or len(nodes) > MOST_CLOCKS:
        return dict.fromkeys(ranks, unknown)
    own = events.assign(clock=events["rank"].map(names).map(index))
    least = np.full((len(nodes), len(nodes)), np.inf)
    np.fill_diagonal(least, 0.0)
    for earlier, later, seconds in (*_list_messages(own), *_list_sums(own, layout)):
        np.minimum.at(least, (earlier, later), seconds)
    for middle in range(len(nodes)):  # what follows from two bounds
        least = np.minimum(least, least[:, middle, None] + least[None, middle, :])
        contradiction = -float(least.diagonal().min())
        if contradiction > LEAST_S:  # of one circle of bounds: further ones would add to it
            return contradiction
    high, low = least[0], -least[:, 0]
    is_bounded = np.isfinite(high) & np.isfinite(low)
    is_proven = bool((least < -LEAST_S).any())
    if not is_proven:
        ahead, within = np.zeros(len(nodes)), np.maximum(np.abs(high), np.abs(low))
    elif not is_bounded.all():
        return -float(least.min())  # one of them is wrong, and nothing says by how much at most
    else:
        ahead, within = (high + low) / 2, (high - low) / 2
        ahead = ahead - np.median(ahead)
    clocks = [
        Clock(ahead_s=float(own), within_s=float(doubt) if is_known else None)
        for own, doubt, is_known in zip(ahead, within, is_bounded, strict=True)
    ]
    return {rank: clocks[index[names[rank]]] for rank in ranks}


_Bounds = tuple[Column, Column, Column]
"""Pairs of clocks, and the greatest number of seconds by which the second clock of each pair may be
ahead of the first."""


def _list_messages(events: pd.DataFrame) -> Iterator[_Bounds]:
    """Yield clock bounds from messages: an action begins after its message was sent."""
    keys = ["step", "replica", "microbatch", "stage"]
    for kind, towards in (("F", 1), ("B", -1)):
        own = events[(events["kind"] == kind) & (events["microbatch"] >= 0)]
        sent = own.assign(stage=own["stage"] + towards)[[*keys, "clock", "end_s"]]
        both = sent.merge(own[[*keys, "clock", "ready_s"]], on=keys, suffixes=("", "_to"))
        yield _as_bounds(both["clock"], both["clock_to"], both["ready_s"] - both["end_s"])


def _list_sums(events: pd.DataFrame, layout: Layout) -> Iterator[_Bounds]:
    """Yield clock bounds from all-reduces run once a step: none ends before all ranks joined."""
    own = events[events["what"].isin(SUMS)]
    own = own.assign(part=own["rank"] % layout.tensor)
    keys = ["step", "what", "stage", "part"]
    own = own[~own.duplicated([*keys, "rank"], keep=False)]
    own = own.groupby([*keys, "clock"], as_index=False).agg({"begin_s": "max", "end_s": "min"})
    both = own[[*keys, "clock", "begin_s"]].merge(
        own[[*keys, "clock", "end_s"]], on=keys, suffixes=("", "_to")
    )
    yield _as_bounds(both["clock"], both["clock_to"], both["end_s"] - both["begin_s"])


def _as_bounds(
    earlier: pd.Series[int], later: pd.Series[int], seconds: pd.Series[float]
) -> _Bounds:
    is_pair = (earlier != later).to_numpy()
    found: tuple[npt.NDArray[Any], ...] = tuple(
        column.to_numpy()[is_pair] for column in (earlier, later, seconds)
    )
    return found[0].astype(int), found[1].astype(int), found[2].astype(float)
