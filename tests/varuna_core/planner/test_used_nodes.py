"""Placed pipelines told node by node: every rank once, no node beyond its GPUs."""

from __future__ import annotations

import random

from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.result.plan import find_left_over, join_alike, list_filled_nodes
from varuna_core.planner.search.space import Placements


def test_every_rank_lies_on_a_node() -> None:
    draw = random.Random(1)
    seen = 0
    for _ in range(60):
        cluster = Cluster(
            kinds=tuple(
                NodeKind(name=name, gpu=name, gpus=draw.choice([1, 2, 4, 8]), count=count)
                for name, count in (("a", draw.randint(1, 3)), ("b", draw.randint(1, 3)))
            )
        )
        known = {kind.name: kind for kind in cluster.kinds}
        tensor, replicas = draw.choice([1, 2]), draw.choice([1, 2, 3, 4, 5])
        placements = Placements(cluster, 12)
        for tier in placements.tiers:
            _, counts = placements.list_counts(tensor, replicas, None, tier)
            for row in counts[:20]:
                for placed in placements.iterate(tensor, replicas, tuple(int(n) for n in row)):
                    seen += 1
                    nodes = list_filled_nodes(placed, tensor)
                    assert tuple(node.kind for node in nodes) == placed.nodes
                    assert all(node.ranks <= known[node.kind].gpus for node in nodes)
                    stages = len(placed.sites)
                    assert sum(node.ranks for node in nodes) == stages * replicas * tensor
                    assert {s for node in nodes for s in node.stages} == set(range(stages))
                    joined = join_alike(nodes)
                    assert sum(node.count for node in joined) == len(nodes)
                    left = find_left_over(cluster, nodes)
                    spare = sum(n * known[k].gpus + idle for k, (n, idle) in left.items())
                    assert spare == cluster.num_gpus - stages * replicas * tensor
    assert seen > 500
