"""Nodes with a rank that is slower than its peers on other nodes, by the ranks' own times. Pure.

The rule is that of `varuna_core.records.slow_ranks`, which status and the report follow too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_core.records.slow_ranks import PERSISTENT, find_slow_ranks

ENOUGH = PERSISTENT.num_steps


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
    steps_s: Mapping[int, float] | None = None,
) -> list[SlowNode]:
    """The slowest first. `works_s` is what each rank worked in each step, `seats` its node,
    `steps_s` what a step takes, so that a rank that costs little of it is left alone."""
    worst: dict[int, SlowNode] = {}
    # One node alone is nobody's peer.
    across = [ranks for ranks in peers if len({seats[rank] for rank in ranks}) > 1]
    for slow in find_slow_ranks(works_s, across, steps_s):
        seat = seats[slow.rank]
        worst.setdefault(
            seat,
            SlowNode(
                seat=seat,
                rank=slow.rank,
                ratio=slow.ratio,
                extra_s=slow.extra_s,
                num_steps=slow.num_steps,
                num_peers=slow.num_peers,
            ),
        )
    return list(worst.values())
