"""Which schedule a step runs: built and verified once for each number of micro-batches.

All ranks build the same from the same figures, so none of it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.choice import build_schedule
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.order import find_capacity
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.verify import verify
from varuna_core.stage_map import StageMap

# Messages that a channel takes before a sender waits, where the schedule needs no more.
CAPACITY = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step's work."""

    schedule: Schedule
    capacity: int
    """Messages of a channel that may be sent and not yet taken."""


def count_stages(schedule: str, stages_per_rank: int) -> int:
    """Stages a rank; zbv has two whatever is left unsaid."""
    if stages_per_rank < 1:
        raise ValueError(f"stages_per_rank {stages_per_rank} must be 1 or more")
    if schedule == "zbv" and stages_per_rank in (1, 2):
        return 2
    if stages_per_rank > 1 and schedule not in ("interleaved", "auto"):
        raise ValueError(
            f"schedule {schedule!r} does not take stages_per_rank {stages_per_rank}: "
            "interleaved and auto do, zbv has 2"
        )
    return stages_per_rank


class Plans:
    """The plans of one Varuna."""

    def __init__(self, name: str, stage_map: StageMap, costs: Costs, recompute: Recompute) -> None:
        self.name, self.stage_map, self.costs = name, stage_map, costs
        self.recompute = recompute
        self._found: dict[int, Plan] = {}

    def find(self, num_microbatches: int) -> Plan:
        plan = self._found.get(num_microbatches)
        if plan is None:
            plan = self._found[num_microbatches] = self._build(num_microbatches)
        return plan

    def _build(self, num_microbatches: int) -> Plan:
        depth = self.stage_map.depth
        schedule = build_schedule(
            self.name,
            depth,
            num_microbatches,
            stages_per_rank=self.stage_map.num_stages // depth,
            costs=self.costs,
            recompute=self.recompute,
        )
        capacity = max(CAPACITY, find_capacity(schedule))
        verify(schedule, capacity=capacity)
        return Plan(schedule=schedule, capacity=capacity)


def place_stages(
    stage_map: StageMap, name: str, stages_per_rank: int, num_microbatches: int, costs: Costs
) -> tuple[StageMap, str]:
    """The map with all stages, and the schedule's name.

    With several stages a rank `auto` is settled here, for a full batch: where the stages lie
    depends on it, and they lie there for good.
    """
    if name == "auto" and stages_per_rank > 1:
        best = build_schedule(
            name, stage_map.depth, num_microbatches, stages_per_rank=stages_per_rank, costs=costs
        )
        name = best.name
    return stage_map.with_stages(name, stages_per_rank), name
