"""The time a schedule takes, given what its actions cost, and its drawing."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.schedule.actions import Action, Schedule, ScheduleError
from varuna_core.schedule.compiled import Compiled, list_costs, list_hops
from varuna_core.schedule.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a simulated step, in the unit of its costs."""

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
    compiled = Compiled(schedule)
    timed = compiled.run(list_costs(costs), list_hops(costs), keep_starts=True)
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    for start, op in zip(timed.starts, compiled.ops, strict=True):
        starts[op[0]].append(start)
    return Timing(makespan=timed.makespan, busy=timed.busy, starts=tuple(map(tuple, starts)))


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
