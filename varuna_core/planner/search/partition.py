"""Find the best partition of a chain and prove it: branch and bound on the simulated step.

```
start      the partition with the least bound, the min-max one
improve    every way to move a segment from one stage to another, until none helps
prove      stage by stage, all partitions whose bound is below the best; those are simulated
```

If a budget of nodes or a deadline ends the search, the result has a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.search.bounds import Cells, Prefix, bound_prefix, extend
from varuna_core.planner.search.deadline import Deadline

CLOSE = 1e-9
"""Times that differ by a smaller share than this count as equal, since sums are rounded."""
BATCH = 256
TOGETHER = 24
"""Number of prefixes that are extended at once: with more, each takes less time; with fewer, plans
are found sooner."""
MOST_MOVES = 400
COARSE, FINE = (6, 3), (12, 5)
"""Numbers of cells of a bound; the time to build the cells grows with them."""

Array = Any
IsLate = Callable[[], bool]
"""Function that returns True once the time of a search is up."""


def never() -> bool:
    """Return False: the clock of a search without a time limit."""
    return False


@dataclass(frozen=True, kw_only=True)
class BestPartition:
    """The best partition found, with a lower bound."""

    bounds: Bounds
    step_s: float
    bound_s: float
    """Lower bound for all partitions; equal to `step_s` once that is proved optimal."""

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(e - a for a, e in zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s else 0.0


def find_partition(
    chain: Chain,
    *,
    incumbent: float = float("inf"),
    max_nodes: int = 100_000,
    deadline: Deadline | None = None,
    improving: bool = True,
    cells: tuple[int, int] = FINE,
) -> BestPartition | None:
    """Return the best partition; None if nothing fits or the bound is not better than `incumbent`.

    Without `improving`, partitions no better than the incumbent are ruled out but not optimised.
    """
    if not chain.bound < incumbent * (1 - CLOSE):
        return None
    best, best_s = improve(chain) if improving else start(chain)
    limit = min(best_s, incumbent)
    proved = chain.bound
    if proved < limit * (1 - CLOSE):
        search = _Search(chain, best, best_s, incumbent, max_nodes, deadline, cells)
        proved = search.run()
        best, best_s = search.best, search.best_s
        limit = min(best_s, incumbent)
    if proved >= limit * (1 - 2 * CLOSE):
        proved = limit
    return BestPartition(bounds=best, step_s=best_s, bound_s=min(proved, best_s))


def start(chain: Chain) -> tuple[Bounds, float]:
    """Return the partition with the least bound, and its time."""
    bounds = chain.follow_bound()
    assert bounds is not None
    return bounds, chain.compute_step(bounds)


def improve(
    chain: Chain, begin: Bounds | None = None, is_late: IsLate = never
) -> tuple[Bounds, float]:
    """Search locally from `begin`, or from the partition with the least bound, until no move helps
    or time is up."""
    best, best_s = start(chain) if begin is None else (begin, chain.compute_step(begin))
    while not is_late():
        moved = list_moves(chain, best)
        moved = moved[chain.select_fitting(moved)]
        if not len(moved):
            return best, best_s
        times = chain.compute_steps(moved)
        place = int(times.argmin())
        if not times[place] < best_s * (1 - CLOSE):
            return best, best_s
        best, best_s = tuple(moved[place].tolist()), float(times[place])
    return best, best_s


@lru_cache(maxsize=256)
def _compute_shifts(stages: int) -> Array:
    """Return boundary shifts that move a segment between stages, at most MOST_MOVES of them."""
    spans = sorted(
        ((first, last) for first in range(1, stages) for last in range(first, stages)),
        key=lambda span: (span[1] - span[0], span),
    )[: MOST_MOVES // 2]
    shifts = np.zeros((2 * len(spans), stages + 1), dtype=int)
    for row, (first, last) in enumerate(spans):
        shifts[2 * row, first : last + 1] = 1
        shifts[2 * row + 1, first : last + 1] = -1
    return shifts


def list_moves(chain: Chain, bounds: Bounds) -> Array:
    """Return partitions with a segment or more moved between stages; they may not fit."""
    moved = np.array(bounds) + _compute_shifts(chain.num_stages)
    fits = ((moved >= 0) & (moved <= chain.size)).all(axis=1)
    return moved[fits & (np.diff(moved, axis=1) >= 0).all(axis=1)]


def is_allowed(chain: Chain, bounds: Bounds) -> bool:
    if not all(0 <= a <= e <= chain.size for a, e in itertools.pairwise(bounds)):
        return False
    return bool(chain.select_fitting(np.array([bounds]))[0])


class _Block(NamedTuple):
    """Prefixes of partitions as rows, all with the same number of stages."""

    cuts: Array
    so_far: Prefix
    bound: Array

    def pick(self, rows: Array) -> _Block:
        return _Block(self.cuts[rows], self.so_far.pick(rows), self.bound[rows])


class _Search:
    def __init__(
        self,
        chain: Chain,
        best: Bounds,
        best_s: float,
        incumbent: float,
        max_nodes: int,
        deadline: Deadline | None,
        cells: tuple[int, int],
    ) -> None:
        self.chain, self.best, self.best_s = chain, best, best_s
        self.incumbent, self.nodes = incumbent, max_nodes
        self.is_late = deadline.is_over if deadline else never
        self.cells = Cells(chain, min(best_s, incumbent), *cells)
        self.leaves: list[Bounds] = []
        self.open = float("inf")
        """The least bound of the unexplored partitions."""

    @property
    def limit(self) -> float:
        """The time that a partition must beat to be of interest."""
        return min(self.best_s, self.incumbent) * (1 - CLOSE)

    def run(self) -> float:
        """Search, and return a lower bound for all partitions."""
        begin = _Block(np.zeros((1, 1), dtype=int), Prefix(*np.zeros((7, 1))), np.zeros(1))
        stack = [begin]
        self.nodes += 1  # the empty beginning costs nothing
        while stack:
            block = stack.pop()
            near = block.bound < self.limit
            if not near.any():
                continue
            if self.nodes <= 0 or self.is_late():
                self.open = min(self.open, float(block.bound[near].min()))
                continue
            stack += self._extend(block.pick(near))
        self._simulate()
        return min(self.best_s, self.open)

    def _extend(self, block: _Block) -> list[_Block]:
        """Extend each prefix by a stage; the most promising ones come last."""
        chain, stage = self.chain, block.cuts.shape[1] - 1
        self.nodes -= len(block.cuts)
        so_far = Prefix(*(values[:, None] for values in block.so_far))
        longer = extend(chain, stage, block.cuts[:, -1], so_far)
        rows, ends = np.nonzero(bound_prefix(chain, stage + 1, longer) < self.limit)
        cuts = np.concatenate([block.cuts[rows], ends[:, None]], axis=1)
        if stage == chain.num_stages - 1:
            self.leaves += map(tuple, cuts[ends == chain.size].tolist())
            if len(self.leaves) >= BATCH:
                self._simulate()
            return []
        longer = Prefix(*(values[rows, ends] for values in longer))
        found = _Block(cuts, longer, self.cells.bound(stage + 1, ends, longer))
        order = np.argsort(found.bound, kind="stable")
        order = order[found.bound[order] < self.limit]
        blocks = [found.pick(order[at : at + TOGETHER]) for at in range(0, len(order), TOGETHER)]
        return blocks[::-1]

    def _simulate(self) -> None:
        if not self.leaves:
            return
        times = self.chain.compute_steps(self.leaves)
        place = int(times.argmin())
        if times[place] < self.best_s:
            self.best, self.best_s = self.leaves[place], float(times[place])
        self.leaves.clear()
