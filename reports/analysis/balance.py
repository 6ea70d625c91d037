"""Work of the stages against each other, and the partition that would make it even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna_core.records.partition import PartitionError, parse_counts


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Another partition."""

    partition: tuple[int, ...]
    slowest_now_s: float
    slowest_then_s: float
    """What the slowest stage would take; messages and bubbles are not in it."""

    def __str__(self) -> str:
        return "-".join(map(str, self.partition))

    @property
    def gain(self) -> float:
        """The part of the slowest stage's time that is saved."""
        return 1 - self.slowest_then_s / self.slowest_now_s if self.slowest_now_s else 0.0


def parse_partition(text: str) -> tuple[int, ...]:
    """`0-11-8`; empty where it is no such thing."""
    try:
        return parse_counts(text.strip())
    except PartitionError:
        return ()


def suggest_partition(partition: Sequence[int], work_s: Sequence[float]) -> Suggestion | None:
    """The partition whose slowest stage is fastest; None where this one is, or nothing is known.

    Layers are alike, and a layer costs on each stage what it costs there now: stages on faster GPUs
    take more. What a stage without layers does (an embedding, a loss) stays with it.
    """
    if len(partition) != len(work_s) or not 0 < sum(partition) < 10_000 or min(work_s) < 0:
        return None
    known = sorted(work / layers for layers, work in zip(partition, work_s, strict=True) if layers)
    typical = known[len(known) // 2]
    costs, fixed = [], []
    for layers, work in zip(partition, work_s, strict=True):
        costs.append(work / layers if layers else typical)
        fixed.append(0.0 if layers else work)
    counts = [0] * len(partition)
    for _ in range(sum(partition)):
        best = min(
            range(len(counts)), key=lambda at: (fixed[at] + (counts[at] + 1) * costs[at], at)
        )
        counts[best] += 1
    then = max(f + n * c for f, n, c in zip(fixed, counts, costs, strict=True))
    now = max(work_s)
    if not now or then >= now * 0.999:
        return None
    return Suggestion(partition=tuple(counts), slowest_now_s=now, slowest_then_s=then)
