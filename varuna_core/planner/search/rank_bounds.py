"""Compute lower bounds of a step whose ranks may have several stages, for any order of actions.

```
rank r    ── head ──┬─ F and input gradients of its stages ─┬─ tail ──     head: forwards of the
                    └─ and weight gradients, maybe later ───┘              stages before its first
```

Before a rank's first action, the forwards of all stages before its first one have run; after the
last gradient that the rank sends, these stages' gradients follow. Weight gradients may be postponed
if a schedule splits backwards. So a step takes at least

    head + all work of the rank          head + forwards and input gradients of it + tail

`bound_partitions` computes this for given cuts. For open cuts (`bound_all`), each earlier stage is
taken to hold at least one segment, and the work is divided regardless of where runs begin: each
rank takes as much as its kind of GPU can until a time. `bound_counts` does the same for many
placements at once. No bound takes memory into account.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from varuna_core.planner.model.cluster import PlacedPipeline
from varuna_core.planner.model.tables import Array, Tables, TimeTables
from varuna_core.planner.search.space import AGAIN, Option
from varuna_core.schedule.registry import SCHEDULES, place_stages


class _Segments(NamedTuple):
    """Least times of each segment in one kind of place, and the fixed time of an action."""

    forward: Array
    back: Array
    """Time until a backward has computed the gradient for the previous stage."""
    whole: Array
    """Time of a backward that computes both gradients."""
    forward_action: float
    back_action: float
    whole_action: float


def _list_segments(times: TimeTables, splits: bool) -> _Segments:
    own = {name: table.diagonal(1) - times.action[name] for name, table in times.by_name.items()}
    action = times.action
    whole = np.minimum(own["backward_s"], own["input_grad_s"] + own["weight_grad_s"])
    at_once = action["backward_s"], action["input_grad_s"] + action["weight_grad_s"]
    if splits:
        back = np.minimum(own["backward_s"], own["input_grad_s"])
        back_action = min(action["backward_s"], action["input_grad_s"])
    else:
        back, back_action = whole, min(at_once)
    return _Segments(
        own["forward_s"],
        back,
        whole,
        action["forward_s"],
        back_action,
        min(at_once),
    )


class PlacedBounds:
    """Lower bounds of one placement from the least times of its GPUs, without building an order."""

    def __init__(
        self, tables: Tables, option: Option, placed: PlacedPipeline, stages_per_rank: int
    ) -> None:
        self.tables, self.option, self.placed, self.each = tables, option, placed, stages_per_rank
        self.splits = SCHEDULES[option.schedule].splits_backward
        self.places = place_stages(option.schedule, len(placed.sites), stages_per_rank)
        shape = option.shape
        self.times = [
            tables.compute_times(site.kinds, shape.micro_batch, shape.tensor)
            for site in placed.sites
        ]
        between = [placed.find_boundary(*pair) for pair in itertools.pairwise(self.places)]
        in_memory = np.zeros((4, tables.size + 1))
        self.hops = [
            in_memory if boundary is None else tables.compute_hops(boundary, shape)
            for boundary in between
        ]

    def bound_partitions(self, cuts: Array) -> Array:
        """Compute a lower bound of the step time of each partition, a row of `cuts`."""
        training, num_stages = self.tables.training, len(self.places)
        runs = [(cuts[:, s], cuts[:, s + 1]) for s in range(num_stages)]
        forward, back, work, early = self._list_work(runs)
        down, up = np.zeros((2, num_stages, len(cuts)))
        lag = np.zeros(len(cuts))
        for s, hops in enumerate(self.hops):
            alone, together = hops[:2, runs[s][1]], hops[2:, runs[s][1]]
            down[s], up[s] = alone
            if training.overlap_sends:
                lag = np.maximum(lag, (together - alone).max(axis=0))
        # One micro-batch's way there and back, until each stage begins and after it has ended.
        ways = np.cumsum(forward + down + back + up, axis=0)
        head, tail = (np.cumsum(rows, axis=0) - rows for rows in (forward + down, back + up))
        agreed = ways[-1]
        ending, back_s = np.zeros((2, len(cuts)))
        for rank, site in enumerate(self.placed.sites):
            own = [s for s, place in enumerate(self.places) if place == rank]
            first, last = own[0], own[-1]
            again = self._compute_again(rank, [runs[s] for s in own], ways[-1] - ways[last])
            busy = head[first] + sum(work[s] for s in own) + again
            sent = head[first] + sum(early[s] for s in own) + again + tail[first]
            agreed = np.maximum(agreed, np.maximum(busy, sent))
            sums = self.tables.compute_sums(site, self.option.shape)
            if not training.overlap_reduction:
                took = np.max([sums.reduce[runs[s]] for s in own], axis=0)
                agreed = np.maximum(agreed, busy + took)
            back_s = np.maximum(back_s, sum(sums.exchange[runs[s]] for s in own))
            optimizer = sum(self.times[rank].optimizer[runs[s]] for s in own)
            ending = np.maximum(ending, optimizer / self.option.shape.owners)
        found: Array = training.data_s + lag + agreed + ending + back_s
        return found

    def _list_work(self, runs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array, Array]:
        """Compute four times of each stage: one forward, one backward up to the gradient of its
        input, all work of a step without recomputes, and the part of that work that earlier stages
        wait for."""
        m = self.option.num_microbatches
        rows = []
        for place, run in zip(self.places, runs, strict=True):
            times = self.times[place]
            forward = times.forward[run]
            whole = np.minimum(times.backward, times.input_grad + times.weight_grad)[run]
            back = np.minimum(times.input_grad, times.backward)[run] if self.splits else whole
            rows.append((forward, back, m * (forward + whole), m * (forward + back)))
        forward, back, work, early = map(np.array, zip(*rows, strict=True))
        return forward, back, work, early

    def _compute_again(
        self, rank: int, runs: Sequence[tuple[Array, Array]], behind: Array
    ) -> Array | float:
        """Compute a lower bound of the time that a rank spends on recomputes.

        A micro-batch is not recomputed if its backward is the rank's next action. That is possible
        for the rank's last stage only, and then the rank waits for the stages behind it.
        """
        m, way, times = self.option.num_microbatches, self.option.recompute, self.times[rank]
        if way not in AGAIN:
            return 0.0
        table = times.recompute if way == "full" else times.optional["selective_s"]
        last = np.minimum(table[runs[-1]], behind)
        found: Array = m * (sum(table[run] for run in runs[:-1]) + last)
        return found

    def bound_all(self) -> float:
        """Compute a lower bound of the step time of all partitions of this option."""
        size, m = self.tables.size, self.option.num_microbatches
        known = {id(times): _list_segments(times, self.splits) for times in self.times}
        rows = [known[id(times)] for times in self.times]
        sent = [hops[:2, 1:size].min(axis=1, initial=np.inf) for hops in self.hops]
        head, tail = np.zeros((2, len(rows)))
        down = up = 0.0
        for place, row in enumerate(rows):
            head[place], tail[place] = down, up
            some = slice(0, 1) if place == 0 else slice(1, size - 1)
            down += float(row.forward[some].min(initial=np.inf)) + row.forward_action
            up += float(row.back[some].min(initial=np.inf)) + row.back_action
            if place < len(rows) - 1:
                down, up = down + float(sent[place][0]), up + float(sent[place][1])
        kinds = [id(times) for times in self.times]
        whole = {kind: m * (row.forward + row.whole) for kind, row in known.items()}
        early = {kind: m * (row.forward + row.back) for kind, row in known.items()}
        busy = [self.each * m * (row.forward_action + row.whole_action) for row in rows]
        few = [self.each * m * (row.forward_action + row.back_action) for row in rows]
        bound = _compute_way(rows, self.each) + sum(float(hops.sum()) for hops in sent)
        for work, before in ((whole, head + busy), (early, head + few + tail)):
            shared = _share_out([work[kind] for kind in kinds], before)
            bound = max(bound, shared, _hold_inner(work, kinds, before))
        ending = np.min([times.optimizer.diagonal(1) for times in self.times], axis=0).sum()
        ending = float(ending) / self.option.shape.owners / len(rows)
        return self.tables.training.data_s + bound + ending


def _compute_way(rows: Sequence[_Segments], each: int) -> float:
    """Compute the least time of one micro-batch's forward and backward through all stages, if each
    rank has `each` stages."""
    work = np.array([row.forward + row.back for row in rows])
    least = work.min(axis=0)
    more = (work - least).min(axis=1).sum() + sum(r.forward_action + r.back_action for r in rows)
    return float(least.sum() + each * more)


def _share_out(work: Sequence[Array], before: Array) -> float:
    """Compute the least time in which all segments can be done if they are divided among the ranks
    in any parts. Each rank starts after its time in `before` and works at its best rate."""
    best = 0.0
    for reference in {id(row): row for row in work}.values():
        some = reference > 0
        if not some.any():
            continue
        slowness = np.array([(row[some] / reference[some]).min() for row in work])
        if not (slowness > 0).all():
            continue
        rate = 1 / slowness
        best = max(best, float((reference.sum() + (before * rate).sum()) / rate.sum()))
    return best


def _hold_inner(work: Mapping[int, Array], kinds: Sequence[int], before: Array) -> float:
    """Compute the least time in which the ranks can do all segments but the first and the last, if
    each rank takes those that are fastest on its kind of GPU."""
    wanted = len(next(iter(work.values()))) - 2
    if wanted < 1:
        return 0.0
    ends = [
        np.add.outer(before[[one == kind for one in kinds]], np.cumsum(np.sort(row[1:-1]))).ravel()
        for kind, row in work.items()
    ]
    return float(np.partition(np.concatenate(ends), wanted - 1)[wanted - 1])


def bound_counts(
    tables: Tables,
    option: Option,
    columns: Sequence[tuple[str, ...]],
    counts: Array,
    stages_per_rank: int,
) -> Array:
    """Compute a lower bound of the step time for each row of `counts`, the number of ranks in each
    kind of place; the order of the ranks does not matter."""
    if not len(counts):
        return np.zeros(0)
    shape, m = option.shape, option.num_microbatches
    splits = SCHEDULES[option.schedule].splits_backward
    found = [tables.compute_times(c, shape.micro_batch, shape.tensor) for c in columns]
    rows = [_list_segments(times, splits) for times in found]
    ranks = counts.sum(axis=1)
    bound = np.zeros(len(counts))
    for is_early in (False, True):
        before = np.array(
            [
                stages_per_rank
                * m
                * (r.forward_action + (r.back_action if is_early else r.whole_action))
                for r in rows
            ]
        )
        work = [m * (r.forward + (r.back if is_early else r.whole)) for r in rows]
        one = [r.forward[1:-1] + (r.back[1:-1] if is_early or not splits else 0.0) for r in rows]
        least = min(float(values.min(initial=np.inf)) for values in one)
        least = least if np.isfinite(least) else 0.0
        for reference in work:
            some = reference > 0
            if not some.any():
                continue
            slowness = np.array([(row[some] / reference[some]).min() for row in work])
            if not (slowness > 0).all():
                continue
            rate = 1 / slowness
            # Of the stages before a rank's first one only the very first is no inner one.
            heads = least * np.maximum(0, (ranks - 1) * (ranks - 2) / 2) * rate.min()
            total = reference.sum() + counts @ (before * rate) + heads
            bound = np.maximum(bound, total / (counts @ rate))
    return bound + tables.training.data_s


def bound_least(
    tables: Tables, option: Option, columns: Sequence[tuple[str, ...]], most: Array
) -> float:
    """Compute a lower bound of the step time for all counts that are nowhere above `most`: all work
    but for what an action costs by itself, shared out among so many ranks."""
    shape, splits = option.shape, SCHEDULES[option.schedule].splits_backward
    found = [tables.compute_times(c, shape.micro_batch, shape.tensor) for c in columns]
    rows = [_list_segments(times, splits) for times in found]
    work = [option.num_microbatches * (row.forward + row.whole) for row in rows]
    best = 0.0
    for reference in work:
        some = reference > 0
        slowness = np.array([(row[some] / reference[some]).min(initial=np.inf) for row in work])
        if some.any() and (slowness > 0).all():
            best = max(best, float(reference.sum() / (most / slowness).sum()))
    return best + tables.training.data_s
