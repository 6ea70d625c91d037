"""Which node holds which stages: a placed pipeline told node by node, as a job asks for them.

stages 0 1 on one node of 4, stage 2 on two nodes     a 4 [0, 1] | b 4 [2] | b 2 [2]
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.sites import Placed


@dataclass(frozen=True, kw_only=True)
class UsedNode:
    """One node of a plan, or several in a row that are alike."""

    kind: str
    """Name of its nodes in the cluster."""
    ranks: int
    """GPUs of it that are used; the rest is left over."""
    stages: tuple[int, ...]
    """What is held by it, or by all of them."""
    count: int = 1


def list_used_nodes(placed: Placed, tensor: int) -> list[UsedNode]:
    """In the order in which stages fill them, which is that of their ranks."""
    found: list[UsedNode] = []
    names = iter(placed.nodes)
    for stage, site in enumerate(placed.sites):
        routes = placed.boundaries[stage - 1].routes if stage else ()
        ranks = [count * tensor for _, count in site.group]
        if stage and len(ranks) == 1 and all(route.where == "intra" for route in routes):
            last = found[-1]
            stages = (*last.stages, stage)
            found[-1] = replace(last, ranks=last.ranks + ranks[0], stages=stages)
            continue
        found += [UsedNode(kind=next(names), ranks=each, stages=(stage,)) for each in ranks]
    return found


def join_alike(nodes: list[UsedNode]) -> list[UsedNode]:
    """Neighbours of one kind with as many ranks each, as one entry."""
    joined = []
    for (kind, ranks), group in itertools.groupby(nodes, key=lambda node: (node.kind, node.ranks)):
        held = list(group)
        stages = tuple(sorted({stage for node in held for stage in node.stages}))
        joined.append(UsedNode(kind=kind, ranks=ranks, stages=stages, count=len(held)))
    return joined


def find_left_over(cluster: Cluster, nodes: list[UsedNode]) -> dict[str, tuple[int, int]]:
    """Of each kind the nodes that are not used, and the GPUs that stay idle on used ones."""
    left = {}
    for kind in cluster.kinds:
        used = [node for node in nodes if node.kind == kind.name]
        idle = sum(kind.gpus - node.ranks for node in used)
        if len(used) < kind.count or idle:
            left[kind.name] = kind.count - len(used), idle
    return left
