"""The partition whose slowest stage is as fast as can be: exact, in microseconds.

A probe asks whether every stage can take at most T: each in turn takes the longest run of segments
that it can, which is best if one more segment never makes a stage faster or smaller. Bisection, but
each probe ends on a figure that a stage really has, so it ends at the optimum, not near it:

    feasible      the bound from above becomes the slowest stage that was found
    not feasible  the bound from below becomes the next larger figure of any stage on the way

Where a stage between the first and the last must hold something, the longest run may leave it a
segment that is dear to it: then the optimum is found by dynamic programming.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from varuna_core.planner.profile.errors import PlanningError


@dataclass(frozen=True, kw_only=True)
class MinMax:
    """Each stage's segments as counts, and the slowest stage's time."""

    counts: tuple[int, ...]
    slowest: float


def find_min_max(
    costs: Sequence[Sequence[float]],
    *,
    fixed: Sequence[float] = (),
    least: Sequence[int] = (),
    most_ends: Sequence[Sequence[int]] = (),
) -> MinMax | None:
    """None if no partition fits.

    `costs` of each stage are its segments' on the GPUs it has; `fixed` is added to a stage whatever
    it holds (messages). `least` segments a stage (0 if not given: a stage may be empty), and by
    `most_ends[stage][begin]` the last end that memory allows.
    """
    num_stages, size = len(costs), len(costs[0]) if costs else 0
    if not num_stages or any(len(row) != size for row in costs):
        raise PlanningError("costs of the same segments are needed for every stage")
    known: dict[int, list[float]] = {}  # stages on the same GPUs pass the same list
    sums = []
    for row in costs:
        if id(row) not in known:
            known[id(row)] = [0.0, *accumulate(row)]
        sums.append(known[id(row)])
    extra = list(fixed) or [0.0] * num_stages
    lows = list(least) or [0] * num_stages
    reserve = [0] * (num_stages + 1)
    for stage in range(num_stages - 1, -1, -1):
        reserve[stage] = reserve[stage + 1] + lows[stage]
    if reserve[0] > size:
        return None
    caps = most_ends or None
    if any(lows[1:-1]):
        return _find_by_table(sums, extra, lows, caps)

    def probe(limit: float) -> tuple[list[int] | None, float]:
        """Ends, and the slowest; or None, and the next figure above the limit."""
        begin, slowest, beyond = 0, 0.0, float("inf")
        ends = []
        for stage in range(num_stages):
            prefix, more = sums[stage], extra[stage]
            base = prefix[begin]
            last = size - reserve[stage + 1]
            if caps is not None and caps[stage][begin] < last:
                last = caps[stage][begin]
            lowest = begin + lows[stage]
            if last < lowest:
                return None, beyond
            end = bisect_right(prefix, base + limit - more, lowest, last + 1) - 1
            # Roundings differ: what counts is a stage's time as it is told.
            while end < last and prefix[end + 1] - base + more <= limit:
                end += 1
            while end >= lowest and prefix[end] - base + more > limit:
                end -= 1
            if end < last and prefix[end + 1] - base + more < beyond:
                beyond = prefix[end + 1] - base + more
            if end < lowest:
                return None, beyond
            taken = prefix[end] - base + more
            if taken > slowest:
                slowest = taken
            ends.append(end)
            begin = end
        return (ends, slowest) if begin == size else (None, beyond)

    best, high = probe(float("inf"))
    if best is None:
        return None
    low = max(extra)
    share = sum(map(min, zip(*costs, strict=True))) if len(known) > 1 else sums[0][size]
    low = max(low, share / num_stages * (1 - 1e-12))
    while low < high:
        middle = (low + high) / 2
        if not low < middle < high:
            middle = low
        ends, found = probe(middle)
        if ends is not None:
            best, high = ends, min(found, high)
            if middle == low:
                break
        else:
            low = found
    counts = [end - begin for begin, end in zip([0, *best], best, strict=False)]
    return MinMax(counts=tuple(counts), slowest=high)


def _find_by_table(
    sums: Sequence[Sequence[float]],
    extra: Sequence[float],
    lows: Sequence[int],
    caps: Sequence[Sequence[int]] | None,
) -> MinMax | None:
    """least[a]: the slowest of this stage and those behind it, if it begins at segment a."""
    size = len(sums[0]) - 1
    begins, ends = np.arange(size + 1)[:, None], np.arange(size + 1)[None, :]
    least = np.full(size + 1, np.inf)
    least[size] = 0.0
    chosen = []
    for stage in range(len(sums) - 1, -1, -1):
        prefix = np.array(sums[stage])
        allowed = ends >= begins + lows[stage]
        if caps is not None:
            allowed &= ends <= np.array(caps[stage])[:, None]
        taken = np.where(allowed, prefix[None, :] - prefix[:, None] + extra[stage], np.inf)
        table = np.maximum(taken, least[None, :])
        choice = table.argmin(axis=1)
        least = table[np.arange(size + 1), choice]
        chosen.append(choice)
    if not np.isfinite(least[0]):
        return None
    counts, begin = [], 0
    for choice in reversed(chosen):
        counts.append(int(choice[begin]) - begin)
        begin = int(choice[begin])
    return MinMax(counts=tuple(counts), slowest=float(least[0]))
