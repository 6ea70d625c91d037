"""Pace of an attempt: the time of its steps, and the work of each rank in them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import AttemptFolder
from varuna_core.records.slow_ranks import WARM_UP_STEPS
from varuna_core.records.stage_map import locate_ranks
from vjob.jobs.monitor.model.snapshot import Progress
from vjob.jobs.monitor.readers.attempt import AttemptReader
from vjob.jobs.monitor.readers.rank_files import TraceEnd

RECENT_STEPS = 50
ENOUGH_POINTS = 5
"""Lines of a log, or steps of a trace."""
ENOUGH_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Of one attempt."""

    step: int
    """The last one that was done."""
    step_s: float


def find_pace(progress: Progress | None) -> Pace | None:
    """The median of its last steps; None as long as they are few."""
    if progress is None or not progress.points:
        return None
    first = progress.first_step if progress.first_step is not None else progress.points[0].step
    last = progress.points[-1].step
    used = [
        (point.step, point.step_s)
        for point in progress.points
        if point.step_s is not None and math.isfinite(point.step_s) and point.step_s > 0
        if point.step >= max(first + WARM_UP_STEPS, last - RECENT_STEPS)
    ]
    if len(used) < ENOUGH_POINTS or last - first - WARM_UP_STEPS < ENOUGH_STEPS:
        return None
    return Pace(step=last, step_s=statistics.median(step_s for _, step_s in used))


class AttemptPace:
    """One attempt, looked at again and again."""

    def __init__(self, attempt: AttemptFolder, plan: Plan) -> None:
        self.number, self._plan = attempt.number, plan
        self._reader = AttemptReader(attempt, plan, 0)
        self._traces = {rank: TraceEnd(attempt.trace(rank)) for rank in range(plan.world)}

    def find_pace(self) -> Pace | None:
        return find_pace(self._reader.read().progress)

    def read_works(self) -> dict[int, dict[int, float]]:
        """What each rank that traces computed itself in each step, the first steps left out."""
        found = {}
        for rank, trace in self._traces.items():
            trace.poll()
            found[rank] = trace.works_s()
        return found

    def list_steps_s(self) -> dict[int, float]:
        """What a step of each rank takes, as `read_works` saw it."""
        medians = {rank: trace.medians()[0] for rank, trace in self._traces.items()}
        return {rank: step_s for rank, step_s in medians.items() if step_s is not None}

    def list_peers(self) -> list[list[int]]:
        """Ranks that do the same on the same kind of device."""
        return list_peers(self._plan, {rank: t.device for rank, t in self._traces.items()})

    def map_nodes(self) -> dict[int, int]:
        """Each rank's node, by its index in the attempt's plan."""
        return {rank: self._plan.node_of_rank(rank).index for rank in range(self._plan.world)}


def list_peers(plan: Plan, devices: dict[int, str]) -> list[list[int]]:
    """By a rank's place in the pipeline, hence all the stages that it holds, and its device."""
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, found in sorted(locate_ranks(plan.stage_map, plan.tensor).items()):
        groups.setdefault((found.place, devices.get(rank, "")), []).append(rank)
    return list(groups.values())
