"""Build and verify the schedule of a step, once for each number of micro-batches.

All ranks build the same schedule from the same figures, so no communication is needed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from varuna_core.records.rank_map import StageMap
from varuna_core.schedule.actions import Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.order import compute_capacity
from varuna_core.schedule.recompute import Memory, Recompute, measure_memory
from varuna_core.schedule.registry import AUTO, SCHEDULES, build_schedule, place_stages
from varuna_core.schedule.verify import PeakHeld, verify

log = logging.getLogger(__name__)

# Messages that a channel takes before a sender waits, where the schedule needs no more.
CAPACITY = 4

# A schedule that is shorter by less than this part is not worth the change; in place of the first
# one, which was made for costs that nobody measured, and later.
GAIN, LATER_GAIN = 0.01, 0.02


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The schedule of one step, with its limits."""

    schedule: Schedule
    capacity: int
    """Maximum number of messages on a channel that are sent but not yet taken."""

    ahead: tuple[int, ...]
    """Maximum number of forwards that may run early, by rank."""


class Plans:
    """The schedules of one training, keyed by the number of micro-batches."""

    def __init__(
        self,
        name: str,
        stage_map: StageMap,
        costs: Costs,
        recompute: Recompute,
        *,
        opportunistic: bool = True,
        is_limit_given: bool = False,
        usual: int = 1,
    ) -> None:
        """`usual` is the number of micro-batches for which the schedule is optimized."""
        self.name, self.stage_map, self.costs = name, stage_map, costs
        self.recompute, self.opportunistic = recompute, opportunistic
        self.is_limit_given, self.usual = is_limit_given, usual
        self.gain = GAIN
        self._memory: Memory | None = None
        self._found: dict[int, StepPlan] = {}

    @property
    def lacks_memory(self) -> bool:
        """Return True while `auto` recomputes everything because the size of graphs is unknown."""
        return self.recompute == "auto" and self._memory is None

    def set_memory(self, memory: Memory) -> None:
        self._memory = memory
        self._found.clear()

    def find(self, num_microbatches: int) -> StepPlan:
        plan = self._found.get(num_microbatches)
        if plan is None:
            try:
                schedule = self._build_schedule(num_microbatches, self.costs, self._memory)
            except ScheduleError:
                if self.recompute == "auto" or self._memory is None:
                    raise
                schedule = self._build_schedule(num_microbatches, self.costs, None)
            plan = self._found[num_microbatches] = self._verify(schedule)
        return plan

    def adapt(self, costs: Costs, memory: Memory | None = None) -> str | None:
        """Adopt these costs if they give a shorter schedule that fits in `memory`, if given. Return
        a description of the change, or None."""
        memory = self._memory or memory
        present = self.find(self.usual).schedule
        try:
            schedule = self._build_schedule(self.usual, costs, memory)
        except ScheduleError as error:
            log.debug("the schedule stays: %s", error)
            return None
        before, after = (simulate(each, costs).makespan for each in (present, schedule))
        if after > (1 - self.gain) * before:
            return None
        self.costs, self._memory, self.gain = costs, memory, LATER_GAIN
        self._found = {self.usual: self._verify(schedule)}
        is_same = schedule.name == present.name
        what = f"{schedule.name}, in another order" if is_same else schedule.name
        return (
            f"schedule: {what} from now on: with measured times, a step takes {after:.3g} s "
            f"instead of {before:.3g} s"
        )

    def _verify(self, schedule: Schedule) -> StepPlan:
        capacity = max(CAPACITY, compute_capacity(schedule))
        held = verify(schedule, capacity=capacity)
        ahead = self._find_ahead(schedule, held)
        if any(ahead):
            # Then no send of a forward ever waits: a rank has begun no more than these.
            begun = map(sum, zip(held.graphs, held.inputs, ahead, strict=True))
            capacity = max(capacity, *begun)
        return StepPlan(schedule=schedule, capacity=capacity, ahead=ahead)

    def _build_schedule(
        self, num_microbatches: int, costs: Costs, known: Memory | None
    ) -> Schedule:
        def build(recompute: Recompute, memory: Memory | None) -> Schedule:
            return build_schedule(
                self.name,
                self.stage_map.depth,
                num_microbatches,
                stages_per_rank=self.stage_map.num_stages // self.stage_map.depth,
                costs=costs,
                recompute=recompute,
                memory=memory,
            )

        if self.recompute != "auto":
            return build(self.recompute, known)
        if known is None:
            return build("full", None)
        try:
            return build("auto", known)
        except ScheduleError as error:
            if self.is_limit_given:
                raise
            log.warning("recompute auto: everything is recomputed: %s", error)
            return build("full", None)

    def _find_ahead(self, schedule: Schedule, held: PeakHeld) -> tuple[int, ...]:
        """Return how many forwards each rank may run early: as many inputs as it holds anyway, if
        memory allows."""
        if not SCHEDULES[schedule.name].runs_ahead or not self.opportunistic:
            return (0,) * schedule.num_ranks
        ahead = list(held.inputs)
        if self._memory is not None:
            peaks = measure_memory(schedule, self._memory)
            for rank, inputs in enumerate(self._memory.inputs):  # a stage a rank
                room = max(0.0, self._memory.limits[rank] - peaks[rank])
                ahead[rank] = min(ahead[rank], int(room // inputs)) if inputs else ahead[rank]
        return tuple(ahead)


def settle_stages(
    stage_map: StageMap, name: str, stages_per_rank: int, num_microbatches: int, costs: Costs
) -> tuple[StageMap, str]:
    """Return the stage map with all stages, and the schedule's name.

    With several stages per rank, `auto` is resolved here for a full batch, since the placement of
    stages depends on the schedule and cannot change later.
    """
    if name == AUTO and stages_per_rank > 1:
        best = build_schedule(
            name, stage_map.depth, num_microbatches, stages_per_rank=stages_per_rank, costs=costs
        )
        name = best.name
    placement = place_stages(name, stage_map.depth, stages_per_rank)
    return stage_map.with_placement(placement), name
