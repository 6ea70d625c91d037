"""Choose the layout and build the plan of an attempt on the present nodes. Pure functions.

    run's plan, facts ─┬ find_planned: what was planned at submit for these nodes ─┬► ParallelShape
                       └ LayoutRequest ─► choose_layout: where nothing was ────────┘     │
                                                          plan.json ◄─ build_attempt ◄───┘

The planner itself needs numpy and time, so its choices for fewer nodes are part of the run's plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from varuna_core.facts.partition import Partition
from varuna_core.records.plan import GroupPlan, Plan, fill_layout, name_nodes
from varuna_core.records.rank_map import build_stages, encode_stage_map
from varuna_core.records.training import TrainingFacts


@dataclass(frozen=True)
class LayoutRequest:
    """Inputs for choosing a layout."""

    shares: int
    """Number of tensor groups for which the nodes have room; each group runs one place of a
    pipeline."""
    pipeline: int
    """Pipeline depth that the user asked for."""
    layers: Optional[int]
    """Number of layers to divide, at least one for each stage; None keeps the depth of the
    pipeline."""
    micro_batches: Optional[int]
    """Number of micro-batches in a whole batch, which is the maximum number of replicas; None
    allows any number of replicas."""
    chunks: int = 1
    """Stages on each rank of a pipeline."""
    is_even: bool = False
    """True if all replicas must have equally many micro-batches."""


@dataclass(frozen=True)
class ParallelShape:
    """Pipeline depth and replicas of an attempt."""

    pipeline: int
    data: int
    partition: Optional[str] = None
    """The partition if it was planned with the layout; replicas of a stage are then neighbours."""


@dataclass(frozen=True)
class AttemptPlan:
    plan: Plan
    seats: Tuple[int, ...]
    """For each node of this plan, its index in the run's plan."""
    idle: Tuple[str, ...]
    """Descriptions of unused resources, for the user."""


Chooser = Callable[[LayoutRequest], Optional[ParallelShape]]
SEVERAL_STAGES = ("interleaved", "zbv")
"""Schedules with several stages a rank. schedule/registry.py has them too, but needs a newer Python
than the agent; a test holds the two equal."""


def choose_layout(question: LayoutRequest) -> Optional[ParallelShape]:
    """Return the layout with the shortest step, counted in slots; None if there is none.

    A step takes as many slots as the fullest replica has micro-batches, plus the pipeline's fill; a
    slot is as long as the most layers of a stage. Pipelines are not shallower than asked for unless
    there are too few ranks, since less depth means more memory on each rank.
    """
    if question.layers is None or question.micro_batches is None:
        return _keep_depth(question)
    deepest = min(question.shares, question.layers // question.chunks)
    if deepest < 1 or question.micro_batches < 1:
        return None
    found = []
    for depth in range(min(question.pipeline, deepest), deepest + 1):
        replicas = _limit_replicas(question, question.shares // depth)
        slots = count_slots(question.layers, question.micro_batches, depth, replicas)
        found.append((slots, depth, ParallelShape(depth, replicas)))
    return min(found, key=lambda item: item[:2])[2]


def _keep_depth(question: LayoutRequest) -> Optional[ParallelShape]:
    """Return a layout of the depth asked for with all replicas that fit; shallower only if that
    does not fit and the layers are known."""
    depth = question.pipeline
    if question.layers is not None:
        depth = min(depth, question.shares, question.layers // question.chunks)
    replicas = _limit_replicas(question, question.shares // depth) if depth >= 1 else 0
    return ParallelShape(depth, replicas) if replicas >= 1 else None


def _limit_replicas(question: LayoutRequest, room: int) -> int:
    """Return the number of replicas for which there are enough nodes (`room`) and
    micro-batches."""
    micro_batches = question.micro_batches
    if micro_batches is None:
        return room
    most = min(room, micro_batches)
    if question.is_even:
        return next((count for count in range(most, 0, -1) if micro_batches % count == 0), 0)
    return most


def count_slots(layers: int, micro_batches: int, depth: int, replicas: int) -> int:
    """Return the length of a step in forwards of one layer: micro-batches of the fullest replica
    plus the pipeline's fill, times the most layers of a stage."""
    return (-(-micro_batches // replicas) + depth - 1) * -(-layers // depth)


def find_layout(
    plan: Plan, facts: TrainingFacts, seats: Sequence[int], choose: Chooser = choose_layout
) -> Optional[ParallelShape]:
    """Return the layout on these seats; the conf's layout if they have as much room."""
    asked = ParallelShape(plan.pipeline, plan.data)
    everybody = range(count_asked(plan))
    shares, room = count_shares(plan, seats), count_shares(plan, everybody)
    if facts.layout == "world":
        return ParallelShape(plan.pipeline, shares) if shares else None
    # The conf's own layout may have no replica: a pipeline for more ranks than there are.
    is_room = shares == room and asked.data >= 1 and asked.pipeline * asked.data <= shares
    if is_room and sorted(seats) == list(everybody):
        return asked
    planned = find_planned(plan, seats)
    if planned is not None and facts.is_even and (facts.micro_batches or 0) % planned.data:
        planned = None
    if planned is not None or is_room:
        return planned or asked
    return choose(
        LayoutRequest(
            shares=shares,
            pipeline=plan.pipeline,
            layers=facts.layers,
            micro_batches=facts.micro_batches,
            chunks=count_chunks(plan, facts),
            is_even=facts.is_even,
        )
    )


def count_chunks(plan: Plan, facts: TrainingFacts) -> int:
    """Return the number of stages on each rank of the run's pipeline."""
    if facts.schedule not in SEVERAL_STAGES:
        return 1
    if plan.partition is None:
        return 2
    return max(Partition.parse(plan.partition).num_stages // plan.pipeline, 1)


def cut_evenly(layers: int, parts: int) -> str:
    """Return the partition whose stages differ by at most one layer, shorter stages at the ends,
    which also have the embedding and the loss."""
    least, over = divmod(layers, parts)
    first = (parts - over) // 2
    return "-".join(str(least + (first <= part < first + over)) for part in range(parts))


def find_planned(plan: Plan, seats: Sequence[int]) -> Optional[ParallelShape]:
    """Return the layout that was planned at submit for nodes of these groups, or None."""
    nodes = name_nodes([plan.node(seat).group for seat in sorted(seats)])
    found = (plan.layouts or {}).get(nodes)
    return None if found is None else ParallelShape(*found)


def count_asked(plan: Plan) -> int:
    """Return the number of nodes that the conf asks for; nodes that joined come after these."""
    return plan.num_nodes - (plan.morphing.joined if plan.morphing is not None else 0)


def count_shares(plan: Plan, seats: Sequence[int]) -> int:
    """Return the number of tensor groups, each within a node, for which these seats have room."""
    return sum(plan.node(seat).group.ranks // plan.tensor for seat in seats)


def list_needed(plan: Plan, layout: ParallelShape, seats: Sequence[int]) -> List[Tuple[int, int]]:
    """Return the seats that take part, with the ranks on each, in the order of the run's plan.

    The last one may have fewer ranks than it has room for; later seats are left out.
    """
    missing = layout.pipeline * layout.data * plan.tensor
    found = []
    for seat in sorted(seats):
        ranks = min(plan.node(seat).group.ranks // plan.tensor * plan.tensor, missing)
        if ranks:
            found.append((seat, ranks))
            missing -= ranks
    return found


def build_attempt(
    plan: Plan, facts: TrainingFacts, seats: Sequence[int], choose: Chooser = choose_layout
) -> Optional[AttemptPlan]:
    """Build the plan of an attempt on these seats; the run's own plan if all nodes are present."""
    layout = find_layout(plan, facts, seats, choose)
    if layout is None:
        return None
    needed = list_needed(plan, layout, seats)
    groups = build_groups(plan, needed)
    is_as_asked = layout == ParallelShape(plan.pipeline, plan.data)
    order = plan.order if is_as_asked or layout.data > 1 else "pipeline"
    partition = _cut(plan, facts, layout.pipeline)
    planned = "the layout fits the present nodes"
    if layout.partition is not None:
        order, partition = "data", layout.partition
        planned = "planned at submit for these nodes"
    elif plan.layouts:
        planned += "; no layout was planned for these nodes at submit"
    stages = build_stages(layout.pipeline, layout.data, order)
    own = replace(
        plan,
        groups=groups,
        pipeline=layout.pipeline,
        data=layout.data,
        order=order,
        partition=partition,
        stage_map=plan.stage_map if is_as_asked else encode_stage_map(stages),
        planned=plan.planned if is_as_asked else planned,
        prediction=plan.prediction if is_as_asked else None,
    )
    return AttemptPlan(
        plan=fill_layout(own),
        seats=tuple(seat for seat, _ in needed),
        idle=tuple(name_idle(plan, dict(needed), seats)),
    )


def _cut(plan: Plan, facts: TrainingFacts, depth: int) -> Optional[str]:
    """Return the partition: the conf's if it fits the depth; None to let the runtime balance.

    A script that was given a partition gets one at any depth, since it may use it to cut its model.
    """
    if plan.partition is None or depth == plan.pipeline:
        return plan.partition
    if not facts.is_own or facts.layers is None:
        return None
    return cut_evenly(facts.layers, depth * count_chunks(plan, facts))


def build_groups(plan: Plan, needed: Sequence[Tuple[int, int]]) -> Tuple[GroupPlan, ...]:
    """Group the nodes that take part, renumbered; one with fewer ranks is a group of its own."""
    runs: List[Tuple[str, int, int]] = []
    """Group, ranks on a node, number of nodes."""
    for seat, ranks in needed:
        name = plan.node(seat).group.name
        if runs and runs[-1][:2] == (name, ranks):
            runs[-1] = (name, ranks, runs[-1][2] + 1)
        else:
            runs.append((name, ranks, 1))
    found: List[GroupPlan] = []
    node = rank = 0
    for name, ranks, count in runs:
        group = plan.group(name)
        is_partial = ranks < group.ranks
        found.append(
            replace(
                group,
                name=f"{name}-rest" if is_partial else name,
                count=count,
                ranks=ranks,
                first_node=node,
                first_rank=rank,
            )
        )
        node, rank = node + count, rank + count * ranks
    return tuple(found)


def name_idle(plan: Plan, used: Dict[int, int], seats: Sequence[int]) -> List[str]:
    """Describe ranks for which there is room but no work."""
    found = []
    for seat in sorted(seats):
        left = plan.node(seat).group.ranks - used.get(seat, 0)
        if left:
            found.append(f"{left} of {plan.node(seat).group.ranks} ranks of node {seat}")
    return found
