"""Model a pipeline whose stages are placed on GPUs, for any partition of the segments.

`Chain` times partitions (one, or many at once) by simulating the engine's actions, and computes
lower bounds for them. Stage i cannot begin before the forwards of earlier stages; then it does all
its work, and the gradients of earlier stages follow. So for any schedule, with the costs of a
partition's stages

    time >= max over i of  work_i + sum over k < i of (forward_k + backward_k + messages_k)

The sum covers only earlier stages, so a recursion from the last stage gives the exact least bound
of all partitions:

    least[i][a] = min over e of max(work_i(a, e), upstream_i(a, e) + least[i + 1][e])

Chains with the same last stages share these figures (`Behind`), which are computed once and cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from varuna_core.planner.model.cluster import PlacedPipeline
from varuna_core.planner.model.schedule_model import ScheduleModel
from varuna_core.planner.model.step import ActionCosts, StageMemory, StepCosts, simulate_step
from varuna_core.planner.model.tables import Array, Shape, StageTable, Sums, Tables, compute_stage
from varuna_core.schedule.compiled import Compiled
from varuna_core.schedule.recompute import Memory, apply_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind:
    """Lower bounds of a stage and all later ones, by its first segment; inf if nothing fits."""

    least: Array
    """The least step time; the module's docstring has the recurrence."""
    round: Array
    """Least time of one micro-batch's forward and backward through these stages."""
    largest: Array
    """The least value that the largest `beyond` of these stages can have."""
    summed: Array
    """Least time until all gradient sums over the replicas of these stages are done."""
    unhidden: Array
    """Least time for which this stage's gradient sum continues after its last backward, by run."""
    stage: StageTable | None = None
    after: Behind | None = None

    def compute_beyond(self, begins: int | slice | Array = slice(None)) -> Array:
        """Return `beyond` of this stage (as in StageTable), including rounds in which micro-batches
        wait for gradients."""
        assert self.stage is not None and self.after is not None
        return _compute_beyond(self.stage, self.after, begins)


def _compute_beyond(stage: StageTable, after: Behind, begins: int | slice | Array) -> Array:
    """Compute `beyond` (as in StageTable) of a stage that runs w of m forwards before its first
    gradient:

    F0 ─ way down, way back ─ B0, then m - 1 backwards and m - w forwards
    F0 ─ way ─ B0 Fw ─ way ─ Bw F2w ─ way ─ ... and the backwards that are left
    """
    if not stage.more_rounds:
        return stage.beyond[begins]
    again = stage.more_rounds * (stage.way[begins] + after.round) + stage.left[begins]
    return np.maximum(stage.beyond[begins], again)


def compute_end(tables: Tables) -> Behind:
    """Return the `Behind` that follows the last stage."""
    found = tables.behind.get("end")
    if found is None:
        nothing = np.full(tables.size + 1, np.inf)
        nothing[tables.size] = 0.0
        found = tables.behind["end"] = Behind(
            least=nothing,
            round=nothing,
            largest=nothing,
            summed=nothing,
            unhidden=nothing,
        )
    assert isinstance(found, Behind)
    return found


def compute_behind(
    tables: Tables, shape: Shape, stage: StageTable, sums: Sums, after: Behind, puts_off: bool
) -> Behind:
    """Return the `Behind` of a stage from that of the next stage; `puts_off` is the chain's."""
    key = id(stage), id(sums), id(after), puts_off
    found = tables.behind.get(key)
    if found is None:
        found = tables.behind[key] = _make(tables, shape, stage, sums, after, puts_off)
    assert isinstance(found, Behind)
    return found


def _make(
    tables: Tables, shape: Shape, stage: StageTable, sums: Sums, after: Behind, puts_off: bool
) -> Behind:
    upstream = stage.way_down if puts_off else stage.way
    unhidden = _compute_unhidden(tables, shape, stage, sums)
    done = np.maximum(stage.work + unhidden, stage.way_down + after.summed)
    beyond = _compute_beyond(stage, after, slice(None))
    return Behind(
        least=np.maximum(stage.work, upstream + after.least).min(axis=1),
        round=(stage.way + after.round).min(axis=1),
        largest=np.maximum(beyond, after.largest).min(axis=1),
        summed=done.min(axis=1),
        unhidden=unhidden,
        stage=stage,
        after=after,
    )


def _compute_unhidden(tables: Tables, shape: Shape, stage: StageTable, sums: Sums) -> Array:
    took = sums.reduce
    if not tables.training.overlap_reduction:
        return took
    key = id(stage), id(sums)
    if key not in tables.behind:
        buckets = tables.compute_buckets(shape)
        last = np.maximum(stage.kinds[3], stage.kinds[5]) if stage.puts_off else stage.kinds[3]
        hidden = last * (1 - 1 / buckets)
        # With the stage, so that nothing else gets its id as long as the key is there.
        tables.behind[key] = np.maximum(took / buckets, took - hidden), stage
    return tables.behind[key][0]


MOST_FACTORS = 4_000_000
"""The most actions, over all partitions timed at once, that need factors of their own."""
Bounds = tuple[int, ...]
"""Boundaries of the stages: 0, the end of the first stage, ..., the number of segments."""


class Chain:
    """A pipeline with one stage on each rank, whose stages have GPUs but no partition yet."""

    def __init__(
        self,
        tables: Tables,
        shape: Shape,
        placed: PlacedPipeline,
        work: ScheduleModel,
        least: int = 1,
    ) -> None:
        """`least` is the fewest segments of an inner stage; the outer stages need only one."""
        self.tables, self.shape, self.placed = tables, shape, placed
        self.schedule, self.num_stages = work, len(work.roles)
        self.size = tables.size
        self.blocking = not tables.training.overlap_sends
        self.places = work.placement
        """The rank in a replica of each stage."""
        last = self.num_stages - 1
        inner = max(0, least)
        self.least = [max(1, inner) if s in (0, last) else inner for s in range(last + 1)]
        sites = [placed.sites[place] for place in self.places]
        between = [placed.find_boundary(*pair) for pair in itertools.pairwise(self.places)]
        in_memory = np.zeros((4, self.size + 1))
        self.hops = [
            in_memory if boundary is None else tables.compute_hops(boundary, shape)
            for boundary in between
        ]
        self.sums = [tables.compute_sums(site, shape) for site in sites]
        self.stages = [
            compute_stage(
                tables,
                shape,
                sites[s],
                between[s - 1] if s else None,
                between[s] if s < last else None,
                work.roles[s],
                self.least[s],
            )
            for s in range(last + 1)
        ]

    @cached_property
    def num_kinds(self) -> int:
        """The number of kinds of action with costs; without offload it is smaller by two."""
        return max(len(stage.kinds) for stage in self.stages)

    @property
    def compiled(self) -> Compiled:
        return self.schedule.compiled

    @cached_property
    def sharing(self) -> list[int]:
        """The number of replicas whose messages share a link, for each boundary."""
        between = [self.placed.find_boundary(*pair) for pair in itertools.pairwise(self.places)]
        flows = [[] if one is None else [route.flows for route in one.routes] for one in between]
        return [max([1, *(each // self.shape.tensor for each in own)]) for own in flows]

    def may_recompute(self, limit: float) -> bool:
        """Return True if a run that needs recomputes to fit takes at most `limit`."""
        return any(bool((stage.work[stage.is_beyond] <= limit).any()) for stage in self.stages)

    def compile(self, bounds: Bounds) -> Compiled:
        """Return the schedule of a partition; with `auto`, its recomputes depend on the memory."""
        if not self.schedule.keeps_what_fits:
            return self.compiled
        held = self.list_memory(bounds)
        kept = [stage.kept for stage in self.stages]
        assert all(kept), "the stages of a schedule either all keep what fits, or none does"
        pairs = itertools.pairwise(bounds)
        memory = Memory(
            graphs=tuple(one.graph for one in held),
            inputs=tuple(one.inputs for one in held),
            limits=tuple(
                float(one.room[pair]) for one, pair in zip(kept, pairs, strict=True) if one
            ),
        )
        return Compiled(apply_recompute(self.schedule.plain, "auto", memory))

    # Costs of stages as cut.

    def build_costs(self, bounds: Bounds) -> StepCosts:
        """Return the costs of a partition's stages."""
        pairs = list(itertools.pairwise(bounds))
        stages = range(self.num_stages)
        costs = [0.0] * (self.num_kinds * self.num_stages)
        for s in stages:
            for kind, table in enumerate(self.stages[s].kinds):
                costs[kind * self.num_stages + s] = float(table[pairs[s]])
        hops, holds = (
            tuple(
                0.0 if self.blocking else float(self.hops[s][way][bounds[s + 1]])
                for s in stages[:-1]
                for way in ways
            )
            for ways in ((0, 1), (2, 3))
        )
        buckets = self.tables.compute_buckets(self.shape)
        return StepCosts(
            columns=(ActionCosts(costs=tuple(costs), hops=hops, holds=holds),),
            reduce_s=tuple(float(self.sums[s].reduce[pairs[s]]) for s in stages),
            num_buckets=tuple(int(buckets[pair]) for pair in pairs),
            ties=self._find_ties(bounds),
            optimizer_s=tuple(float(self.stages[s].optimizer[pairs[s]]) for s in stages),
            exchange_s=tuple(float(self.sums[s].exchange[pairs[s]]) for s in stages),
            data_s=self.tables.training.data_s,
            overlap_reduction=self.tables.training.overlap_reduction,
        )

    def _find_ties(self, bounds: Bounds) -> tuple[tuple[tuple[int, ...], float], ...]:
        ties = []
        for tie in self.tables.profile.model.ties:
            stages = tuple(
                s
                for s in range(self.num_stages)
                if any(bounds[s] <= segment < bounds[s + 1] for segment in tie.segments)
            )
            if len(stages) > 1:
                ties.append((stages, self._time_tie(stages, tie.parameters)))
        return tuple(ties)

    def _time_tie(self, stages: Sequence[int], parameters: int) -> float:
        """Return the time to sum tied weights, with all replicas summing at once."""
        places = sorted({self.places[s] for s in stages})
        if len(places) == 1:  # a rank has one copy
            return 0.0
        num_bytes = parameters / self.shape.tensor * self.tables.training.reduced_bytes
        network = self.tables.profile.network
        sites = [self.placed.sites[place] for place in places]
        between = self.placed.boundaries[places[0] : places[-1]]
        if all(route.where == "intra" for boundary in between for route in boundary.routes):
            together = [(sites[0].kinds[0], len(sites))]
            return float(network.find_all_reduce(together, num_bytes)[0])
        sharing = max(max(n for _, n in site.group) for site in sites) * self.shape.tensor
        nodes = [(site.kinds[0], 1) for site in sites]
        return float(network.find_all_reduce(nodes, num_bytes, sharing)[0])

    # Memory.

    def list_memory(self, bounds: Bounds) -> list[StageMemory]:
        fixed = self.tables.compute_fixed(self.shape)
        found = []
        for s, pair in enumerate(itertools.pairwise(bounds)):
            found.append(
                StageMemory(
                    fixed=float(fixed[pair]),
                    graph=float(self.stages[s].graph[pair]),
                    inputs=float(self.stages[s].inputs[pair]),
                    work=float(self.stages[s].times.work_bytes[pair]),
                )
            )
        return found

    def select_fitting(self, cuts: Array) -> Array:
        """Return a mask of the partitions (rows of `cuts`) whose stages all fit in memory."""
        fits = np.ones(len(cuts), dtype=bool)
        for s in range(self.num_stages):
            fits &= self.stages[s].allowed[cuts[:, s], cuts[:, s + 1]]
        return fits

    # Bounds.

    @cached_property
    def puts_off(self) -> bool:
        """True if weight gradients are postponed, so the last action frees no earlier stage."""
        return any(stage.puts_off for stage in self.stages)

    @cached_property
    def upstream(self) -> list[Array]:
        """For each stage, the time of a step in which later stages cannot work: before their first
        action and after their last one."""
        if self.puts_off:
            return [stage.way_down for stage in self.stages]
        return [stage.way for stage in self.stages]

    @cached_property
    def tail(self) -> float:
        """Least time that a step takes after the end of the pipeline, for any partition."""
        training = self.tables.training
        every = {id(stage): stage.optimizer.diagonal(1) for stage in self.stages}
        fastest = np.min(list(every.values()), axis=0).sum()
        tail = training.data_s + float(fastest) / self.num_stages
        return tail + float(self.sums[0].exchange[0, 1])

    @cached_property
    def tied_tail(self) -> float:
        """Time after the pipeline to sum weights tied between the first and the last stage."""
        if self.puts_off:  # then the pipeline may end on another stage than the first
            return 0.0
        tail = 0.0
        for tie in self.tables.profile.model.ties:
            if 0 in tie.segments and self.size - 1 in tie.segments and self.num_stages > 1:
                tail += self._time_tie((0, self.num_stages - 1), tie.parameters)
        return tail

    @cached_property
    def behind(self) -> list[Behind]:
        """The `Behind` of each stage, then that of the end of the pipeline."""
        found = [compute_end(self.tables)]
        for stage, sums in zip(reversed(self.stages), reversed(self.sums), strict=True):
            found.append(
                compute_behind(self.tables, self.shape, stage, sums, found[-1], self.puts_off)
            )
        return found[::-1]

    @cached_property
    def first_tail(self) -> Array:
        """Time after the actions of the first stage, by the end of its segments: to sum its
        gradients, then to sum tied weights."""
        if self.puts_off:
            return np.zeros(self.size + 1)
        return self.behind[0].unhidden[0] + self.tied_tail

    @cached_property
    def bound(self) -> float:
        """Lower bound on the step time of every partition; inf if none fits."""
        first, own, after = self.stages[0], self.behind[0], self.behind[1]
        bound = np.maximum(first.work[0], self.upstream[0][0] + after.least)
        if not self.puts_off:
            beyond = np.maximum(own.compute_beyond(0), after.largest)
            bound = np.maximum(bound, first.way[0] + after.round + beyond)
        bound = float((bound + self.first_tail).min())
        return max(bound, float(own.summed[0])) + self.tail

    def follow_bound(self) -> Bounds | None:
        """Return the partition with the least bound; None if none fits."""
        if not np.isfinite(self.behind[0].least[0]):
            return None
        bounds = [0]
        for s in range(self.num_stages):
            a = bounds[-1]
            after = self.behind[s + 1].least
            row = np.maximum(self.stages[s].work[a], self.upstream[s][a] + after)
            bounds.append(int(row.argmin()))
        return tuple(bounds)

    # Times.

    def compute_steps(
        self, partitions: Sequence[Bounds] | Array, factors: Array | None = None
    ) -> Array:
        """Return partitions' step times, as in `simulate_step`; `factors` are as in Levels.run."""
        if not len(partitions):
            return np.zeros(0)
        cuts = np.array(partitions)
        most = max(1, MOST_FACTORS // len(self.compiled.ops))
        if self.schedule.keeps_what_fits and factors is None and len(cuts) > most:
            parts = [cuts[at : at + most] for at in range(0, len(cuts), most)]
            return np.concatenate([self.compute_steps(part) for part in parts])
        kept = self._find_kept(cuts)
        if kept is not None:
            factors = kept if factors is None else kept * factors
        begins, ends = cuts[:, :-1], cuts[:, 1:]
        stages = range(self.num_stages)
        costs = np.zeros((len(cuts), self.num_kinds * self.num_stages))
        for s in stages:
            a, e = begins[:, s], ends[:, s]
            for kind, table in enumerate(self.stages[s].kinds):
                costs[:, kind * self.num_stages + s] = table[a, e]
        hops, holds = np.zeros((2, len(cuts), 2 * (self.num_stages - 1)))
        if not self.blocking:
            for s in stages[:-1]:
                hops[:, 2 * s : 2 * s + 2] = self.hops[s][:2, ends[:, s]].T
                holds[:, 2 * s : 2 * s + 2] = self.hops[s][2:, ends[:, s]].T
        makespan, free, last = self.schedule.levels.run(costs, hops, holds, factors)
        lag = (holds - hops).max(axis=1, initial=0.0)
        return lag + self._add_tail(begins, ends, costs, makespan, free, last)

    def _find_kept(self, cuts: Array) -> Array | None:
        """Return factors for the actions of `compiled`: 0 for recomputes that a stage can avoid."""
        if not self.schedule.keeps_what_fits:
            return None
        factors = np.ones((len(self.compiled.ops), len(cuts)))
        for s, (places, microbatches) in enumerate(self.schedule.recomputes):
            kept = self.stages[s].kept
            if kept is not None:
                which = kept.which[cuts[:, s], cuts[:, s + 1]]
                factors[places] = kept.patterns[which][:, microbatches].T
        return factors

    def compute_step(self, bounds: Bounds) -> float:
        return simulate_step(self.compile(bounds), self.build_costs(bounds)).step_s

    def _add_tail(
        self, begins: Array, ends: Array, costs: Array, makespan: Array, free: Array, last: Array
    ) -> Array:
        training = self.tables.training
        buckets = self.tables.compute_buckets(self.shape)
        done = np.empty_like(last)
        optimizer, exchange = np.zeros((2, *free.shape))
        for s, rank in enumerate(self.places):
            a, e = begins[:, s], ends[:, s]
            took = self.sums[s].reduce[a, e]
            length = costs[:, self.compiled.compute_last_cost(s)]
            end = last[:, s] + length
            if training.overlap_reduction:
                count = buckets[a, e]
                summed = np.maximum(end + took / count, last[:, s] + length / count + took)
            else:
                summed = free[:, rank] + took
            done[:, s] = np.where(took > 0, summed, end)
            optimizer[:, rank] += self.stages[s].optimizer[a, e]
            exchange[:, rank] += self.sums[s].exchange[a, e]
        if self.num_stages > len(self.placed.sites):
            self._follow_sums(begins, ends, last, done)
        for tie in self.tables.profile.model.ties:
            self._add_tie(tie.segments, tie.parameters, ends, done)
        agreed = np.maximum(makespan, done.max(axis=1))
        return training.data_s + agreed + optimizer.max(axis=1) + exchange.max(axis=1)

    def _follow_sums(self, begins: Array, ends: Array, last: Array, done: Array) -> None:
        """Add each rank's gradient sums, in the order in which its stages' last backwards begin."""
        rows = np.arange(len(done))
        reduce = np.stack(
            [self.sums[s].reduce[begins[:, s], ends[:, s]] for s in range(self.num_stages)], axis=1
        )
        for rank in range(len(self.placed.sites)):
            own = np.array([s for s, place in enumerate(self.places) if place == rank])
            order = own[np.argsort(last[:, own], axis=1, kind="stable")]
            for before, stage in itertools.pairwise(order.T):
                took = reduce[rows, stage]
                after = np.where(took > 0, done[rows, before] + took, 0.0)
                done[rows, stage] = np.maximum(done[rows, stage], after)

    def _add_tie(self, segments: Sequence[int], parameters: int, ends: Array, done: Array) -> None:
        """Add the sum of a tied weight; the stages that hold it differ between partitions."""
        holders = np.sort(
            np.stack([(ends <= segment).sum(axis=1) for segment in segments], axis=1), axis=1
        )
        for stages in {tuple(row) for row in holders.tolist()}:
            held = sorted(set(stages))
            if len(held) < 2:
                continue
            rows = (holders == np.array(stages)).all(axis=1)
            after = done[rows][:, held].max(axis=1) + self._time_tie(held, parameters)
            done[np.ix_(np.flatnonzero(rows), held)] = after[:, None]
