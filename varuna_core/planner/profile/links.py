"""How long a message takes on a link: time over size, piecewise linear, never zero for no data.

```
time  │            .-'   beyond the last point the slope of the last piece goes on
      │        .-'
      │  _.-'            before the first point its time: what is small costs the latency
      └────────────────  bytes
```

What shares a link is one larger message: k flows of b bytes take as long as k x b bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from varuna_core.planner.profile.errors import MissingData, PlanningError

Array = Any
Source = Literal["measured", "interpolated", "estimate"]
Where = Literal["intra", "inter"]
"""Between two GPUs of a node, or of two nodes."""


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """One direction of a link."""

    points: tuple[tuple[float, float], ...]
    """(bytes, seconds), both growing."""
    source: Source = "measured"

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanningError("a link without a measured message")
        for (size, took), (size2, took2) in zip(self.points, self.points[1:], strict=False):
            if size2 <= size or took2 < took:
                raise PlanningError(f"a link's points must grow: {size2, took2} after {size, took}")
        if self.points[0][0] < 0 or self.points[0][1] < 0:
            raise PlanningError(f"a link's first point is {self.points[0]}")

    def find_time(self, num_bytes: float) -> float:
        points = self.points
        if num_bytes <= 0:
            return 0.0
        if num_bytes <= points[0][0] or len(points) == 1:
            # One point alone is a bandwidth.
            return points[0][1] * max(1.0, num_bytes / points[0][0] if points[0][0] else 1.0)
        place = min(bisect_right(points, (num_bytes, float("inf"))), len(points) - 1)
        (size, took), (size2, took2) = points[place - 1], points[place]
        return took + (num_bytes - size) * (took2 - took) / (size2 - size)

    def find_times(self, num_bytes: Array) -> Array:
        """`find_time` of many."""
        sizes, tooks = map(np.array, zip(*self.points, strict=True))
        if len(sizes) == 1:
            found = tooks[0] * np.maximum(1.0, num_bytes / sizes[0] if sizes[0] else 1.0)
        else:
            slope = (tooks[-1] - tooks[-2]) / (sizes[-1] - sizes[-2])
            beyond = np.maximum(0.0, num_bytes - sizes[-1]) * slope
            found = np.interp(num_bytes, sizes, tooks) + beyond
        return np.where(num_bytes > 0, found, 0.0)


def build_link(latency_s: float, gb_s: float, source: Source = "estimate") -> LinkTime:
    """From a latency and a bandwidth (10^9 bytes a second)."""
    if gb_s <= 0 or latency_s < 0:
        raise PlanningError(f"a link of {latency_s} s and {gb_s} GB/s")
    return LinkTime(points=((0.0, latency_s), (1e9, latency_s + 1 / gb_s)), source=source)


LinkKey = tuple[str, str, Where]
"""From a GPU of this kind to one of that kind."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """All links that were measured or estimated."""

    links: dict[LinkKey, LinkTime]
    all_reduces: dict[tuple[str, int, int], LinkTime]
    """Measured sums over groups: (kind, ranks, ranks of them on a node) to time over bytes."""

    def find(self, sender: str, receiver: str, where: Where) -> LinkTime:
        """One direction; the other way's where only that was measured."""
        link = self.links.get((sender, receiver, where)) or self.links.get(
            (receiver, sender, where)
        )
        if link is None:
            raise MissingData(
                f"the profile has no {where}-node link from {sender} to {receiver}: profile it, "
                "or give its latency and bandwidth"
            )
        return link

    def find_all_reduce(
        self, nodes: Sequence[tuple[str, int]], num_bytes: Array, sharing: int = 1
    ) -> tuple[Array, Source]:
        """Time of a sum over a group: its nodes' kinds, and its ranks on each.

        A measured group's where there is one. Else by rings: within each node, then over the
        nodes, then back within; `sharing` groups use the links between nodes at the same time.
        """
        size = sum(count for _, count in nodes)
        num_bytes = np.asarray(num_bytes, dtype=float)
        if size <= 1:
            return np.zeros_like(num_bytes), "measured"
        kinds = {kind for kind, _ in nodes}
        counts = {count for _, count in nodes}
        if len(kinds) == len(counts) == 1:
            kind, count = nodes[0]
            measured = self.all_reduces.get((kind, size, count))
            if measured is not None:
                return measured.find_times(num_bytes * sharing), "measured"
        inner = np.zeros_like(num_bytes)
        for kind, count in nodes:
            if count > 1:
                link = self.find(kind, kind, "intra")
                # Reduce-scatter and all-gather: 2 (n - 1) messages of an n-th.
                took = 2 * (count - 1) * link.find_times(num_bytes / count)
                inner = np.maximum(inner, took)
        outer = np.zeros_like(num_bytes)
        if len(nodes) > 1:
            # Each rank of a node goes on with its share: together the node's link carries all.
            share = num_bytes / len(nodes) * sharing
            pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
            for a, b in {(a, b) for (a, _), (b, _) in pairs}:
                took = 2 * (len(nodes) - 1) * self.find(a, b, "inter").find_times(share)
                outer = np.maximum(outer, took)
        return inner + outer, "estimate"
