"""The nodes there are, and the ways to lay stages on them.

```
tensor 1, replicas 2, nodes of 4 GPUs       node A: stages 0 1   node B: stages 2 3
tensor 1, replicas 8, nodes of 4 GPUs       nodes A and B: stage 0   nodes C and D: stage 1
```

Ranks that share layers lie on one node. Nodes are filled in turn; where replicas do not fill them,
the rest of their GPUs is left over, and so are nodes behind the last stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from varuna_core.planner.errors import PlanningError
from varuna_core.planner.sites import Boundary, Placed, Route, Site


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes that are alike."""

    name: str
    gpu: str
    """As the profile calls it."""
    gpus: int
    """On each node."""
    count: int
    price_per_hour: float | None = None
    """Of one node."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All that a plan may use."""

    kinds: tuple[NodeKind, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise PlanningError(f"a cluster of nodes {names}: each kind once, at least one")
        for kind in self.kinds:
            if kind.gpus < 1 or kind.count < 1:
                raise PlanningError(f"{kind.count} nodes {kind.name!r} of {kind.gpus} GPUs")

    @property
    def num_gpus(self) -> int:
        return sum(kind.gpus * kind.count for kind in self.kinds)

    @property
    def num_nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)


Order = tuple[tuple[NodeKind, int], ...]
"""Nodes, and the most stages that each takes: fewer than it could where a block of a kind ends."""


def place(nodes: Order, stages: int, tensor: int, replicas: int) -> Placed | None:
    """So many stages on these nodes in turn; None if they do not suffice, or one is not needed."""
    slots: list[list[tuple[int, str]]] = []
    """Of each stage its replicas: the node's place, the GPU."""
    filling: list[tuple[int, str]] = []
    for number, (node, most) in enumerate(nodes):
        if len(slots) == stages:
            return None
        groups = node.gpus // tensor
        if not groups:
            return None
        if filling or groups < replicas:
            filling += [(number, node.gpu)] * min(groups, replicas - len(filling))
            if len(filling) == replicas:
                slots.append(filling)
                filling = []
        else:
            for _ in range(min(groups // replicas, most, stages - len(slots))):
                slots.append([(number, node.gpu)] * replicas)
    if filling or len(slots) < stages:
        return None
    sites = tuple(_make_site(slot, tensor) for slot in slots)
    pairs = itertools.pairwise(slots)
    boundaries = tuple(_make_boundary(before, after, tensor) for before, after in pairs)
    return Placed(sites, boundaries, tuple(node.name for node, _ in nodes))


def _make_site(slots: Sequence[tuple[int, str]], tensor: int) -> Site:
    group = tuple((gpu, n) for (_, gpu), n in sorted(Counter(slots).items()))
    return Site(tuple(sorted({gpu for _, gpu in slots})), group, tensor)


def _make_boundary(
    before: Sequence[tuple[int, str]], after: Sequence[tuple[int, str]], tensor: int
) -> Boundary:
    crossing = [(a, b) for a, b in zip(before, after, strict=True) if a[0] != b[0]]
    leaving = Counter(a for a, _ in crossing)
    coming = Counter(b for _, b in crossing)
    routes = set()
    for a, b in zip(before, after, strict=True):
        if a[0] == b[0]:
            routes.add(Route(a[1], b[1], "intra", 1))
        else:
            routes.add(Route(a[1], b[1], "inter", max(leaving[a], coming[b]) * tensor))
    return Boundary(tuple(sorted(routes, key=str)))


def count_stages(kind: NodeKind, tensor: int, replicas: int) -> int:
    """The most that all nodes of a kind hold by themselves."""
    groups = kind.gpus // tensor
    if not groups:
        return 0
    if groups >= replicas:
        return kind.count * (groups // replicas)
    return kind.count // -(-replicas // groups)


def list_all_orders(cluster: Cluster, most: int) -> list[Order] | None:
    """Every order of every choice of nodes; None if there are more than `most`."""
    orders: list[Order] = []

    def extend(order: Order, left: tuple[int, ...]) -> bool:
        for number, kind in enumerate(cluster.kinds):
            if left[number]:
                longer = (*order, (kind, kind.gpus))
                orders.append(longer)
                rest = (*left[:number], left[number] - 1, *left[number + 1 :])
                if len(orders) > most or not extend(longer, rest):
                    return False
        return True

    return orders if extend((), tuple(kind.count for kind in cluster.kinds)) else None


def list_blocks(
    cluster: Cluster, counts: Sequence[int], tensor: int, replicas: int
) -> Iterator[Order]:
    """Nodes for `counts` stages of each kind, the kinds' blocks in every order."""
    used = [(kind, n) for kind, n in zip(cluster.kinds, counts, strict=True) if n]
    for order in itertools.permutations(used):
        nodes: list[tuple[NodeKind, int]] = []
        for kind, stages in order:
            groups = kind.gpus // tensor
            if groups >= replicas:
                each = groups // replicas
                nodes += [(kind, min(each, stages - n)) for n in range(0, stages, each)]
            else:
                nodes += [(kind, 1)] * (stages * -(-replicas // groups))
        yield tuple(nodes)
