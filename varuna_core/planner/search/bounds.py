"""Lower bounds of a step: of all partitions of one chain, and of thousands of placements at once.

`Cells` bounds a chain. A step takes at least, with the largest taken over the stages

    sum of ways + largest beyond + largest (optimizer + weights back)

Each term is least for a different partition. So the range of the two largest terms is divided into
cells: in a cell, stages hold only runs that stay below its upper edges, the sum of ways is
minimized exactly, and the lower edges are added. The least value of all cells bounds every
partition; a finer grid gives a closer bound.

`Floors` bounds the placements of an option. Within a time T, each kind of place can hold at most a
certain number of consecutive segments, wherever the run begins: if all stages together hold fewer
than the model has, some stage takes longer than T. That is the min-max of any order; with m
micro-batches a step takes m times that, and also

    all work of one micro-batch and its messages + (m - 1) x the slowest stage
    - what it may do before its first gradient comes: as many forwards as the schedule runs ahead

The first and the last segment, which differ from the others, are counted as free.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import Cluster, StageSite
from varuna_core.planner.model.tables import Array, Shape, Tables, TimeTables
from varuna_core.planner.search.space import Option
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import SCHEDULES

ROUNDING = 1e-12


class Prefix(NamedTuple):
    """Figures of the stages that are already cut; arrays are indexed by the end of the last one."""

    before: Array = 0.0
    """Time before the next stage's first action plus the time after its last action."""
    work: Array = 0.0
    """The largest work of the cut stages, including the time before and after each one's work."""
    beyond: Array = 0.0
    """The largest `beyond` of the cut stages."""
    down: Array = 0.0
    """Time before the next stage's first action."""
    done: Array = 0.0
    """Time at which the cut stages have summed their gradients over the replicas."""
    first: Array = 0.0
    """Time that the first stage needs after the end of the pipeline."""
    ending: Array = 0.0
    """The longest time that one of these stages needs for its optimizer and the transfer of its
    weights."""

    def pick(self, row: int | Array) -> Prefix:
        return Prefix(*(values[row] for values in self))


def extend(chain: Chain, stage: int, begin: int | Array, so_far: Prefix) -> Prefix:
    """Return the prefix with one more stage, for every end; several begins are columns."""
    table, own = chain.stages[stage], chain.behind[stage]
    work, way = table.work[begin], chain.upstream[stage][begin]
    ending = table.optimizer[begin] + chain.sums[stage].exchange[begin]
    return Prefix(
        before=so_far.before + way,
        work=np.maximum(so_far.work, so_far.before + work),
        beyond=np.maximum(
            so_far.beyond, np.zeros_like(way) if chain.puts_off else own.compute_beyond(begin)
        ),
        down=so_far.down + table.way_down[begin],
        done=np.maximum(so_far.done, so_far.down + work + own.unhidden[begin]),
        first=np.broadcast_to(chain.first_tail if stage == 0 else so_far.first, way.shape),
        ending=np.maximum(so_far.ending, ending),
    )


def bound_prefix(chain: Chain, after: int, so_far: Prefix) -> Array:
    """Return a lower bound on the step time of any partition that begins with this prefix; `after`
    is the stage that follows the prefix."""
    behind = chain.behind[after]
    step = np.maximum(so_far.work, so_far.before + behind.least)
    if not chain.puts_off:
        largest = np.maximum(so_far.beyond, behind.largest)
        step = np.maximum(step, so_far.before + behind.round + largest)
    done = np.maximum(so_far.done, so_far.down + behind.summed)
    return np.maximum(step + so_far.first, done) + chain.tail


def _name_beyond(chain: Chain, s: int) -> int:
    """Return a key that is equal for stages with equal `beyond`."""
    return id(chain.behind[s]) if chain.stages[s].more_rounds else 0


class Cells:
    """Lower bounds of one chain, for partitions that may take less than `limit`."""

    def __init__(self, chain: Chain, limit: float, beyonds: int, tails: int) -> None:
        self.chain, self.data_s = chain, chain.tables.training.data_s
        self.tails = [
            stage.optimizer + sums.exchange
            for stage, sums in zip(chain.stages, chain.sums, strict=True)
        ]
        """For each stage, the time to run its optimizer and transfer its weights, by begin and end
        of the stage's segments."""
        pipeline = chain.bound - chain.tail
        low, high = self._compute_least_tail(), limit - pipeline
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

    def _compute_least_tail(self) -> float:
        """Return the least value that the largest tail can have."""
        behind = np.full(self.chain.size + 1, np.inf)
        behind[self.chain.size] = 0.0
        for stage, tail in zip(reversed(self.chain.stages), reversed(self.tails), strict=True):
            fits = np.where(stage.allowed, tail, np.inf)
            behind = np.maximum(fits, behind).min(axis=1)
        return float(behind[0])

    def _sum_up(self) -> tuple[list[Array], list[Array], list[Array]]:
        """Return least values of `round`, `least` and `summed`, as in Behind, for each stage:
        arrays by cell and first segment."""
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
        """Return tables of a stage by begin and length of its run, and for each cell a mask of the
        runs that it bars."""
        chain, size = self.chain, self.chain.size
        stage, own = chain.stages[s], chain.behind[s]
        beyond = np.zeros_like(stage.way) if chain.puts_off else own.compute_beyond()
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
        """Return `bound_prefix` of prefixes that end at `ends`."""
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

    def compute_least(self) -> float:
        """Return a lower bound on the time of a step with any partition of the layers, or the
        search's `limit` if none takes less."""
        ends = np.flatnonzero(self.chain.stages[0].allowed[0])
        if not len(ends):
            return float("inf")
        first = extend(self.chain, 0, 0, Prefix()).pick(ends)
        return float(self.bound(1, ends, first).min())


CHUNK = 4096
FEW = 50_000
"""Most pairs of a run's end and a time limit for which the longest runs of segments are all
computed in one table; if there are more, each is found by bisection."""
TIME_CELLS, ENDING_CELLS = 24, 6


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """The longest runs of consecutive segments that a place can process within a time; options that
    differ only in schedule share them."""

    limits: Array
    """The time limits of runs of segments."""
    held: Array
    """The longest run of segments within each time limit, by kind of place and limit."""
    bonus: Array
    """Number of additional segments on last stages, which need no recompute or copy, by limit."""
    once: float
    """Work of one micro-batch, each segment where it is fastest."""
    single: Array
    """Work of one micro-batch in the fastest inner segment, by kind of place."""
    ends: float
    """Work of one micro-batch in the first and last segment."""
    ratio: float
    """The largest share of forward in a segment's work."""


class Floors:
    """Lower bounds of the placements of one search."""

    def __init__(self, tables: Tables, cluster: Cluster) -> None:
        self.tables, self.cluster, self.size = tables, cluster, tables.size
        self._windows: dict[Any, _Windows] = {}
        self._tails: dict[Any, tuple[int, float, float]] = {}
        self._ends: dict[Any, tuple[Array, Array]] = {}

    def find(self, option: Option, columns: Sequence[tuple[str, ...]], counts: Array) -> Array:
        """Return a bound for each row of counts; inf if the segments do not fit."""
        windows = self._compute_windows(option, tuple(columns))
        parts = [counts[i : i + CHUNK] for i in range(0, len(counts), CHUNK)]
        return np.concatenate([self._find(option, windows, part) for part in parts])

    def compute_least(
        self, option: Option, columns: Sequence[tuple[str, ...]], most: Array
    ) -> float:
        """Return a bound for all rows of counts with at most `most` stages on any kind of place."""
        windows = self._compute_windows(option, tuple(columns))
        if self.size < 3:
            return self.tables.training.data_s
        if not len(windows.limits):
            return float("inf")
        slowest = self._compute_slowest(windows, most[None, :])
        return float(option.num_microbatches * slowest[0]) + self.tables.training.data_s

    def _find(self, option: Option, windows: _Windows, counts: Array) -> Array:
        m, data_s = option.num_microbatches, self.tables.training.data_s
        if self.size < 3:
            return np.full(len(counts), data_s)
        if not len(windows.limits):
            return np.full(len(counts), np.inf)
        slowest = self._compute_slowest(windows, counts)
        bound = m * slowest
        if not _is_order_known(option):
            return bound + data_s
        stages = counts.sum(axis=1)
        ahead = _count_ahead(option, stages)
        factor = np.maximum(0.0, m - 1 - np.minimum(ahead, m - 1) * windows.ratio)
        each, hop, tie = self._find_tail(option.shape)
        crossings = np.maximum(0, -(-stages // each) - 1)
        with np.errstate(invalid="ignore"):
            # Where nothing holds all segments 0 times inf is no number.
            bound = np.fmax(bound, windows.once + crossings * hop + factor * slowest)
        return bound + data_s + np.where(stages > each, tie, 0.0)

    def may_recompute(
        self, option: Option, columns: Sequence[tuple[str, ...]], counts: Array, limit: float
    ) -> Array:
        """Return, for each row of counts, True if a stage within `limit` may lack memory; only then
        can a recompute mode be faster than none."""
        shape, m = option.shape, option.num_microbatches
        fixed, stages = self.tables.compute_fixed(shape), counts.sum(axis=1)
        least = np.full(len(columns), np.inf)
        for at, kinds in enumerate(columns):
            times = self.tables.compute_times(kinds, shape.micro_batch, shape.tensor)
            sent = self.tables.compute_outputs(kinds[0], shape.micro_batch, shape.tensor)
            graph = times.graph_bytes + sent[None, :]
            room = times.memory_bytes - fixed - times.work_bytes
            runs = np.triu(np.ones(graph.shape, dtype=bool), 1)
            runs &= (m * _add_up(times.by_name) <= limit) & (room >= 0) & (graph > 0)
            least[at] = (room[runs] / graph[runs]).min(initial=np.inf)
        # A stage runs ahead by as many forwards as there are stages, and by no more than there are.
        kind = SCHEDULES[option.schedule]
        ahead = np.full(len(counts), m) if kind.gradients_last else np.minimum(stages, m)
        needed = np.where(counts > 0, least[None, :], np.inf).min(axis=1, initial=np.inf)
        found: Array = ahead > needed * (1 - ROUNDING)
        return found

    def _compute_slowest(self, windows: _Windows, counts: Array) -> Array:
        """Return the least time limit within which the places can hold all segments, if necessary
        by bisection."""
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
        """Return a closer bound for a few rows; inf if it is above `limit`.

        For each pair of limits, on the time and on the optimizer's time, a place holds only the
        segments that the limits allow and leaves the rest to slower places; the least work of one
        micro-batch is then computed exactly.
        """
        m, size = option.num_microbatches, self.size - 2
        if self.size < 3 or not _is_order_known(option):
            return np.zeros(len(counts))
        windows = self._compute_windows(option, tuple(columns))
        if not len(windows.limits):
            return np.full(len(counts), np.inf)
        tails = [self._find_tails(option, kinds) for kinds in columns]
        endings = [row[0] for row in tails]
        data_s = self.tables.training.data_s
        stages = counts.sum(axis=1)
        ahead = _count_ahead(option, stages)
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
        """Return the least time of optimizer and weights' transfer for runs of 1, 2, ... segments,
        and the least time until their sum over the replicas is done."""
        shape, training = option.shape, self.tables.training
        key = shape, option.num_microbatches, kinds
        if key not in self._ends:
            times = self.tables.compute_times(kinds, shape.micro_batch, shape.tensor)
            ending = times.optimizer / shape.owners
            both = times.backward
            summed = option.num_microbatches * (times.forward + both)
            nodes = [kind for kind in self.cluster.kinds if (kind.gpu,) == kinds]
            groups = nodes[0].gpus // shape.tensor if len(nodes) == 1 else 0
            if groups:  # nodes with fewer GPUs than tensor ranks hold no stage
                full, rest = divmod(shape.replicas, groups)
                group = ((nodes[0].gpu, groups),) * full
                group += ((nodes[0].gpu, rest),) if rest else ()
                sums = self.tables.compute_sums(StageSite(kinds, group, shape.tensor), shape)
                took, ending = sums.reduce, ending + sums.exchange
                if not training.overlap_reduction:
                    summed = summed + took
                elif training.overlap_sends:
                    buckets = self.tables.compute_buckets(shape)
                    hidden = both * (1 - 1 / buckets)
                    summed = summed + np.maximum(took / buckets, took - hidden)
            inner = slice(1, self.size)
            # A longer run takes no less than any that it holds.
            self._ends[key] = (
                np.maximum.accumulate(_compute_least(ending[inner, inner])),
                np.maximum.accumulate(_compute_least(summed[inner, inner])),
            )
        return self._ends[key]

    def _compute_windows(self, option: Option, columns: tuple[tuple[str, ...], ...]) -> _Windows:
        shape = option.shape
        held = shape.zero, shape.owners
        graphs = self._count_graphs(option)
        key = shape.tensor, shape.micro_batch, held, _name_way(option), graphs, columns
        found = self._windows.get(key)
        if found is None:
            found = self._windows[key] = self._make_windows(option, columns)
        return found

    def _count_graphs(self, option: Option) -> int:
        all_at_once = SCHEDULES[option.schedule].gradients_last and option.recompute == "none"
        return option.num_microbatches if all_at_once else 1

    def _make_windows(self, option: Option, columns: tuple[tuple[str, ...], ...]) -> _Windows:
        shape, inner = option.shape, slice(1, self.size)
        most = self._count_graphs(option)
        fixed = self.tables.compute_fixed(shape)
        windows, spared, ratios, once = [], [], [0.0], []
        for kinds in columns:
            times = self.tables.compute_times(kinds, shape.micro_batch, shape.tensor)
            both = _add_up(times.by_name)
            work = _compute_work(option, times)
            # gpipe holds the graphs of all micro-batches; others of one at least.
            holds = fixed + most * times.graph_bytes + times.work_bytes
            fits = holds <= times.memory_bytes
            windows.append(_compute_least(np.where(fits, work, np.inf)[inner, inner]))
            spared.append(_compute_least(np.where(fits, both, np.inf)[inner, inner]))
            # Segments of one stage have in common what an action costs by itself.
            own = {n: m.diagonal(1) - times.action[n] for n, m in times.by_name.items()}
            once.append(_add_up(own))
            ratios += [_compute_share(own), _compute_share(times.action)]
            if times.host:  # it may be added, and never takes from the device's times
                actions = times.host_action
                launches = {n: m.diagonal(1) - actions[n] for n, m in times.host.items()}
                ratios += [_compute_share(launches), _compute_share(actions)]
        every = np.unique(np.concatenate(windows + spared))
        limits = every[np.isfinite(every)]
        held, more = _count_held(windows, limits), _count_held(spared, limits)
        return _Windows(
            limits=limits,
            held=held,
            bonus=np.maximum.accumulate((more - held).max(axis=0)) * _count_spared(option),
            once=float(np.min(once, axis=0).sum()),
            single=np.array([row[1:-1].min(initial=np.inf) for row in once]),
            ends=float(np.min(once, axis=0)[[0, -1]].sum()),
            ratio=max(ratios),
        )

    def _find_tail(self, shape: Shape) -> tuple[int, float, float]:
        """Return the most stages of a node, and the least costs of crossing to another node: for a
        micro-batch there and back, and for weights tied between first and last stage."""
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
                outputs = self.tables.compute_outputs(a, shape.micro_batch, shape.tensor)
                least = float(outputs[1 : self.size].min(initial=np.inf))
                for b in counts:
                    if a == b and counts[a] == 1:
                        continue  # one node crosses to no other of its kind
                    link = profile.network.find(a, b, "inter")
                    hop = min(hop, 2 * link.compute_time(least * sent))
                    total = 0.0
                    for one in profile.model.ties:
                        if {0, self.size - 1} <= set(one.segments):
                            size = one.parameters / shape.tensor * training.reduced_bytes
                            pair = [(a, 1), (b, 1)]
                            total += float(profile.network.find_all_reduce(pair, size, flows)[0])
                    tie = min(tie, total)
            self._tails[key] = each, hop, tie
        return self._tails[key]


def _is_order_known(option: Option) -> bool:
    """Return True if forwards and backwards alternate after a known number of forwards."""
    return SCHEDULES[option.schedule].count_ahead is not None


def _count_ahead(option: Option, stages: Array) -> Array:
    """Return, by number of stages, the forwards that the first stage may run before its first
    gradient; 0 if all gradients come last."""
    kind = SCHEDULES[option.schedule]
    assert kind.count_ahead is not None
    if kind.gradients_last:
        return 0 * stages
    most = int(stages.max(initial=0))
    ahead = [kind.count_ahead(n - 1, option.num_microbatches) - 1 for n in range(1, most + 1)]
    return np.array([0, *ahead])[stages]


def _add_up(figures: Mapping[str, Array]) -> Array:
    """Return forward plus gradients, joined or split (zero_bubble), whichever takes less."""
    apart = figures["input_grad_s"] + figures["weight_grad_s"]
    return np.maximum(0.0, figures["forward_s"] + np.minimum(figures["backward_s"], apart))


def _compute_share(figures: Mapping[str, Array]) -> float:
    """Return the largest share of the forward in a segment's work."""
    both = np.atleast_1d(_add_up(figures))
    forward = np.minimum(np.atleast_1d(figures["forward_s"]), both)
    return float((forward[both > 0] / both[both > 0]).max(initial=0.0))


def _name_way(option: Option) -> Recompute:
    """Return the recompute mode whose work a lower bound may count: the option's own, or `none` if
    no stage is certain to recompute or offload anything, as with few micro-batches."""
    is_used = option.num_microbatches > _count_spared(option)
    if option.recompute == "offload":
        is_used &= _is_order_known(option)
    return option.recompute if is_used else "none"


def _count_spared(option: Option) -> int:
    """Return the number of last stages that keep their graphs without extra work."""
    return 2 if option.recompute == "offload" else 1


def _compute_work(option: Option, times: TimeTables) -> Array:
    """Return the least work of a micro-batch by segment, on a stage that cannot keep all graphs."""
    both, way = _add_up(times.by_name), _name_way(option)
    if way == "full":
        return both + times.recompute
    if way == "selective":
        return both + times.optional["selective_s"]
    if way != "offload":
        return both
    out, back = times.optional["offload_s"], times.optional["load_s"]
    if not times.copies_beside:
        return both + out + back
    # Beside each copy there is a forward or a backward, and no more. If these took longer, they
    # would hide more of both copies, but not more than the longer one of them.
    shorter = np.minimum(times.forward, times.backward)
    return np.maximum(both, shorter + np.maximum(out, back))


def _group(values: Array, cells: int) -> list[tuple[float, float]]:
    """Divide increasing values into groups; return the least and the largest of each."""
    parts = np.array_split(values, min(cells, len(values))) if len(values) else []
    return [(float(part[0]), float(part[-1])) for part in parts]


def _compute_least(work: Array) -> Array:
    """Return the least work of 1, 2, ... consecutive segments."""
    if len(work) < 2:
        return np.zeros(0)
    begins, ends = _find_runs(len(work))
    runs = np.where(ends < len(work), work[begins, np.minimum(ends, len(work) - 1)], np.inf)
    return runs.min(axis=0)


@lru_cache(maxsize=8)
def _find_runs(size: int) -> tuple[Array, Array]:
    """Return begins as rows and ends of runs of 1, 2, ... as columns; some lie beyond the last."""
    begins = np.arange(size)[:, None]
    return begins, begins + np.arange(1, size)[None, :]


def _count_held(windows: Sequence[Array], limits: Array) -> Array:
    return np.array([np.searchsorted(row, limits, side="right") for row in windows], dtype=float)
