"""What no placement of an option can be below, for thousands of them at once.

For a time T each kind of place can hold at most so many segments in a row, wherever the run begins:
if all stages together hold fewer than there are, some stage takes longer than T. That is the
min-max of any order; with m micro-batches a step takes m times that, and also

    all work of one micro-batch + (m - 1) x the slowest stage - what it may do before its first
    gradient comes, which is as many forwards as the schedule runs ahead
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from varuna_core.planner.space import Option
from varuna_core.planner.tables import Array, Tables

CHUNK = 4096


class Floor:
    """Of one option on places of these kinds."""

    def __init__(self, tables: Tables, option: Option, columns: Sequence[tuple[str, ...]]) -> None:
        self.tables, self.option, self.size = tables, option, tables.size
        shape = option.shape
        fixed = tables.find_fixed(shape)
        self.windows, self.spared = [], []
        ratios, once = [0.0], []
        for kinds in columns:
            times = tables.find_times(kinds, shape.micro_batch, shape.tensor)
            both = times.forward + times.input_grad + times.weight_grad
            work = both + times.recompute if option.recompute == "full" else both
            fits = fixed + times.graph_bytes + times.work_bytes <= times.memory_bytes
            # Without the first and the last segment, which are unlike the others: they come free.
            inner = slice(1, self.size)
            self.windows.append(_find_windows(np.where(fits, work, np.inf)[inner, inner]))
            # The last stage of a schedule that recomputes need not.
            self.spared.append(_find_windows(np.where(fits, both, np.inf)[inner, inner]))
            single = both.diagonal(1)
            once.append(single)
            forward = times.forward.diagonal(1)
            ratios.append(float((forward[single > 0] / single[single > 0]).max(initial=0.0)))
        self.once = float(np.min(once, axis=0).sum())
        self.ratio = max(ratios)
        finite = np.unique(np.concatenate(self.windows + self.spared))
        self.limits = finite[np.isfinite(finite)]
        self.held = _count_held(self.windows, self.limits)
        spared = _count_held(self.spared, self.limits)
        self.bonus = (spared - self.held).max(axis=0)

    def find(self, counts: Array) -> Array:
        """A bound for each row of counts; inf where the segments cannot be held."""
        found = [self._find(counts[i : i + CHUNK]) for i in range(0, len(counts), CHUNK)]
        return np.concatenate(found) if found else np.zeros(0)

    def _find(self, counts: Array) -> Array:
        option, m = self.option, self.option.num_microbatches
        wanted = self.size - 2
        if wanted < 1:
            return np.full(len(counts), self.tables.training.data_s)
        if not len(self.limits):
            return np.full(len(counts), np.inf)
        enough = counts @ self.held + self.bonus >= wanted
        slowest = np.where(enough.any(axis=1), self.limits[enough.argmax(axis=1)], np.inf)
        stages = counts.sum(axis=1)
        bound = m * slowest
        if option.schedule != "zero_bubble":
            ahead = {"gpipe": 0 * stages, "1f1b": stages - 1}.get(option.schedule, stages)
            ahead = np.minimum(ahead, m - 1)
            with np.errstate(invalid="ignore"):
                other = self.once + np.maximum(0.0, m - 1 - ahead * self.ratio) * slowest
            bound = np.maximum(bound, other)
        return bound + self.tables.training.data_s


def _find_windows(work: Array) -> Array:
    """The least work of any so many segments in a row, from 1 on."""
    size = len(work) - 1
    least = [float(work.diagonal(length).min()) for length in range(1, size + 1)]
    return np.array(least)


def _count_held(windows: Sequence[Array], limits: Array) -> Array:
    """By kind and time: the longest run that takes no longer."""
    return np.array([np.searchsorted(row, limits, side="right") for row in windows], dtype=float)
