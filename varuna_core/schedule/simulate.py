"""How long a schedule takes, given what its actions cost: no clock, no threads, no randomness.

A rank runs its list in order and starts an action when it is free and what the action takes has
arrived. Sends cost the rank nothing; messages from one rank to another use the link one after
another, each for the time of its hop, as on a link that is slow for want of bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.schedule.actions import BACKWARDS, FORWARDS, Action, Schedule, ScheduleError
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.order import walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a simulated step took, in the unit of its costs."""

    makespan: float
    busy: tuple[float, ...]
    """Work of each rank; the rest of the makespan is its bubble."""
    starts: tuple[tuple[float, ...], ...]
    """When each action of each rank began."""

    @property
    def bubble(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_share(self) -> float:
        """Idle part of all the ranks' time."""
        return sum(self.bubble) / (self.makespan * len(self.busy)) if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timing:
    """The schedule's timing; ScheduleError if its ranks get stuck."""
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(f"{schedule}: costs of {costs.num_stages} stages given")
    placement, last = schedule.placement, schedule.num_stages - 1
    by_kind, hops = costs.by_kind, costs.hops
    free = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    link_free: dict[tuple[int, int], float] = {}
    arrival: dict[tuple[bool, int, int], float] = {}
    for rank, action in walk(schedule):
        stage, microbatch = action.stage, action.microbatch
        forward = action.kind in FORWARDS
        moves = forward or action.kind in BACKWARDS
        start = free[rank]
        if moves and (stage > 0 if forward else stage < last):
            start = max(start, arrival.pop((forward, stage, microbatch)))
        cost = by_kind[action.kind][stage]
        end = start + cost
        free[rank] = end
        busy[rank] += cost
        starts[rank].append(start)
        if moves and (stage < last if forward else stage > 0):
            target = stage + 1 if forward else stage - 1
            to = placement[target]
            if to == rank:
                arrival[forward, target, microbatch] = end
            else:
                sent = max(end, link_free.get((rank, to), 0.0)) + hops[min(stage, target)]
                link_free[rank, to] = sent
                arrival[forward, target, microbatch] = sent
    return Timing(
        makespan=max(free, default=0.0), busy=tuple(busy), starts=tuple(map(tuple, starts))
    )


def render_drawing(schedule: Schedule, costs: Costs) -> str:
    """One line a rank, one cell a unit of time: what runs, `--` while it goes on, `..` idle.

    For costs in whole units. Stages are spelled only where a rank has several.
    """
    timing = simulate(schedule, costs)
    several = schedule.num_stages > schedule.num_ranks
    cells = [["" for _ in range(round(timing.makespan))] for _ in schedule.ranks]
    for rank, actions in enumerate(schedule.ranks):
        for action, start in zip(actions, timing.starts[rank], strict=True):
            length = round(costs.by_kind[action.kind][action.stage])
            for step in range(round(start), round(start) + length):
                cells[rank][step] = "-"
            if length:
                cells[rank][round(start)] = _name(action, several)
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join(_render_row(row, width) for row in cells)


def _name(action: Action, several: bool) -> str:
    return str(action) if several else f"{action.kind}{action.microbatch}"


def _render_row(row: list[str], width: int) -> str:
    while row and not row[-1]:
        row = row[:-1]
    filled = [{"": "." * width, "-": "-" * width}.get(cell, cell) for cell in row]
    return " ".join(f"{cell:<{width}}" for cell in filled).rstrip()
