"""The ways to place a pipeline, by how many stages each kind of place has.

Where there are few nodes: every order of every choice of them. Where there are many: the nodes of a
kind together, the kinds in every order, any number of stages on each. The name of what was looked
through is part of a plan's certificate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import numpy as np

from varuna_core.planner.model.cluster import (
    Cluster,
    Order,
    count_stages,
    list_all_orders,
    list_blocks,
)
from varuna_core.planner.model.cluster import place as place_stages
from varuna_core.planner.model.sites import Placed
from varuna_core.planner.model.tables import Array

Tier = Literal["alike", "orders", "whole", "blocks"]
NAMES: dict[Tier, str] = {
    "alike": "nodes filled in turn (all are alike), any number of stages",
    "orders": "every order of every choice of nodes, filled in turn",
    "whole": "each kind of node used whole or not at all, kinds in every order",
    "blocks": "the nodes of a kind together, kinds in every order, any number of stages on each",
}
MOST_ORDERS = 3000
"""Of nodes; where there are more, the nodes of a kind are kept together."""


class Placements:
    """Of one cluster; `columns` of counts are kinds of places, such as ("A10", "A100")."""

    def __init__(self, cluster: Cluster, most_stages: int) -> None:
        self.cluster, self.most_stages = cluster, most_stages
        several = len(cluster.kinds) > 1
        self.orders = list_all_orders(cluster, MOST_ORDERS) if several else None
        self._groups: dict[tuple[int, int], dict[tuple[int, ...], list[Placed]]] = {}
        self._columns: dict[tuple[int, int], list[tuple[str, ...]]] = {}

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Classes to look through in turn, each within the next."""
        if len(self.cluster.kinds) == 1:
            return ("alike",)
        return ("orders",) if self.orders is not None else ("whole", "blocks")

    def list_counts(
        self, tensor: int, replicas: int, stages: int | None, tier: Tier
    ) -> tuple[list[tuple[str, ...]], Array]:
        """The kinds of places, and in rows how many stages may be on each of them."""
        if self.orders is None:
            limits = [count_stages(kind, tensor, replicas) for kind in self.cluster.kinds]
            columns: list[tuple[str, ...]] = [(kind.gpu,) for kind in self.cluster.kinds]
            ranges = [np.arange(min(limit, self.most_stages) + 1) for limit in limits]
            counts = np.stack([axis.ravel() for axis in np.meshgrid(*ranges)], axis=1)
        else:
            limits = []
            groups = self._find_groups(tensor, replicas)
            columns = self._columns[tensor, replicas]
            counts = np.array(list(groups), dtype=int).reshape(len(groups), len(columns))
        total = counts.sum(axis=1)
        fits = (total >= 1) & (total <= self.most_stages)
        if stages is not None:
            fits &= total == stages
        if tier == "whole":
            fits &= ((counts == 0) | (counts == limits)).all(axis=1)
        return columns, counts[fits]

    def iterate(self, tensor: int, replicas: int, counts: tuple[int, ...]) -> Iterator[Placed]:
        """The placements that have these counts."""
        if self.orders is not None:
            yield from self._find_groups(tensor, replicas)[counts]
            return
        for order in list_blocks(self.cluster, counts, tensor, replicas):
            placed = place_stages(order, sum(counts), tensor, replicas)
            if placed is not None:
                yield placed

    def _find_groups(self, tensor: int, replicas: int) -> dict[tuple[int, ...], list[Placed]]:
        key = tensor, replicas
        if key not in self._groups:
            assert self.orders is not None
            found: dict[Placed, Counter[tuple[str, ...]]] = {}
            seen = set()
            for order in self.orders:
                for placed in self._place_all(order, tensor, replicas):
                    same = placed.sites, placed.boundaries
                    if same not in seen:
                        seen.add(same)
                        found[placed] = Counter(site.kinds for site in placed.sites)
            columns = sorted({kinds for counted in found.values() for kinds in counted})
            groups: dict[tuple[int, ...], list[Placed]] = {}
            for placed, counted in found.items():
                groups.setdefault(tuple(counted[c] for c in columns), []).append(placed)
            self._groups[key], self._columns[key] = groups, columns
        return self._groups[key]

    def _place_all(self, order: Order, tensor: int, replicas: int) -> Iterator[Placed]:
        """With as many stages as need all these nodes."""
        most = sum(max(1, kind.gpus // tensor // replicas) for kind, _ in order)
        for stages in itertools.takewhile(lambda n: n > 0, range(most, 0, -1)):
            placed = place_stages(order, stages, tensor, replicas)
            if placed is not None and len(placed.sites) <= self.most_stages:
                yield placed
