"""Measure idle time in a step: bubbles against their ideal, and communication not hidden by
work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from varuna_core.records.logs.trace import COMMUNICATION, COMPUTE
from varuna_core.schedule.actions import Kind, ScheduleError
from varuna_core.schedule.order import find_source, find_target, walk
from vjob.reports.analysis.pipeline import Order, Pipeline, list_waits
from vjob.reports.load.trace_lines import Column

_KINDS: dict[Kind, int] = {"F": 0, "f": 0, "R": 1, "B": 2, "I": 3, "W": 4, "O": 5, "L": 6}
"""Cost class of each kind of action: all forwards cost the same, whatever activations they keep."""


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """Idle fractions of the ranks' time in one step of one pipeline."""

    measured: float
    ideal: float
    """Idle fraction of the same order with the measured stage times and free messages."""
    ideal_even: float
    """Idle fraction of the same order with equal work on every stage."""
    makespan_s: float
    ideal_s: float
    ideal_even_s: float


def compare_bubbles(pipelines: list[Pipeline]) -> list[Bubbles | str]:
    """Compare each step with its ideals, or return the reason why that is not possible."""
    orders: dict[int, list[int]] = {}
    for at, pipeline in enumerate(pipelines):
        orders.setdefault(id(pipeline.order), []).append(at)
    found: dict[int, Bubbles | str] = {}
    for places in orders.values():
        alike = [pipelines[at] for at in places]
        found.update(zip(places, _compare_alike(alike), strict=True))
    return [found[at] for at in range(len(pipelines))]


def _compare_alike(pipelines: list[Pipeline]) -> list[Bubbles | str]:
    """Compare pipelines that ran the same order."""
    order = pipelines[0].order
    costs = measure_costs(order, pipelines)
    stages = costs.shape[1]
    even = np.zeros_like(costs)
    for stage in range(stages):
        even += costs[:, stage : stage + 1]
    try:
        makespans, shares = simulate_free(order, np.concatenate([costs, even / stages], axis=2))
    except ScheduleError as error:
        return [f"the events are no whole step: {error}"] * len(pipelines)
    count = len(pipelines)
    return [
        Bubbles(
            measured=pipeline.bubble_share,
            ideal=float(shares[at]),
            ideal_even=float(shares[count + at]),
            makespan_s=pipeline.makespan,
            ideal_s=float(makespans[at]),
            ideal_even_s=float(makespans[count + at]),
        )
        for at, pipeline in enumerate(pipelines)
    ]


def measure_costs(order: Order, pipelines: list[Pipeline]) -> Column:
    """Return the mean work of each kind of action by stage, indexed [kind, stage, pipeline]."""
    took = np.array([pipeline.end_s - pipeline.ready_s for pipeline in pipelines])
    took = np.where(took > 0, took, 0.0).T
    totals = np.zeros((len(set(_KINDS.values())), order.schedule.num_stages, len(pipelines)))
    counts = np.zeros(totals.shape[:2])
    for action, seconds in zip(order.actions, took, strict=True):
        place = _KINDS[action.kind], action.stage
        totals[place] += seconds
        counts[place] += 1
    means: Column = totals / np.maximum(counts, 1)[:, :, None]
    return means


def simulate_free(order: Order, costs: Column) -> tuple[Column, Column]:
    """Return the makespan and the idle fraction for each column of costs, as `simulate` does for
    messages that take no time. Raise ScheduleError if the ranks get stuck."""
    schedule = order.schedule
    free = np.zeros((schedule.num_ranks, costs.shape[2]))
    busy = np.zeros_like(free)
    arrivals: dict[tuple[bool, int, int], Column] = {}
    for rank, action in walk(schedule):
        start = free[rank]
        taken = find_source(action, schedule.num_stages)
        if taken is not None:
            start = np.maximum(start, arrivals.pop((taken[0], action.stage, action.microbatch)))
        cost = costs[_KINDS[action.kind], action.stage]
        end = start + cost
        free[rank] = end
        busy[rank] += cost
        made = find_target(action, schedule.num_stages)
        if made is not None:
            arrivals[made[0], made[1], action.microbatch] = end
    makespans = free.max(axis=0)
    idle = np.zeros_like(makespans)
    for own in busy:
        idle += makespans - own
    of_all = makespans * len(busy)
    return makespans, np.divide(idle, of_all, out=np.zeros_like(idle), where=of_all > 0)


def measure_communication(events: pd.DataFrame, pipelines: list[Pipeline]) -> pd.DataFrame:
    """Return a row for each rank: work_s; bubble_s, waits for messages that were not yet sent;
    exposed_s, waits for messages under way and communication that no work hid; overlapped_s, the
    other communication."""
    ordered = events.sort_values(["rank", "ready_s"], kind="stable")
    is_work = ordered["kind"].isin(COMPUTE).to_numpy()
    is_link = ordered["kind"].isin(COMMUNICATION).to_numpy()
    names = ("begin_s", "ready_s", "end_s")
    times = np.column_stack([ordered[name].to_numpy(dtype=float) for name in names])
    stages = ordered["stage"].to_numpy()
    of_rank = ordered["rank"].to_numpy()
    ranks, starts = np.unique(of_rank, return_index=True)
    most = np.maximum.reduceat(stages, starts) if len(ranks) else stages
    works, links = times[is_work], times[is_link]
    worked = works[:, 2] - works[:, 1]
    took = np.maximum(links[:, 2] - links[:, 0], 0)
    rows = []
    for rank, stage, work_of, links_of in zip(
        ranks.tolist(),
        most.tolist(),
        _cut_by_rank(ranks, of_rank[is_work]),
        _cut_by_rank(ranks, of_rank[is_link]),
        strict=True,
    ):
        hidden = _measure_overlap(works[work_of], links[links_of])
        rows.append(
            {
                "rank": int(rank),
                "stage": int(stage),
                "work_s": float(worked[work_of].sum()),
                "exposed_s": float(took[links_of].sum()) - hidden,
                "overlapped_s": hidden,
            }
        )
    table = pd.DataFrame(rows, columns=["rank", "stage", "work_s", "exposed_s", "overlapped_s"])
    waits = list_waits(pipelines)
    summed = waits.groupby("rank")[["bubble_s", "transfer_s"]].sum()
    table = table.join(summed, on="rank").fillna({"bubble_s": 0.0, "transfer_s": 0.0})
    table["exposed_s"] += table.pop("transfer_s")
    return table


def _cut_by_rank(ranks: npt.NDArray[Any], ordered: npt.NDArray[Any]) -> Iterator[slice]:
    """Yield the slice of rows that belongs to each rank."""
    starts = np.searchsorted(ordered, ranks).tolist()
    ends = np.searchsorted(ordered, ranks, side="right").tolist()
    return map(slice, starts, ends)


def _measure_overlap(work: npt.NDArray[Any], links: npt.NDArray[Any]) -> float:
    """Return the seconds of communication during which the rank also worked.

    Rows are begin, ready, end; those of `work` are sorted by ready. Parallel messages count once.
    """
    if not len(work) or not len(links):
        return 0.0
    begin, end = work[:, 1], work[:, 2]
    times = np.column_stack([begin, np.maximum(begin, end)]).ravel()
    times = np.maximum.accumulate(times)
    worked = np.concatenate(
        [[0.0], np.cumsum(np.diff(times) * (np.arange(len(times) - 1) % 2 == 0))]
    )
    until, since = (np.interp(links[:, at], times, worked) for at in (2, 0))
    return float(np.maximum(until - since, 0).sum())
