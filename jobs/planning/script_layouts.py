"""Choose layouts of a morphing script for fewer nodes than all; its conf has the layout for all
nodes.

    a profile of the script       the planner's: depth, replicas and cuts (fixed_layout.py)
    none, several GPU types       layers dealt out by the speeds of the data sheets
    none, one type                nothing: the manager cuts evenly (varuna_core/morph/layout.py)

The possible cuts of the model are known only from a partition in the conf or from a profile: the
layers of `model` may differ from the script's cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from varuna_core.records.plan import name_nodes
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import MOST_LAYOUTS, build_groups, list_node_counts, require_number

Layouts = dict[str, tuple[int, int, str]]
"""Pipeline, data and partition, by the nodes' name."""


def deal_layers(layers: int, speeds: Sequence[float]) -> list[int]:
    """Divide layers, at least one a stage, so that the slowest stage is as fast as possible.

    Of equally slow stages, inner ones get more, since the outer ones have other work too.
    """
    counts = [1] * len(speeds)
    for _ in range(layers - len(speeds)):
        counts[min(range(len(speeds)), key=lambda i: _rank_stage(i, counts, speeds))] += 1
    return counts


def _rank_stage(
    index: int, counts: Sequence[int], speeds: Sequence[float]
) -> tuple[float, float, int]:
    return (counts[index] + 1) / speeds[index], abs(2 * index - len(speeds) + 1), index


def choose_by_speed(
    speeds: Sequence[float], layers: int, micro_batches: int | None, pipeline: int
) -> tuple[int, int, str] | None:
    """Return depth, replicas and cuts for ranks of these speeds in order, with a stage's replicas
    adjacent; None if they are too few.

    The pipeline is not shallower than asked for unless ranks are too few, since less depth means
    more memory on each rank. If the micro-batches are not known, it has the depth asked for.
    """
    deepest = min(len(speeds), layers)
    least = min(pipeline, deepest)
    depths = range(least, (least if micro_batches is None else deepest) + 1)
    found = []
    for depth in depths if deepest else ():
        replicas = len(speeds) // depth
        if micro_batches is not None:
            replicas = min(replicas, micro_batches)
        slowest = [min(speeds[stage * replicas : (stage + 1) * replicas]) for stage in range(depth)]
        counts = deal_layers(layers, slowest)
        slot_s = max(count / speed for count, speed in zip(counts, slowest, strict=True))
        slots = depth if micro_batches is None else -(-micro_batches // replicas) + depth - 1
        found.append((slots * slot_s, depth, replicas, "-".join(map(str, counts))))
    return min(found)[1:] if found else None


def plan_by_data_sheets(conf: JobConf, micro_batches: int | None) -> Layouts:
    """Return layouts for every number of nodes that the run may have; raise PlanningError for an
    unknown GPU."""
    from vjob.jobs.planning.question import choose_product, name_gpu

    size = 4 if conf.train.precision == "fp32" else 2
    nodes = conf.cluster.nodes
    speeds = [choose_product(name_gpu(group))[0].compute_flops_s(size) for group in nodes]
    groups = build_groups(nodes)
    assert conf.parallel.partition != "auto", "without a partition there are no layouts to plan"
    layers = sum(conf.parallel.partition.counts)
    tensor, depth = conf.parallel.tensor, require_number(conf.parallel.pipeline)
    found: Layouts = {}
    for counts in itertools.islice(list_node_counts(conf), MOST_LAYOUTS):
        chosen = [(index, number) for index, number in enumerate(counts) if number]
        shares = [
            speeds[index]
            for index, number in chosen
            for _ in range(number * (groups[index].ranks // tensor))
        ]
        best = choose_by_speed(shares, layers, micro_batches, depth)
        if best is not None:
            found[name_nodes([groups[i] for i, n in chosen for _ in range(n)])] = best
    return found
