"""Simulate the time of one step: the schedule's actions, gradient sums and the optimizer.

```
stage 0   F F ..  B .. B ─┐              ┌ norm of all ┬ optimizer ┬ weights back (ZeRO)
stage 1   .. F .. B .. ├──sum over replicas──tied──────┤           │
          last backward │  buckets as they fill         └ everybody waits for the slowest
```

A column is a set of equal replicas (same kinds of GPU, same links); a stage's sum over the replicas
begins when its slowest column is ready.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.schedule.actions import COPIES
from varuna_core.schedule.compiled import KINDS, Compiled, ScheduleTimes, list_stages
from varuna_core.schedule.held import follow_held

BUCKET_BYTES = 25 * 2**20
"""Bytes in a gradient bucket, the same as in varuna_core/runtime/optim/grads.py."""


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """Costs of the actions of equal replicas."""

    costs: tuple[float, ...]
    """Costs by kind, then by stage, as from `compiled.list_costs` or `list_all_costs`."""
    hops: tuple[float, ...]
    """Transfer times, two for each boundary: activations, then gradients."""
    holds: tuple[float, ...] | None = None
    """Time that each transfer, with other replicas' ones, occupies its link; None means `hops`."""

    @property
    def lag_s(self) -> float:
        """Seconds by which the last replica trails the first: all start at once, so their first
        messages queue on the shared link."""
        if self.holds is None:
            return 0.0
        pairs = zip(self.hops, self.holds, strict=True)
        return max((hold - hop for hop, hold in pairs), default=0.0)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """All costs of a step; tuples have one figure for each stage."""

    columns: tuple[ActionCosts, ...]
    reduce_s: tuple[float, ...]
    num_buckets: tuple[int, ...]
    ties: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Groups of stages that share a weight, and the seconds to sum its gradient."""
    optimizer_s: tuple[float, ...]
    exchange_s: tuple[float, ...]
    """Seconds to get weights from their owners when the next step begins (ZeRO)."""
    data_s: float = 0.0
    """Seconds that the first stage waits for its samples."""
    overlap_reduction: bool = True


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Seconds of one stage in a step, in the slowest column."""

    work_s: float
    idle_s: float
    """Seconds between the stage's actions and until the last stage of the pipeline is done."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a simulated step in seconds."""

    step_s: float
    lag_s: float
    """Seconds by which the last replica trails the first (`Column.lag_s`)."""
    pipeline_s: float
    """Seconds until the last action of any stage in the last replica."""
    reduced_s: float
    """Seconds until all sums over replicas are done."""
    tied_s: float
    """Seconds until the sums of tied weights are done."""
    optimizer_s: float
    exchange_s: float
    data_s: float
    bubble_share: float
    stages: tuple[StageTime, ...]


def simulate_step(compiled: Compiled, costs: StepCosts) -> StepTime:
    """Simulate a step. Raise PlanningError if the costs are for another number of stages."""
    stages = compiled.num_stages
    sizes = {len(KINDS) * stages, len((*KINDS, *COPIES)) * stages}
    if not costs.columns or any(len(c.costs) not in sizes for c in costs.columns):
        raise PlanningError(f"the costs do not match the {stages} stages of {compiled.schedule}")
    timed = [compiled.run(one.costs, one.hops, holds=one.holds) for one in costs.columns]
    lag = max(column.lag_s for column in costs.columns)
    pipeline = lag + max(one.makespan for one in timed)
    reduced = [lag + done for done in _list_reduced(compiled, costs, timed)]
    tied = list(reduced)
    for held, took in costs.ties:
        done = max(tied[stage] for stage in held) + took
        for stage in held:
            tied[stage] = done
    agreed = max(pipeline, *tied)
    optimizer = _compute_slowest(compiled, costs.optimizer_s)
    exchange = _compute_slowest(compiled, costs.exchange_s)
    step = costs.data_s + agreed + optimizer + exchange
    busy = [max(one.busy[r] for one in timed) for r in range(compiled.num_ranks)]
    return StepTime(
        step_s=step,
        lag_s=lag,
        pipeline_s=pipeline,
        reduced_s=max(pipeline, *reduced),
        tied_s=agreed,
        optimizer_s=optimizer,
        exchange_s=exchange,
        data_s=costs.data_s,
        bubble_share=1 - sum(busy) / (pipeline * len(busy)) if pipeline else 0.0,
        stages=_list_stage_times(compiled, costs, timed, pipeline),
    )


def _compute_slowest(compiled: Compiled, figures: Sequence[float]) -> float:
    """Return the largest sum of a figure over the stages of a rank."""
    ranks = [0.0] * compiled.num_ranks
    for rank, figure in zip(compiled.schedule.placement, figures, strict=True):
        ranks[rank] += figure
    return max(ranks)


def _list_reduced(
    compiled: Compiled, costs: StepCosts, timed: Sequence[ScheduleTimes]
) -> list[float]:
    """Return for each stage the time at which its gradients have been summed. A rank sums its
    stages one after another, in the order in which their last backwards begin."""
    done = [_compute_reduced(compiled, costs, timed, s) for s in range(compiled.num_stages)]
    begins = [max(one.last_backward[s] for one in timed) for s in range(compiled.num_stages)]
    for rank in range(compiled.num_ranks):
        own = sorted(list_stages(compiled.schedule, rank), key=begins.__getitem__)
        for before, stage in itertools.pairwise(own):
            if took := costs.reduce_s[stage]:
                done[stage] = max(done[stage], done[before] + took)
    return done


def _compute_reduced(
    compiled: Compiled, costs: StepCosts, timed: Sequence[ScheduleTimes], stage: int
) -> float:
    """Return the time at which a stage's gradients have been summed over the replicas.

    Buckets fill evenly while the last action with weight gradients runs. Each is summed when it is
    full and the previous one is done.
    """
    took, buckets = costs.reduce_s[stage], max(1, costs.num_buckets[stage])
    rank = compiled.schedule.placement[stage]
    begin = max(one.last_backward[stage] for one in timed)
    end = max(
        one.last_backward[stage] + column.costs[compiled.compute_last_cost(stage)]
        for one, column in zip(timed, costs.columns, strict=True)
    )
    if not took:
        return end
    if not costs.overlap_reduction:
        return max(one.ends[rank] for one in timed) + took
    return max(end + took / buckets, begin + (end - begin) / buckets + took)


def _list_stage_times(
    compiled: Compiled,
    costs: StepCosts,
    timed: Sequence[ScheduleTimes],
    pipeline: float,
) -> tuple[StageTime, ...]:
    times: list[StageTime] = []
    for stage in range(compiled.num_stages):
        uses = range(stage, len(costs.columns[0].costs), compiled.num_stages)
        work = max(
            sum(compiled.uses[use] * column.costs[use] for use in uses) for column in costs.columns
        )
        rank = compiled.schedule.placement[stage]
        busy = max(one.busy[rank] for one in timed)
        times.append(
            StageTime(
                work_s=work,
                idle_s=max(0.0, pipeline - busy),
            )
        )
    return tuple(times)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of GPU memory that one stage holds."""

    fixed: float
    """Bytes of weights, gradients, optimizer state and the framework."""
    graph: float
    """Bytes that one micro-batch keeps between its forward and backward."""
    inputs: float
    """Bytes that one micro-batch keeps if it is recomputed."""
    work: float
    """Extra bytes while an action runs."""


def find_peaks(compiled: Compiled, memory: Sequence[StageMemory]) -> tuple[float, ...]:
    """Return the most bytes that each rank holds at any time of a step."""
    peaks = []
    for rank, held in enumerate(compiled.held):
        own = [memory[stage] for stage in list_stages(compiled.schedule, rank)]
        fixed = sum(one.fixed for one in own) + max(one.work for one in own)
        peaks.append(
            fixed
            + max(
                sum(
                    counts[2 * i] * one.graph + counts[2 * i + 1] * one.inputs
                    for i, one in enumerate(own)
                )
                for counts in held
            )
        )
    return tuple(peaks)


def find_away(compiled: Compiled, memory: Sequence[StageMemory]) -> tuple[float, ...]:
    """Return the most bytes of graphs that each rank keeps in host memory at any time of a step."""
    away = []
    for rank, actions in enumerate(compiled.schedule.ranks):
        stages = list_stages(compiled.schedule, rank)
        sizes = {s: memory[s].graph - memory[s].inputs for s in stages}
        away.append(
            max(
                sum(count * sizes[s] for s, count in held.offloaded.items())
                for _, held in follow_held(actions, stages)
            )
        )
    return tuple(away)
