"""Find the best cuts of a layout that the conf gives, and the best layouts of other numbers of
nodes.

A morphing run continues with the nodes that are left or were added. Its manager has neither numpy
nor the time to plan, so the best layout of each number of nodes is found at submit and stored in
plan.json (records/plan.py, Plan.layouts; varuna_core/morph/layout.py reads it).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.facts.partition import Partition
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import NodeKind, place_in_turn
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.plan import ShapePlan, build_plan
from varuna_core.planner.search.deadline import Deadline, within
from varuna_core.planner.search.partition import CLOSE, find_partition
from varuna_core.planner.search.search import Candidate
from varuna_core.planner.search.several import NAMES, build_guide, count_each, find_at
from varuna_core.planner.search.space import Option, list_options
from varuna_core.records.plan import name_nodes
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import MOST_LAYOUTS, build_groups, list_node_counts, require_number
from vjob.jobs.planning.question import PlanOptions, Question, load_question

if TYPE_CHECKING:
    from vjob.jobs.planning.script_layouts import Layouts

LIMIT_S = 10.0
MOST_NODES = 2_000
"""Maximum number of nodes of the branch and bound search for each layout of another number of
nodes."""


def plan_fixed_layout(question: Question, conf: JobConf) -> ShapePlan:
    """Find the best cuts of the conf's own layout; PlanningError if none fits in memory."""
    cluster, wishes = question.cluster, question.wishes
    stages = require_number(conf.parallel.pipeline)
    nodes = [kind for kind in cluster.kinds for _ in range(kind.count)]
    world = sum(kind.gpus for kind in nodes)
    asked = conf.parallel.data
    share = stages * conf.parallel.tensor
    replicas = max(1, world // share) if asked == "auto" else asked
    training = question.training
    if conf.morph.enabled:  # micro-batches are dealt out whole: the fullest replica's count
        training = replace(training, batch=replicas * _count_of_fullest(question, conf, replicas))
    tables = Tables(question.profile, training)
    best: Candidate | None = None
    deadline = within(LIMIT_S)
    for option in list_options(question.profile, training, cluster, build_guide(wishes)):
        if option.shape.replicas != replicas:
            continue
        if wishes.schedule in NAMES:
            if wishes.is_for_memory(option.recompute):
                continue
            found = _find_several(tables, nodes, stages, option, wishes.schedule, best)
        else:
            found = _find_cuts(tables, nodes, stages, option, best, wishes.least, deadline)
        best = found or best
    if best is None:
        raise PlanningError("no cut of this layout fits in memory; `vjob plan` finds one that does")
    return build_plan(tables, cluster, best, wishes.least)


def _find_cuts(
    tables: Tables,
    nodes: Sequence[NodeKind],
    stages: int,
    option: Option,
    best: Candidate | None,
    least: int,
    deadline: Deadline,
    max_nodes: int = 100_000,
) -> Candidate | None:
    """Return the best cuts of one option; None if none fits, or none is better than `best`."""
    shape = option.shape
    placed = place_in_turn(nodes, stages, shape.tensor, shape.replicas)
    work = build_schedule_model(option.schedule, stages, option.num_microbatches, option.recompute)
    chain = Chain(tables, shape, placed, work, least)
    incumbent = float("inf") if best is None else best.step_s
    found = find_partition(chain, incumbent=incumbent, max_nodes=max_nodes, deadline=deadline)
    if found is None or not found.step_s < incumbent * (1 - CLOSE):
        return None
    return Candidate(option=option, placed=placed, bounds=found.bounds, step_s=found.step_s)


def _find_several(
    tables: Tables,
    nodes: Sequence[NodeKind],
    ranks: int,
    guide: Option,
    schedule: str,
    best: Candidate | None,
) -> Candidate | None:
    """Return the best cuts found with several stages a rank, if better than `best`."""
    if guide.shape.zero == 3:
        return None
    option = replace(guide, schedule=schedule)
    placed = place_in_turn(nodes, ranks, option.shape.tensor, option.shape.replicas)
    for each in count_each(schedule, tables.training):
        found = find_at(tables, option, placed, each) if ranks * each <= tables.size else None
        if found is not None and (best is None or found.step_s < best.step_s * (1 - CLOSE)):
            best = found
    return best


def _count_of_fullest(question: Question, conf: JobConf, replicas: int) -> int:
    """Return the number of samples that the replica with the most samples gets of a batch."""
    size = require_number(conf.train.micro_batch_size)
    return -(-question.training.batch // (size * replicas)) * size


def plan_other_nodes(
    question: Question, conf: JobConf, given: ShapePlan
) -> tuple[Layouts, dict[str, float]]:
    """Plan ahead for runs with other numbers of nodes than the conf asks for.

    Return the best layout for each set of nodes, and the seconds of a step with each of them and
    with all nodes of the conf. Both are keyed by the name that `name_nodes` gives the nodes. What
    is not part of a layout stays as in the plan `given`. Sets near the conf's come first; those
    that the time limit of the search leaves out are missing.
    """
    option = given.candidate.option
    tables = Tables(question.profile, question.training)
    deadline = within(LIMIT_S)
    found: Layouts = {}
    groups = build_groups(conf.cluster.nodes)
    steps = {name_nodes([group for group in groups for _ in range(group.count)]): given.step.step_s}
    for counts in itertools.islice(list_node_counts(conf), MOST_LAYOUTS):
        if deadline.is_over():
            break
        chosen = [(i, n) for i, n in enumerate(counts) if n]
        nodes = [question.cluster.kinds[i] for i, n in chosen for _ in range(n)]
        best = _find_layout(tables, nodes, option, question.wishes.least, deadline)
        if best is not None:
            cuts = Partition([end - begin for begin, end in itertools.pairwise(best.bounds)])
            name = name_nodes([groups[i] for i, n in chosen for _ in range(n)])
            found[name] = len(best.placed.sites), best.option.shape.replicas, cuts.spell()
            steps[name] = best.step_s
    return found, steps


def plan_by_profile(
    conf: JobConf, fixed: Collection[str], base: Path, file: Path
) -> tuple[Layouts, dict[str, float]]:
    """Return the planner's layouts and expected step times; raise PlanningError or InputError if
    the conf allows none. Partitions count the embedding and the head unless the conf's own
    partition does not."""
    question = load_question(conf, fixed, base, PlanOptions(prices={}, profile=file))
    found, steps = plan_other_nodes(question, conf, plan_fixed_layout(question, conf))
    num_segments = question.profile.model.num_segments
    partition = conf.parallel.partition
    if partition == "auto" or sum(partition.counts) == num_segments:
        return found, steps
    spelled = {
        name: (depth, replicas, Partition.parse(cuts).without_ends(num_segments).spell())
        for name, (depth, replicas, cuts) in found.items()
    }
    return spelled, steps


def _find_layout(
    tables: Tables,
    nodes: Sequence[NodeKind],
    option: Option,
    least: int,
    deadline: Deadline,
) -> Candidate | None:
    """Return the best depth, replicas and cuts, with whole micro-batches for each replica and at
    least one layer for each stage."""
    tensor, size = option.shape.tensor, option.shape.micro_batch
    shares = sum(node.gpus // tensor for node in nodes)
    micro_batches = -(-tables.training.batch // size)
    deepest = min(shares, tables.size - 2)
    best: Candidate | None = None
    for stages in range(1, deepest + 1):
        for replicas in range(min(shares // stages, micro_batches), 0, -1):
            if deadline.is_over():
                return None
            if option.shape.zero == 3 and micro_batches % replicas:
                continue  # replicas gather weights together: each needs as many micro-batches
            shape = Shape(
                tensor=tensor, replicas=replicas, micro_batch=size, zero=option.shape.zero
            )
            count = -(-micro_batches // replicas)
            changed = replace(option, shape=shape, num_microbatches=count)
            found = _find_cuts(tables, nodes, stages, changed, best, least, deadline, MOST_NODES)
            best = found or best
    return best
