"""What no placement of an option can be below, for thousands of them at once.

For a time T each kind of place can hold at most so many segments in a row, wherever the run begins:
if all stages together hold fewer than there are, some stage takes longer than T. That is the
min-max of any order; with m micro-batches a step takes m times that, and also

    all work of one micro-batch and its messages + (m - 1) x the slowest stage
    - what it may do before its first gradient comes: as many forwards as the schedule runs ahead

The first and the last segment, which are unlike the others, come free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.sites import Site
from varuna_core.planner.model.tables import Array, Shape, Tables
from varuna_core.planner.search.space import Option

CHUNK = 4096
FEW = 50_000
"""Counts times limits."""
TIME_CELLS, ENDING_CELLS = 24, 6


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """Of options that differ in schedule and number of micro-batches alone."""

    limits: Array
    """Times of runs of segments."""
    held: Array
    """By kind of place and limit: the longest run that takes no longer."""
    bonus: Array
    """By limit: how many more the last stage holds, which need not recompute."""
    once: float
    """Work of one micro-batch, each segment where it is fastest."""
    single: Array
    """By kind of place: work of one micro-batch in the fastest segment but the first and last."""
    ends: float
    """The same of those two."""
    ratio: float
    """The largest share of a segment's work that is forward."""


class Floors:
    """Of one search."""

    def __init__(self, tables: Tables, cluster: Cluster) -> None:
        self.tables, self.cluster, self.size = tables, cluster, tables.size
        self._windows: dict[Any, _Windows] = {}
        self._tails: dict[Any, tuple[int, float, float]] = {}
        self._ends: dict[Any, tuple[Array, Array]] = {}

    def find(self, option: Option, columns: Sequence[tuple[str, ...]], counts: Array) -> Array:
        """A bound for each row of counts; inf where the segments cannot be held."""
        windows = self._find_windows(option, tuple(columns))
        parts = [counts[i : i + CHUNK] for i in range(0, len(counts), CHUNK)]
        return np.concatenate([self._find(option, windows, part) for part in parts])

    def _find(self, option: Option, windows: _Windows, counts: Array) -> Array:
        m, data_s = option.num_microbatches, self.tables.training.data_s
        if self.size < 3:
            return np.full(len(counts), data_s)
        if not len(windows.limits):
            return np.full(len(counts), np.inf)
        slowest = self._find_slowest(windows, counts)
        bound = m * slowest
        if option.schedule == "zero_bubble":
            return bound + data_s
        stages = counts.sum(axis=1)
        ahead = {"gpipe": 0 * stages, "1f1b": stages - 1}.get(option.schedule, stages)
        factor = np.maximum(0.0, m - 1 - np.minimum(ahead, m - 1) * windows.ratio)
        each, hop, tie = self._find_tail(option.shape)
        crossings = np.maximum(0, -(-stages // each) - 1)
        with np.errstate(invalid="ignore"):
            bound = np.maximum(bound, windows.once + crossings * hop + factor * slowest)
        return bound + data_s + np.where(stages > each, tie, 0.0)

    def _find_slowest(self, windows: _Windows, counts: Array) -> Array:
        """The least limit within which the places hold all segments; by halves where many are."""
        limits = np.append(windows.limits, np.inf)
        if len(counts) * len(limits) < FEW:
            enough = counts @ windows.held + windows.bonus >= self.size - 2
            return np.where(enough.any(axis=1), limits[enough.argmax(axis=1)], np.inf)
        low = np.zeros(len(counts), dtype=int)
        high = np.full(len(counts), len(windows.limits))
        held = windows.held.T
        while (low < high).any():
            middle = np.minimum((low + high) // 2, len(windows.limits) - 1)
            room = (counts * held[middle]).sum(axis=1) + windows.bonus[middle]
            enough = room >= self.size - 2
            high = np.where(enough & (low < high), middle, high)
            low = np.where(~enough & (low < high), middle + 1, low)
        return limits[low]

    def sharpen(
        self, option: Option, columns: Sequence[tuple[str, ...]], counts: Array, limit: float
    ) -> Array:
        """A closer bound for a few rows: inf where it is above `limit`.

        Places that hold no more than a time and an optimizer's time allow leave the rest to slower
        ones: for each pair of limits the work of one micro-batch is least, exactly.
        """
        m, size = option.num_microbatches, self.size - 2
        if self.size < 3 or option.schedule == "zero_bubble":
            return np.zeros(len(counts))
        windows = self._find_windows(option, tuple(columns))
        if not len(windows.limits):
            return np.full(len(counts), np.inf)
        tails = [self._find_tails(option, kinds) for kinds in columns]
        endings = [row[0] for row in tails]
        data_s = self.tables.training.data_s
        stages = counts.sum(axis=1)
        ahead = {"gpipe": 0 * stages, "1f1b": stages - 1}.get(option.schedule, stages)
        factor = np.maximum(0.0, m - 1 - np.minimum(ahead, m - 1) * windows.ratio)
        each, hop, tie = self._find_tail(option.shape)
        after = data_s + np.where(stages > each, tie, 0.0)
        crossings = np.maximum(0, -(-stages // each) - 1) * hop
        order = np.argsort(windows.single, kind="stable")
        found = np.full(len(counts), np.inf)
        most_time = windows.limits[windows.limits * m <= limit]
        for low, high in _group(most_time, TIME_CELLS):
            at = int(np.searchsorted(windows.limits, high, side="right")) - 1
            held, bonus = windows.held[:, at], windows.bonus[at]
            for least, most in _group(np.unique(np.concatenate([[0.0], *endings])), ENDING_CELLS):
                allowed = [
                    min(
                        np.searchsorted(ending, most, side="right"),
                        np.searchsorted(summed, limit - data_s - least, side="right"),
                    )
                    for ending, summed in tails
                ]
                room = counts * np.minimum(held, allowed)
                room[:, order[0]] += bonus
                left = np.full(len(counts), float(size))
                work = np.full(len(counts), windows.ends)
                for kind in order:
                    taken = np.minimum(left, room[:, kind])
                    work += taken * windows.single[kind]
                    left -= taken
                work = np.maximum(work, windows.once)
                bound = np.maximum(m * low, work + crossings + factor * low) + after + least
                found = np.where(left > 0, found, np.minimum(found, bound))
        return found

    def _find_tails(self, option: Option, kinds: tuple[str, ...]) -> tuple[Array, Array]:
        """Of runs of 1, 2, ... segments the least that optimizer and weights back take, and the
        least time until their sum over the replicas is done."""
        shape, training = option.shape, self.tables.training
        key = shape, option.num_microbatches, kinds
        if key not in self._ends:
            times = self.tables.find_times(kinds, shape.micro_batch, shape.tensor)
            ending = times.optimizer / (shape.replicas if shape.zero else 1)
            both = times.backward
            summed = option.num_microbatches * (times.forward + both)
            nodes = [kind for kind in self.cluster.kinds if (kind.gpu,) == kinds]
            groups = nodes[0].gpus // shape.tensor if len(nodes) == 1 else 0
            if groups:  # nodes with fewer GPUs than tensor ranks hold no stage
                full, rest = divmod(shape.replicas, groups)
                group = ((nodes[0].gpu, groups),) * full
                group += ((nodes[0].gpu, rest),) if rest else ()
                took, back = self.tables.find_sums(Site(kinds, group, shape.tensor), shape)
                ending = ending + back
                if not training.overlap_reduction:
                    summed = summed + took
                elif training.overlap_sends:
                    buckets = self.tables.find_buckets(shape)
                    hidden = both * (1 - 1 / buckets)
                    summed = summed + np.maximum(took / buckets, took - hidden)
            inner = slice(1, self.size)
            # A longer run takes no less than any that it holds.
            self._ends[key] = (
                np.maximum.accumulate(_find_least(ending[inner, inner])),
                np.maximum.accumulate(_find_least(summed[inner, inner])),
            )
        return self._ends[key]

    def _find_windows(self, option: Option, columns: tuple[tuple[str, ...], ...]) -> _Windows:
        shape = option.shape
        owners = shape.replicas if shape.zero else 1
        graphs = self._count_graphs(option)
        key = shape.tensor, shape.micro_batch, owners, _recomputes(option), graphs, columns
        found = self._windows.get(key)
        if found is None:
            found = self._windows[key] = self._make_windows(option, columns)
        return found

    def _count_graphs(self, option: Option) -> int:
        all_at_once = option.schedule == "gpipe" and option.recompute == "none"
        return option.num_microbatches if all_at_once else 1

    def _make_windows(self, option: Option, columns: tuple[tuple[str, ...], ...]) -> _Windows:
        shape, inner = option.shape, slice(1, self.size)
        most = self._count_graphs(option)
        fixed = self.tables.find_fixed(shape)
        windows, spared, ratios, once = [], [], [0.0], []
        for kinds in columns:
            times = self.tables.find_times(kinds, shape.micro_batch, shape.tensor)
            both = _add_up(times.by_name)
            work = both + times.recompute if _recomputes(option) else both
            # gpipe holds the graphs of all micro-batches; others of one at least.
            holds = fixed + most * times.graph_bytes + times.work_bytes
            fits = holds <= times.memory_bytes
            windows.append(_find_least(np.where(fits, work, np.inf)[inner, inner]))
            spared.append(_find_least(np.where(fits, both, np.inf)[inner, inner]))
            # Segments of one stage have in common what an action costs by itself.
            own = {n: m.diagonal(1) - times.action[n] for n, m in times.by_name.items()}
            once.append(_add_up(own))
            ratios += [_find_share(own), _find_share(times.action)]
        every = np.unique(np.concatenate(windows + spared))
        limits = every[np.isfinite(every)]
        held, more = _count_held(windows, limits), _count_held(spared, limits)
        return _Windows(
            limits=limits,
            held=held,
            bonus=np.maximum.accumulate((more - held).max(axis=0)),
            once=float(np.min(once, axis=0).sum()),
            single=np.array([row[1:-1].min(initial=np.inf) for row in once]),
            ends=float(np.min(once, axis=0)[[0, -1]].sum()),
            ratio=max(ratios),
        )

    def _find_tail(self, shape: Shape) -> tuple[int, float, float]:
        """The most stages a node holds, and the least that crossing to another costs: of a
        micro-batch there and back, and of the tied weights of the first and the last stage."""
        key = shape.tensor, shape.replicas, shape.micro_batch
        if self.cluster.num_nodes == 1:  # whose profile need know of no other
            return self.cluster.num_gpus, 0.0, 0.0
        if key not in self._tails:
            profile, training = self.tables.profile, self.tables.training
            kinds = self.cluster.kinds
            groups = [kind.gpus // shape.tensor for kind in kinds]
            each = max(1, *(group // shape.replicas for group in groups))
            # A stage's first node holds all its replicas, or as many as it can.
            flows = max(1, min(*groups, shape.replicas)) * shape.tensor
            # A message alone, or with all others where a rank waits for what it sends.
            sent = shape.tensor if training.overlap_sends else flows
            sent = sent // shape.tensor if training.split_messages else sent
            hop = tie = float("inf")
            counts = Counter[str]()
            for kind in kinds:
                counts[kind.gpu] += kind.count
            for a in counts:
                outputs = self.tables.find_outputs(a, shape.micro_batch, shape.tensor)
                least = float(outputs[1 : self.size].min(initial=np.inf))
                for b in counts:
                    if a == b and counts[a] == 1:
                        continue  # one node crosses to no other of its kind
                    link = profile.network.find(a, b, "inter")
                    hop = min(hop, 2 * link.find_time(least * sent))
                    total = 0.0
                    for one in profile.model.ties:
                        if {0, self.size - 1} <= set(one.segments):
                            size = one.parameters / shape.tensor * training.reduced_bytes
                            pair = [(a, 1), (b, 1)]
                            total += float(profile.network.find_all_reduce(pair, size, flows)[0])
                    tie = min(tie, total)
            self._tails[key] = each, hop, tie
        return self._tails[key]


def _add_up(figures: Mapping[str, Array]) -> Array:
    """Forward and gradients: zero_bubble makes them one after the other, the others at once."""
    apart = figures["input_grad_s"] + figures["weight_grad_s"]
    return np.maximum(0.0, figures["forward_s"] + np.minimum(figures["backward_s"], apart))


def _find_share(figures: Mapping[str, Array]) -> float:
    """The most that is forward of them."""
    both = np.atleast_1d(_add_up(figures))
    forward = np.minimum(np.atleast_1d(figures["forward_s"]), both)
    return float((forward[both > 0] / both[both > 0]).max(initial=0.0))


def _recomputes(option: Option) -> bool:
    """A single micro-batch's graph is used at once, and kept."""
    return option.recompute == "full" and option.num_microbatches > 1


def _group(values: Array, cells: int) -> list[tuple[float, float]]:
    """Growing values in so many groups: the least and the largest of each."""
    parts = np.array_split(values, min(cells, len(values))) if len(values) else []
    return [(float(part[0]), float(part[-1])) for part in parts]


def _find_least(work: Array) -> Array:
    """The least work of any so many segments in a row, from 1 on."""
    if len(work) < 2:
        return np.zeros(0)
    begins, ends = _find_runs(len(work))
    runs = np.where(ends < len(work), work[begins, np.minimum(ends, len(work) - 1)], np.inf)
    return runs.min(axis=0)


@lru_cache(maxsize=8)
def _find_runs(size: int) -> tuple[Array, Array]:
    """Begins in rows, ends of runs of 1, 2, ... in columns; those beyond the last are none."""
    begins = np.arange(size)[:, None]
    return begins, begins + np.arange(1, size)[None, :]


def _count_held(windows: Sequence[Array], limits: Array) -> Array:
    return np.array([np.searchsorted(row, limits, side="right") for row in windows], dtype=float)
