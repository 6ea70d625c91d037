"""Compute the layout of a conf: ranks, replicas and node groups, and which numbers are `auto`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from varuna_core.records.plan import GroupPlan
from vjob.jobs.conf.schema import Auto, JobConf, NodeGroup

MOST_LAYOUTS = 256
"""The most numbers of nodes that are planned for, since every node reads plan.json."""


def is_open(conf: JobConf) -> bool:
    """Return True if the planner must choose the layout before the conf can run."""
    return "auto" in (conf.parallel.pipeline, conf.train.micro_batch_size)


def close_layout(conf: JobConf) -> JobConf:
    """Return the conf with 1 for each number left to the planner, to check the rest."""
    parallel, train = conf.parallel, conf.train
    if parallel.pipeline == "auto":
        parallel = replace(parallel, pipeline=1)
    if train.micro_batch_size == "auto":
        train = replace(train, micro_batch_size=1)
    return replace(conf, parallel=parallel, train=train)


def require_number(value: int | Auto) -> int:
    """Return the number; planning/resolve_auto.py must have replaced `auto` before."""
    assert value != "auto", "auto must be resolved before the conf is used"
    return value


def get_world(conf: JobConf) -> int:
    """Return the number of ranks."""
    return sum(group.count * group.num_ranks for group in conf.cluster.nodes)


def get_replicas(conf: JobConf) -> int | None:
    """Return the number of replicas; None if the ranks cannot be divided evenly into replicas."""
    parallel = conf.parallel
    if parallel.data != "auto":
        return parallel.data
    replicas, left = divmod(get_world(conf), require_number(parallel.pipeline) * parallel.tensor)
    return replicas if replicas and not left else None


def choose_order(conf: JobConf, data: int) -> str:
    """Return the order of the ranks; for `auto`, replicas of the same stage are adjacent, on one
    node if they fit, since their gradients are large."""
    if conf.parallel.order != "auto":
        return conf.parallel.order
    return "data" if data > 1 else "pipeline"


def build_groups(nodes: Sequence[NodeGroup]) -> tuple[GroupPlan, ...]:
    """Return the node groups of a plan, each with its first node and first rank."""
    found = []
    first_node = first_rank = 0
    for group in nodes:
        found.append(
            GroupPlan(
                name=group.group,
                count=group.count,
                queue=group.queue,
                gpu_type=group.gpu_type,
                gpus=group.num_gpus,
                devices=group.devices,
                cpus=group.cpus,
                memory_gb=group.memory_gb,
                interface=None if group.interface == "auto" else group.interface,
                ranks=group.num_ranks,
                env=dict(group.env),
                first_node=first_node,
                first_rank=first_rank,
            )
        )
        first_node += group.count
        first_rank += group.count * group.num_ranks
    return tuple(found)


def list_node_counts(conf: JobConf) -> Iterator[tuple[int, ...]]:
    """Yield the allowed node counts, one number for each group, nearest to all nodes first."""
    groups, morph = conf.cluster.nodes, conf.morph
    asked = sum(group.count for group in groups)
    most = [group.count for group in groups]
    if len(groups) == 1:
        most[0] = max(most[0], morph.max_nodes or 0)
    counts = itertools.product(*(range(n + 1) for n in most))
    few, many = morph.min_nodes or 1, morph.max_nodes or asked
    wanted = [n for n in counts if few <= sum(n) <= many and sum(n) != asked]
    yield from sorted(wanted, key=lambda n: abs(sum(n) - asked))
