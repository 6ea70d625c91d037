"""Bounds of a chain that take the sum of several things' largest, by cells of what each may be.

A step takes at least, with the largest taken over the stages

    sum of ways + largest beyond + largest (optimizer + weights back)

Each alone is least for another partition. So what the two largest may be is cut into cells: within
a cell stages hold only what stays below its upper edges, the sum of ways is made least exactly, and
the lower edges are added. The least of all cells bounds every partition; a finer grid comes closer.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.tables import Array

ROUNDING = 1e-12


class Prefix(NamedTuple):
    """Of the stages whose segments are chosen; arrays are by the last one's end."""

    before: Array = 0.0
    """Upstream of the next stage, there and back."""
    work: Array = 0.0
    """What these stages need."""
    beyond: Array = 0.0
    """The largest of theirs."""
    down: Array = 0.0
    """Upstream of the next stage, there alone."""
    done: Array = 0.0
    """When their sums over the replicas are done."""
    first: Array = 0.0
    """What follows the pipeline, by the first stage."""
    ending: Array = 0.0
    """The largest optimizer and weights back."""

    def pick(self, row: int | Array) -> Prefix:
        return Prefix(*(values[row] for values in self))


def extend(chain: Chain, stage: int, begin: int | Array, so_far: Prefix) -> Prefix:
    """With a stage that begins there and ends anywhere; of many at once, each figure a column."""
    table, own = chain.stages[stage], chain.behind[stage]
    work, way = table.work[begin], chain.upstream[stage][begin]
    ending = table.optimizer[begin] + chain.sums[stage][1][begin]
    return Prefix(
        before=so_far.before + way,
        work=np.maximum(so_far.work, so_far.before + work),
        beyond=np.maximum(
            so_far.beyond, np.zeros_like(way) if chain.puts_off else own.find_beyond(begin)
        ),
        down=so_far.down + table.way_down[begin],
        done=np.maximum(so_far.done, so_far.down + work + own.unhidden[begin]),
        first=np.broadcast_to(chain.first_tail if stage == 0 else so_far.first, way.shape),
        ending=np.maximum(so_far.ending, ending),
    )


def bound_prefix(chain: Chain, after: int, so_far: Prefix) -> Array:
    """What no partition that begins so takes less than, before stage `after`."""
    behind = chain.behind[after]
    step = np.maximum(so_far.work, so_far.before + behind.least)
    if not chain.puts_off:
        largest = np.maximum(so_far.beyond, behind.largest)
        step = np.maximum(step, so_far.before + behind.round + largest)
    done = np.maximum(so_far.done, so_far.down + behind.summed)
    return np.maximum(step + so_far.first, done) + chain.tail


def _name_beyond(chain: Chain, s: int) -> int:
    """Stages that are alike have one `beyond`, or one for each way in which the chain goes on."""
    return id(chain.behind[s]) if chain.stages[s].more_rounds else 0


class Cells:
    """Of one chain, for partitions that may take less than `limit`."""

    def __init__(self, chain: Chain, limit: float, beyonds: int, tails: int) -> None:
        self.chain, self.data_s = chain, chain.tables.training.data_s
        self.tails = [
            stage.optimizer + sums[1] for stage, sums in zip(chain.stages, chain.sums, strict=True)
        ]
        """Of each stage what it does when all have agreed, by begin and end."""
        pipeline = chain.bound - chain.tail
        low, high = self._find_least_tail(), limit - pipeline
        tail_edges = np.linspace(low, max(low, high), tails + 1)
        beyond_edges = np.array([0.0, np.inf])
        if not chain.puts_off:
            low = float(chain.behind[0].largest[0])
            high = limit - float(chain.behind[0].round[0]) - tail_edges[0]
            beyond_edges = np.linspace(low, max(low, high), beyonds + 1)
        cells = np.array(
            [
                (a, b, c, d)
                for a, b in itertools.pairwise(beyond_edges)
                for c, d in itertools.pairwise(tail_edges)
            ]
        )
        self.beyond, self.tail = cells[:, 0], cells[:, 2]
        self.most_beyond = cells[:, 1] * (1 + ROUNDING)
        self.most_tail = cells[:, 3] * (1 + ROUNDING)
        self.way, self.work, self.summed = self._sum_up()

    def _find_least_tail(self) -> float:
        """The least that the largest tail can be."""
        behind = np.full(self.chain.size + 1, np.inf)
        behind[self.chain.size] = 0.0
        for stage, tail in zip(reversed(self.chain.stages), reversed(self.tails), strict=True):
            fits = np.where(stage.allowed, tail, np.inf)
            behind = np.maximum(fits, behind).min(axis=1)
        return float(behind[0])

    def _sum_up(self) -> tuple[list[Array], list[Array], list[Array]]:
        """By stage, arrays by cell and first segment: as Behind's round, least and summed."""
        chain, size = self.chain, self.chain.size
        end = np.full((len(self.beyond), size + 1), np.inf)
        end[:, size] = 0.0
        ways, works, sums = [end], [end], [end]
        known: dict[tuple[int, int, int], tuple[Array, ...]] = {}
        for s in range(chain.num_stages - 1, 0, -1):
            key = id(chain.stages[s]), id(chain.sums[s]), _name_beyond(chain, s)
            if key not in known:
                known[key] = self._cut_runs(s)
            ends, way, up, down, work, done, barred = known[key]
            ways.insert(0, (way + (ways[0][:, ends] + barred)).min(axis=2))
            works.insert(0, (np.maximum(work, up + works[0][:, ends]) + barred).min(axis=2))
            sums.insert(0, (np.maximum(done, down + sums[0][:, ends]) + barred).min(axis=2))
        return [end, *ways], [end, *works], [end, *sums]

    def _cut_runs(self, s: int) -> tuple[Array, ...]:
        """Of a stage's runs, by begin and length, and by cell which of them are barred."""
        chain, size = self.chain, self.chain.size
        stage, own = chain.stages[s], chain.behind[s]
        beyond = np.zeros_like(stage.way) if chain.puts_off else own.find_beyond()
        open_ = stage.allowed & (beyond <= self.most_beyond[-1])
        open_ &= self.tails[s] <= self.most_tail[-1]
        begins, ends = np.nonzero(open_)
        longest = int((ends - begins).max()) if len(begins) else 0
        a = np.arange(size + 1)[:, None]
        e = a + np.arange(longest + 1)[None, :]
        inside = e <= size
        e = np.minimum(e, size)
        shut = ~(open_[a, e] & inside)
        barred = (
            shut
            | (beyond[a, e] > self.most_beyond[:, None, None])
            | (self.tails[s][a, e] > self.most_tail[:, None, None])
        )
        way = np.zeros_like(stage.way) if chain.puts_off else stage.way
        cut = [
            np.where(shut, 0.0, values[a, e])
            for values in (
                way,
                chain.upstream[s],
                stage.way_down,
                stage.work,
                stage.work + own.unhidden,
            )
        ]
        return (e, *cut, np.where(barred, np.inf, 0.0))

    def bound(self, after: int, ends: Array, so_far: Prefix) -> Array:
        """As `bound_prefix`, of prefixes that end there."""
        step = np.maximum(so_far.work, so_far.before + self.work[after][:, ends])
        if not self.chain.puts_off:
            largest = np.maximum(so_far.beyond, self.beyond[:, None])
            step = np.maximum(step, so_far.before + self.way[after][:, ends] + largest)
        done = np.maximum(so_far.done, so_far.down + self.summed[after][:, ends])
        step = np.maximum(step + so_far.first, done)
        step += np.maximum(so_far.ending, self.tail[:, None])
        barred = so_far.beyond > self.most_beyond[:, None]
        barred |= so_far.ending > self.most_tail[:, None]
        found: Array = np.where(barred, np.inf, step).min(axis=0)
        return found + self.data_s

    def find_least(self) -> float:
        """No partition takes less, or none takes less than `limit`."""
        ends = np.flatnonzero(self.chain.stages[0].allowed[0])
        if not len(ends):
            return float("inf")
        first = extend(self.chain, 0, 0, Prefix()).pick(ends)
        return float(self.bound(1, ends, first).min())
