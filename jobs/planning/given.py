"""The best cuts of a layout that the conf gives: its shape and its order of nodes stay."""

from __future__ import annotations

import time

from jobs.conf import JobConf, settled
from jobs.planning.question import Question
from varuna_core.planner.chain import Chain
from varuna_core.planner.cluster import Order, place
from varuna_core.planner.errors import PlanningError
from varuna_core.planner.partition import find_partition
from varuna_core.planner.plan import Plan, build_plan
from varuna_core.planner.roles import find_work
from varuna_core.planner.search import Candidate
from varuna_core.planner.space import list_options
from varuna_core.planner.tables import Tables
from varuna_core.planner.used_nodes import list_used_nodes

LIMIT_S = 10.0


def plan_given(question: Question, conf: JobConf) -> Plan | None:
    """None if ranks lie otherwise than the planner lays them; PlanningError if nothing fits."""
    profile, training, cluster = question.profile, question.training, question.cluster
    stages = settled(conf.parallel.pipeline)
    order: Order = tuple((kind, kind.gpus) for kind in cluster.kinds for _ in range(kind.count))
    tables = Tables(profile, training)
    best: Candidate | None = None
    world = sum(kind.gpus for kind, _ in order)
    until = time.monotonic() + LIMIT_S
    shares = stages * conf.parallel.tensor
    wishes = question.wishes
    for option in list_options(profile, training, cluster, wishes):
        shape = option.shape
        if shape.replicas * shares != world:
            continue
        placed = place(order, stages, shape.tensor, shape.replicas)
        if placed is None:
            return None
        if sum(node.ranks for node in list_used_nodes(placed, shape.tensor)) != world:
            return None
        work = find_work(option.schedule, stages, option.num_microbatches, option.recompute)
        chain = Chain(tables, shape, placed, work, wishes.least)
        incumbent = float("inf") if best is None else best.step_s
        found = find_partition(chain, incumbent=incumbent, deadline=until)
        if found is not None and found.step_s < incumbent:
            best = Candidate(option=option, placed=placed, bounds=found.bounds, step_s=found.step_s)
    if best is None:
        raise PlanningError("no cut of this layout fits in memory; `vjob plan` says what would")
    return build_plan(tables, cluster, best, wishes.least)
