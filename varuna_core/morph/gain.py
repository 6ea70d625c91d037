"""Weigh the gain of other nodes against the pause of a morph. Pure functions.

    steps left, a step now ─┐
    a step then ────────────┼─► pays: more done than without, by the end of the run or of its time
    pause, seconds left ────┘

The step time then is the measured one times the plan's ratio for both layouts: from the steps that
the planner predicted at submit, or from a count of the layouts' slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Optional, Sequence

from varuna_core.morph.layout import ParallelShape, count_slots, find_layout
from varuna_core.records.plan import GroupPlan, Plan, name_nodes
from varuna_core.records.training import TrainingFacts


def pays(
    steps_left: float, step_s: float, then_s: float, pause_s: float, left_s: float = math.inf
) -> bool:
    """Return True if a pause followed by shorter steps gets more of the training done.

    `step_s` is the present step, `then_s` one after the pause, `left_s` the rest of the time limit.
    Both ways are compared when the training would end without a pause, or at the end of its time if
    that is earlier.
    """
    if not (all(value > 0 for value in (steps_left, step_s, then_s, left_s)) and pause_s >= 0):
        return False  # also where one of them is no number
    horizon = min(steps_left * step_s, left_s)
    if math.isinf(horizon):  # nobody knows when it ends: any gain is worth a pause in the end
        return then_s < step_s
    return (horizon - pause_s) * step_s > horizon * then_s


@dataclass(frozen=True)
class Forecast:
    """Step time on other nodes divided by that on the present ones."""

    ratio: float
    is_predicted: bool
    """True if the planner predicted the ratio at submit, False if it follows from counts of
    ranks."""


def forecast(
    plan: Plan, facts: TrainingFacts, before: Sequence[int], after: Sequence[int]
) -> Optional[Forecast]:
    """Forecast the step on other seats of `plan`; None if either set of seats has no layout."""
    now, then = find_layout(plan, facts, before), find_layout(plan, facts, after)
    if now is None or then is None:
        return None
    predicted = find_predicted_s(plan, before), find_predicted_s(plan, after)
    if predicted[0] and predicted[1]:
        return Forecast(predicted[1] / predicted[0], True)
    slots = _count(plan, facts, then) / _count(plan, facts, now)
    ranks = now.pipeline * now.data / (then.pipeline * then.data)
    # A count of slots hopes for stages that are cut evenly: no more is expected than ranks bring.
    return Forecast(max(slots, ranks) if slots < 1 else slots, False)


def find_predicted_s(plan: Plan, seats: Sequence[int]) -> Optional[float]:
    """Return the step time that the planner predicted at submit for nodes of the groups of these
    seats; None if it predicted none."""
    name = name_nodes([plan.node(seat).group for seat in sorted(seats)])
    return (plan.layout_steps or {}).get(name)


def with_more(plan: Plan, like: GroupPlan, count: int) -> Plan:
    """Return a plan with `count` more seats at the end, of the same kind as `like`."""
    assert plan.morphing is not None
    more = replace(like, name="more", count=count, first_node=plan.num_nodes, first_rank=plan.world)
    return replace(
        plan,
        groups=(*plan.groups, more),
        morphing=replace(plan.morphing, joined=plan.morphing.joined + count),
    )


def _count(plan: Plan, facts: TrainingFacts, layout: ParallelShape) -> float:
    if facts.micro_batches is None:  # the batch is dealt out evenly, for all that is known
        return 1 / (layout.pipeline * layout.data)
    layers = facts.layers or plan.pipeline
    return count_slots(layers, facts.micro_batches, layout.pipeline, layout.data)
