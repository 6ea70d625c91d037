"""The best plan by trying them all: every option, placement and partition, each one timed.

No bound is used, and of the planner nothing but what its model is made of: the tables' figures of a
run of segments, where stages lie on given nodes, and the schedules' actions. The space is listed
again, from what docs/planner_design.md says of it.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tests.varuna_core.planner.profiles import KINDS, add_halves, make_profile
from varuna_core.planner.model.cluster import (
    Cluster,
    NodeKind,
    Order,
    PlacedPipeline,
    StageSite,
    count_stages,
    list_all_orders,
    list_blocks,
    place,
)
from varuna_core.planner.model.schedule_model import Levels
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import RECOMPUTES, TrainingModel
from varuna_core.planner.profile.profile import FIGURE_OF, Profile
from varuna_core.planner.search.space import Wishes
from varuna_core.schedule.actions import Action, Schedule, ScheduleError
from varuna_core.schedule.compiled import KINDS as ACTIONS
from varuna_core.schedule.compiled import Compiled
from varuna_core.schedule.recompute import Memory, Recompute, apply_recompute
from varuna_core.schedule.registry import build_schedule

Array = Any
MOST_ORDERS = 100_000
MOST_ROWS = 4_000
"""Plans that are timed at once."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A question small enough for this."""

    profile: Profile
    training: TrainingModel
    cluster: Cluster
    wishes: Wishes


def draw_instance(draw: random.Random) -> Instance:
    """One to three kinds of nodes of two kinds of GPU; memory that binds or not; keys fixed."""
    size = draw.randint(2, 6)
    memory = draw.choice([1e12, 4e10, 2.5e10])
    profile = make_profile(draw, size, memory)
    needs_memory = draw.random() < 0.4
    if needs_memory:  # a few graphs fit, and not all
        profile = make_profile(draw, size, draw.uniform(6e9, 1.6e10))
    some = draw.sample(range(3), draw.choice([1, 2, 2, 3]))
    kinds = tuple(
        NodeKind(
            name=f"n{number}",
            gpu=KINDS[number % 2],
            gpus=draw.choice([1, 2, 2, 3]),
            count=draw.choice([1, 1, 2]) if len(some) > 1 else draw.choice([1, 2, 3]),
            price_per_hour=draw.uniform(1, 9),
        )
        for number in some
    )
    training = TrainingModel(
        batch=draw.choice([2, 3, 4, 4, 6]),
        overlap_sends=draw.random() < 0.7,
        overlap_reduction=draw.random() < 0.7,
        split_messages=draw.random() < 0.2,
        deals_whole=draw.random() < 0.7,
        recomputes=_draw_recomputes(draw, needs_memory),
        data_s=draw.choice([0.0, 0.5]),
    )
    return Instance(
        profile=add_halves(draw, profile),
        training=training,
        cluster=Cluster(kinds=kinds),
        wishes=_draw_wishes(draw, size),
    )


def _draw_recomputes(draw: random.Random, needs_memory: bool) -> tuple[Recompute, ...]:
    more = [way for way in RECOMPUTES[2:] if needs_memory and draw.random() < 0.6]
    return (*RECOMPUTES[:2], *more)


def _draw_wishes(draw: random.Random, size: int) -> Wishes:
    def some(values: list[Any], share: float = 0.25) -> Any:
        return draw.choice(values) if draw.random() < share else None

    partition = None
    if draw.random() < 0.1:
        cuts = sorted(draw.sample(range(1, size), draw.randint(0, min(3, size - 1))))
        partition = tuple(e - a for a, e in itertools.pairwise([0, *cuts, size]))
    zero = some([0, 1, 2, 3], 0.5)
    return Wishes(
        stages=len(partition) if partition is not None else some([1, 2, 3, 4], 0.15),
        replicas=some([1, 2], 0.15),
        tensor=some([1, 2]),
        micro_batch=some([1, 2], 0.15),
        zero=zero,
        schedule=some(["1f1b", "gpipe", "varuna", *(["zero_bubble"] * (zero != 3))], 0.5),
        recompute=some(["none", "full", "selective", *(["offload"] * (zero != 3))]),
        least=draw.choice([1, 1, 1, 0]),
        partition=partition,
    )


def find_best(one: Instance, *, grouped: bool = False) -> float:
    """Seconds of the best plan; inf where nothing fits."""
    return min(find_best_by_nodes(one, grouped=grouped).values(), default=float("inf"))


def find_best_by_nodes(one: Instance, *, grouped: bool = False) -> dict[tuple[str, ...], float]:
    """Of each choice of nodes; with `grouped` the nodes of a kind lie together."""
    tables = Tables(one.profile, one.training)
    groups: dict[tuple[str, int, int, str], list[tuple[Shape, PlacedPipeline]]] = defaultdict(list)
    placed_by_shape: dict[tuple[int, int], list[PlacedPipeline]] = {}
    for shape, schedule, recompute in _list_options(one):
        m = one.training.batch // shape.replicas // shape.micro_batch
        key = shape.tensor, shape.replicas
        if key not in placed_by_shape:
            placed_by_shape[key] = list(_list_placed(one, *key, grouped))
        for placed in placed_by_shape[key]:
            groups[schedule, len(placed.sites), m, recompute].append((shape, placed))
    best: dict[tuple[str, ...], float] = {}
    for work, chains in groups.items():
        for placed, took in _find_least(tables, work, one.wishes, chains):
            nodes = tuple(sorted(placed.nodes))
            best[nodes] = min(took, best.get(nodes, float("inf")))
    return best


def keep_front(
    one: Instance, best: Mapping[tuple[str, ...], float]
) -> Iterator[tuple[float, float]]:
    """Seconds and price of a step of the plans that no other beats in both, fastest first."""
    prices = {kind.name: kind.price_per_hour or 0.0 for kind in one.cluster.kinds}
    cheapest = float("inf")
    for took, price in sorted(
        (took, sum(prices[name] for name in nodes) * took / 3600) for nodes, took in best.items()
    ):
        if price < cheapest * (1 - 1e-9):
            cheapest = price
            yield took, price


def _find_least(
    tables: Tables,
    work: tuple[str, int, int, str],
    wishes: Wishes,
    chains: Iterable[tuple[Shape, PlacedPipeline]],
) -> Iterator[tuple[PlacedPipeline, float]]:
    """The best partition's time of each of these, or of parts of its partitions."""
    schedule, stages, m, recompute = work
    if recompute != "auto":
        yield from _Timer(tables, _compile(*work), wishes, way=recompute).compute_least(chains)
        return
    plain = _compile(schedule, stages, m, "none").schedule
    timer = _Timer(tables, _compile(schedule, stages, m, "none"), wishes)
    for shape, placed in chains:
        # Each partition has its own schedule; those that have the same are timed together.
        rewritten = [timer.rewrite(shape, site, s) for s, site in enumerate(placed.sites)]
        rows: dict[Any, list[int]] = defaultdict(list)
        for row, ranks in enumerate(zip(*rewritten, strict=True)):
            if None not in ranks:
                rows[ranks].append(row)
        for ranks, own in rows.items():
            part = _Timer(tables, _compile_ranks(plain, ranks), wishes, timer.cuts)
            fits = np.zeros(len(timer.cuts), dtype=bool)
            fits[own] = True
            yield from part.time([(placed, part.list_rows(shape, placed, fits))])


@lru_cache(maxsize=4096)
def _compile_ranks(plain: Schedule, ranks: tuple[tuple[Action, ...], ...]) -> Compiled:
    return Compiled(replace(plain, ranks=ranks))


@lru_cache(maxsize=4096)
def _compile(schedule: str, stages: int, m: int, recompute: Any) -> Compiled:
    return Compiled(build_schedule(schedule, stages, m, recompute=recompute))


def _list_options(one: Instance) -> Iterator[tuple[Shape, str, str]]:
    wishes, batch = one.wishes, one.training.batch
    ways = list(one.training.recomputes) if wishes.recompute is None else [wishes.recompute]
    schedules = [wishes.schedule] if wishes.schedule else ["1f1b", "gpipe", "varuna"]
    for tensor, replicas, size in itertools.product((1, 2), range(1, batch + 1), (1, 2, 3, 4)):
        wanted = ((wishes.tensor, tensor), (wishes.replicas, replicas), (wishes.micro_batch, size))
        if batch % (replicas * size) or any(w not in (None, value) for w, value in wanted):
            continue
        zeros = (0, 1) if wishes.zero is None else (wishes.zero,)
        if wishes.zero == 3 and tensor > 1:
            continue
        for schedule, recompute, zero in itertools.product(schedules, ways, zeros):
            is_free = wishes.recompute is None and recompute in ("auto", "selective", "offload")
            if is_free and not (schedule == "1f1b" or schedule == wishes.schedule == "gpipe"):
                continue
            if zero == 3 and recompute in ("auto", "offload"):
                continue
            if schedule == "varuna" and recompute not in ("full", "selective"):
                continue
            yield (
                Shape(tensor=tensor, replicas=replicas, micro_batch=size, zero=zero),
                schedule,
                (recompute),
            )


def _list_placed(
    one: Instance, tensor: int, replicas: int, grouped: bool
) -> Iterator[PlacedPipeline]:
    wanted, longest = one.wishes.stages, one.profile.model.num_segments
    if wanted is not None and one.wishes.least == 0:
        longest = max(longest, wanted)  # some without any segment, if that is asked for
    seen = set()
    for order, most in _list_orders(one.cluster, tensor, replicas, grouped):
        for stages in range(1, min(most, longest) + 1):
            placed = place(order, stages, tensor, replicas)
            if placed is None or wanted not in (None, stages):
                continue
            if placed not in seen:
                seen.add(placed)
                yield placed


def _list_orders(
    cluster: Cluster, tensor: int, replicas: int, grouped: bool
) -> Iterator[tuple[Order, int]]:
    """Nodes in turn, and the most stages that they hold."""
    if grouped:
        limits = [count_stages(kind, tensor, replicas) for kind in cluster.kinds]
        for counts in itertools.product(*(range(limit + 1) for limit in limits)):
            for order in list_blocks(cluster, counts, tensor, replicas):
                yield order, sum(counts)
        return
    orders = list_all_orders(cluster, MOST_ORDERS)
    assert orders is not None
    for order in orders:
        yield order, sum(max(1, kind.gpus // tensor // replicas) for kind, _ in order)


def _rewrite(alone: Schedule, s: int, graph: float, inputs: float, room: float) -> Any:
    every = (1.0,) * s
    memory = Memory(graphs=(*every, graph), inputs=(*every, inputs), limits=(room,))
    try:
        (actions,) = apply_recompute(alone, "auto", memory).ranks
    except ScheduleError:
        return None
    return actions


class _Timer:
    """Of plans with one schedule."""

    def __init__(
        self,
        tables: Tables,
        compiled: Compiled,
        wishes: Wishes,
        cuts: Array = None,
        way: str = "auto",
    ) -> None:
        self.tables, self.compiled, self.wishes, self.way = tables, compiled, wishes, way
        self.stages = compiled.num_stages
        self.cuts = self._list_cuts() if cuts is None else cuts
        self._known: dict[Any, Array] = {}

    def _list_cuts(self) -> Array:
        size, wishes = self.tables.size, self.wishes
        if wishes.partition is not None:
            every = [(0, *itertools.accumulate(wishes.partition))]
        else:
            # The first and the last stage hold something; the others too, unless they need not.
            every = [
                (0, *cuts, size)
                for cuts in itertools.combinations_with_replacement(range(1, size), self.stages - 1)
            ]
        least = [max(1, wishes.least)] * self.stages
        least[1:-1] = [wishes.least] * len(least[1:-1])
        return np.array(
            [
                row
                for row in every
                if all(e - a >= n for (a, e), n in zip(itertools.pairwise(row), least, strict=True))
            ],
            dtype=int,
        ).reshape(-1, self.stages + 1)

    def compute_least(
        self, chains: Iterable[tuple[Shape, PlacedPipeline]]
    ) -> Iterator[tuple[PlacedPipeline, float]]:
        """The best partition's time, of those that fit in memory; some thousands timed at once."""
        held: list[tuple[PlacedPipeline, tuple[Array, ...]]] = []
        rows = 0
        for shape, placed in chains:
            fits = np.ones(len(self.cuts), dtype=bool)
            for s, site in enumerate(placed.sites):
                fits &= self._fits(shape, site, s)
            if fits.any():
                held.append((placed, self.list_rows(shape, placed, fits)))
                rows += int(fits.sum())
            if rows > MOST_ROWS:
                yield from self.time(held)
                held, rows = [], 0
        if held:
            yield from self.time(held)

    def _fits(self, shape: Shape, site: StageSite, s: int) -> Array:
        key = "fits", shape, site.kinds, s
        if key not in self._known:
            fixed, work, graph, inputs, memory = self._find_memory(shape, site, s)
            most = [g * graph + i * inputs for g, i in self.compiled.held[s]]
            self._known[key] = fixed + work + np.max(most, axis=0) <= memory
        return self._known[key]

    def rewrite(self, shape: Shape, site: StageSite, s: int) -> list[Any]:
        """Of each partition the stage's list of actions, by the room that the runtime would give to
        micro-batches; None where nothing helps."""
        key = "rewritten", shape, site.kinds, s
        if key not in self._known:
            fixed, work, graph, inputs, memory = self._find_memory(shape, site, s)
            free = 0.9 * (memory / self.tables.training.memory_share - fixed)
            room = np.minimum(memory - fixed - work, free)
            alone = replace(
                self.compiled.schedule, ranks=(self.compiled.schedule.ranks[s],), placement=(0,)
            )
            found: dict[Any, Any] = {}
            runs = list(map(tuple, self.cuts[:, s : s + 2].tolist()))
            for run, *figures in zip(runs, graph, inputs, room, strict=True):
                if run not in found:
                    found[run] = _rewrite(alone, s, *map(float, figures))
            self._known[key] = [found[run] for run in runs]
        return self._known[key]  # type: ignore[no-any-return]  # kept beside arrays

    def _find_memory(self, shape: Shape, site: StageSite, s: int) -> tuple[Array, ...]:
        """What a stage holds whatever it does, while it works, of a micro-batch, of its inputs; and
        what there is."""
        tables = self.tables
        a, e = self.cuts[:, s], self.cuts[:, s + 1]
        times = tables.compute_times(site.kinds, shape.micro_batch, shape.tensor)
        each = tables.training.count_fixed_bytes(shape.zero, shape.replicas)
        held = tables.compute_parameters(shape.tensor)[a, e] * each
        held = held + tables.training.framework_bytes
        if shape.zero == 3 and shape.replicas > 1:
            own = tables.profile.compute_parameters(shape.tensor)
            largest = [max(own[i:j], default=0) for i, j in zip(a, e, strict=True)]
            kept = tables.training.count_fixed_bytes(2, shape.replicas)
            for tie in tables.profile.model.ties:
                for segment in tie.segments:
                    copy = tie.parameters / shape.tensor * (kept - each)
                    held = held + np.where((a <= segment) & (segment < e), copy, 0.0)
            held = held + np.array(largest) * (
                tables.training.weight_bytes + tables.training.gradient_bytes
            )
        sent = tables.compute_outputs(site.kinds[0], shape.micro_batch, shape.tensor)
        graph = times.graph_bytes[a, e] + sent[e]
        inputs = sent[a]
        if self.way == "selective":
            inputs = inputs + times.optional["kept_bytes"][a, e]
        return held, times.work_bytes[a, e], graph, inputs, times.memory_bytes

    def list_rows(self, shape: Shape, placed: PlacedPipeline, fits: Array) -> tuple[Array, ...]:
        """Costs, messages alone and together, sums, buckets, optimizer, weights back, tied weights
        of each plan."""
        tables, training = self.tables, self.tables.training
        cuts = self.cuts[fits]
        costs = np.zeros((len(cuts), 8, self.stages))
        hops, holds = np.zeros((2, len(cuts), self.stages - 1, 2))
        sums, buckets, optimizer, back = (np.empty((len(cuts), self.stages)) for _ in range(4))
        for s, site in enumerate(placed.sites):
            a, e = cuts[:, s], cuts[:, s + 1]
            times = tables.compute_times(site.kinds, shape.micro_batch, shape.tensor)
            forward, gradient = times.forward[a, e], times.input_grad[a, e]
            both = times.backward[a, e]
            weights, again = times.weight_grad[a, e], times.recompute[a, e]
            if self.way == "selective":
                again = times.optional["selective_s"][a, e]
            if times.host:
                # In a step all of a stage's launches against all of its work.
                rows = (forward, forward, again, both, gradient, weights)
                launched = [times.host[FIGURE_OF[kind]][a, e] for kind in ACTIONS]
                if self.way == "selective":
                    launched[2] = times.optional["selective_host_s"][a, e]
                uses = [self.compiled.uses[i * self.stages + s] for i in range(len(ACTIONS))]
                device = sum(n * row for n, row in zip(uses, rows, strict=True))
                host = sum(n * row for n, row in zip(uses, launched, strict=True))
                late = np.maximum(host - device, 0) / np.where(host > 0, host, 1)
                if self.way == "selective":  # no action is quicker than without recomputes
                    device, host = device - uses[2] * again, host - uses[2] * launched[2]
                    plain = np.maximum(host - device, 0) / np.where(host > 0, host, 1)
                    late = np.maximum(late, plain)
                forward, _, again, both, gradient, weights = (
                    row + late * launch for row, launch in zip(rows, launched, strict=True)
                )
            if s < self.stages - 1:
                there = tables.compute_hops(placed.boundaries[s], shape)
                if training.overlap_sends:
                    hops[:, s], holds[:, s] = there[:2, e].T, there[2:, e].T
                else:
                    forward = forward + there[2][e]
            if s and not training.overlap_sends:
                sent = tables.compute_hops(placed.boundaries[s - 1], shape)[3][a]
                gradient, both = gradient + sent, both + sent
            if shape.zero > 1 and shape.replicas > 1:
                count = tables.compute_parameters(shape.tensor)[a, e]
                network = tables.profile.network
                is_whole = training.deals_whole and shape.zero == 2
                summed, gathered = (
                    network.compute_half(half, site.group, count * each, site.sharing)
                    for half, each in (
                        ("reduce" if is_whole else "reduce_scatter", training.reduced_bytes),
                        ("all_gather", training.weight_bytes),
                    )
                )
                both, weights = both + summed, weights + summed
                if shape.zero == 3:
                    forward, again, both = forward + gathered, again + gathered, both + gathered
            rows = (forward, forward, again, both, gradient, weights)
            for kind, cost in enumerate(rows):
                costs[:, kind, s] = cost
            if any(action.kind == "O" for action in self.compiled.schedule.ranks[s]):
                costs[:, 6:, s] = self._time_copies(shape, site, s, cuts, rows)
            traffic = tables.compute_sums(site, shape)
            sums[:, s], back[:, s] = traffic.reduce[a, e], traffic.exchange[a, e]
            buckets[:, s] = tables.compute_buckets(shape)[a, e]
            owners = shape.replicas if shape.zero else 1
            optimizer[:, s] = times.optimizer[a, e] / owners
        return (
            costs.reshape(len(cuts), -1),
            hops.reshape(len(cuts), -1),
            holds.reshape(len(cuts), -1),
            sums,
            buckets,
            optimizer,
            back,
            self._time_ties(shape, placed, cuts),
        )

    def _time_copies(
        self, shape: Shape, site: StageSite, s: int, cuts: Array, rows: Sequence[Array]
    ) -> Array:
        """Of each plan what an O and an L of the stage leave to be waited for, on average."""
        tables, a, e = self.tables, cuts[:, s], cuts[:, s + 1]
        times = tables.compute_times(site.kinds, shape.micro_batch, shape.tensor)
        entering = tables.compute_outputs(site.kinds[0], shape.micro_batch, shape.tensor)
        graphs = times.graph_bytes.diagonal(1)
        copied = np.maximum(0, times.graph_bytes[a, e] - entering[a])
        measured = [
            sum(np.maximum(0, graphs - entering[:-1])[i:j]) for i, j in zip(a, e, strict=True)
        ]
        more = [max(1, x / y) if y else 1.0 for x, y in zip(copied, measured, strict=True)]
        out, back = (times.optional[name][a, e] * more for name in ("offload_s", "load_s"))
        waits: dict[str, list[Array]] = {"O": [], "L": []}
        beside: Array = np.zeros(len(cuts))  # work since the last copy out
        out_of: Any = None  # whether one is under way
        loading: dict[int, Array] = {}
        for action in self.compiled.schedule.ranks[s]:
            if action.kind in "OL":
                if out_of is not None:
                    waits["O"].append(np.maximum(0, out - beside))
                out_of = None
            if action.kind == "O":
                beside, out_of = np.zeros(len(cuts)), action
            elif action.kind == "L":
                loading[action.microbatch] = np.zeros(len(cuts))
            else:
                if action.kind in "BI" and action.microbatch in loading:
                    waits["L"].append(np.maximum(0, back - loading.pop(action.microbatch)))
                if times.copies_beside:
                    took = rows[ACTIONS.index(action.kind)]
                    beside = beside + took
                    loading = {number: since + took for number, since in loading.items()}
        return np.stack([np.mean(waits[kind], axis=0) for kind in "OL"], axis=1)

    def _time_ties(self, shape: Shape, placed: PlacedPipeline, cuts: Array) -> Array:
        """The sum of the first and the last stage's copies; 0 where nothing is tied."""
        found = np.zeros(len(cuts))
        for tie in self.tables.profile.model.ties:
            assert set(tie.segments) == {0, self.tables.size - 1}, "as make_profile ties them"
            if self.stages > 1:
                ends = [placed.sites[0], placed.sites[-1]]
                network = self.tables.profile.network
                sent = tie.parameters / shape.tensor * self.tables.training.reduced_bytes
                if {r.where for b in placed.boundaries for r in b.routes} == {"intra"}:
                    pair = [(ends[0].kinds[0], 2)]  # on one node
                    found += float(network.find_all_reduce(pair, sent)[0])
                    continue
                flows = max(n for site in ends for _, n in site.group) * shape.tensor
                nodes = [(site.kinds[0], 1) for site in ends]
                found += float(network.find_all_reduce(nodes, sent, flows)[0])
        return found

    def time(
        self, held: Sequence[tuple[PlacedPipeline, tuple[Array, ...]]]
    ) -> Iterator[tuple[PlacedPipeline, float]]:
        costs, hops, holds, sums, buckets, optimizer, back, ties = map(
            np.concatenate, zip(*(rows for _, rows in held), strict=True)
        )
        training, compiled = self.tables.training, self.compiled
        makespan, free, begun = Levels(compiled).run(costs, hops, holds)
        lag = (holds - hops).max(axis=1, initial=0.0)
        last = np.stack(
            [costs[:, compiled.compute_last_cost(s)] for s in range(self.stages)], axis=1
        )
        done = begun + last
        if training.overlap_reduction:
            summed = np.maximum(done + sums / buckets, begun + last / buckets + sums)
        else:
            summed = free + sums
        done = np.where(sums > 0, summed, done)
        tied = np.maximum(done[:, 0], done[:, -1]) + ties
        agreed = np.maximum(np.maximum(makespan, done.max(axis=1)), np.where(ties > 0, tied, 0))
        steps = training.data_s + lag + agreed + optimizer.max(axis=1) + back.max(axis=1)
        begin = 0
        for placed, rows in held:
            end = begin + len(rows[0])
            yield placed, float(steps[begin:end].min())
            begin = end
