"""Idle parts of a step's pipelines, and what the same order would take if messages cost nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varuna_core.schedule.actions import Kind, ScheduleError
from varuna_core.schedule.order import find_source, find_target, walk
from vjob.reports.analysis.pipeline import Order, Pipeline
from vjob.reports.load.trace_lines import Column

_KINDS: dict[Kind, int] = {"F": 0, "f": 0, "R": 1, "B": 2, "I": 3, "W": 4}
"""Kinds of action by what they cost: a forward costs the same whatever it keeps."""


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """Idle parts of the ranks' time in one step of one pipeline."""

    measured: float
    ideal: float
    """The same order with these stage times, messages for nothing."""
    ideal_even: float
    """The same order with the same work on every stage."""
    makespan_s: float
    ideal_s: float
    ideal_even_s: float


def compare_bubbles(pipelines: list[Pipeline]) -> list[Bubbles | str]:
    """Each step against its ideals, or why that cannot be said."""
    orders: dict[int, list[int]] = {}
    for at, pipeline in enumerate(pipelines):
        orders.setdefault(id(pipeline.order), []).append(at)
    found: dict[int, Bubbles | str] = {}
    for places in orders.values():
        alike = [pipelines[at] for at in places]
        found.update(zip(places, _compare_alike(alike), strict=True))
    return [found[at] for at in range(len(pipelines))]


def _compare_alike(pipelines: list[Pipeline]) -> list[Bubbles | str]:
    """Of pipelines that ran the same order, all at once."""
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
    """The mean work of each kind of action on each stage: [kind, stage, pipeline]."""
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
    """Makespan and idle share for each column of costs, as `simulate` finds them where messages
    take no time; ScheduleError if the ranks get stuck."""
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
