"""Nodes that are slower than those that do the same work, by the ranks' own times. Pure.

A rank's peers are those with the same stage and device: what a stage holds is known to the layout
alone, so a rank that has none is not judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SLOW = 1.15
"""Times the median of its peers."""
SHARE = 0.8
"""In at least so many of the steps."""
ENOUGH = 20
"""Steps that all the peers have told of."""
RECENT = 60
"""The last ones count."""


@dataclass(frozen=True, kw_only=True)
class SlowNode:
    """A node with a slow rank; the worst one, where it has several."""

    seat: int
    rank: int
    ratio: float
    """Its work over that of its peers, in the median step."""
    extra_s: float
    """Seconds that it works longer than they, each step."""
    num_steps: int
    num_peers: int

    def __str__(self) -> str:
        peers = "its peer" if self.num_peers == 1 else f"its {self.num_peers} peers"
        return (
            f"rank {self.rank} works {100 * (self.ratio - 1):.0f} % longer than {peers}, by "
            f"{self.extra_s:.3g} s a step, in the last {self.num_steps} steps"
        )


def find_slow_nodes(
    works_s: Mapping[int, Mapping[int, float]],
    peers: Sequence[Sequence[int]],
    seats: Mapping[int, int],
) -> list[SlowNode]:
    """The slowest first. `works_s` is what each rank worked in each step, `seats` its node."""
    worst: dict[int, SlowNode] = {}
    for ranks in peers:
        if len({seats[rank] for rank in ranks}) < 2:
            continue  # one node alone is nobody's peer
        told = [works_s.get(rank, {}) for rank in ranks]
        steps = sorted(set.intersection(*(set(item) for item in told)))[-RECENT:]
        if len(steps) < ENOUGH:
            continue
        for rank in ranks:
            found = _judge(rank, ranks, works_s, steps, seats[rank])
            before = worst.get(seats[rank])
            if found is not None and (before is None or found.extra_s > before.extra_s):
                worst[found.seat] = found
    return sorted(worst.values(), key=lambda item: -item.extra_s)


def _judge(
    rank: int,
    ranks: Sequence[int],
    works_s: Mapping[int, Mapping[int, float]],
    steps: Sequence[int],
    seat: int,
) -> SlowNode | None:
    others = [other for other in ranks if other != rank]
    ratios, extras = [], []
    for step in steps:
        usual = statistics.median(works_s[other][step] for other in others)
        if usual <= 0:
            return None
        ratios.append(works_s[rank][step] / usual)
        extras.append(works_s[rank][step] - usual)
    share = sum(ratio > SLOW for ratio in ratios) / len(ratios)
    if share < SHARE or statistics.median(ratios) <= SLOW:
        return None
    return SlowNode(
        seat=seat,
        rank=rank,
        ratio=statistics.median(ratios),
        extra_s=statistics.median(extras),
        num_steps=len(steps),
        num_peers=len(others),
    )
