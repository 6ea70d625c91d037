"""Plans with several stages a rank: timed as the step is simulated, in memory as counted action by
action, and found where all partitions of all placements are tried."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.varuna_core.planner.profiles import KINDS, make_profile
from varuna_core.planner.model.cluster import Cluster, NodeKind, list_all_orders, place
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.plan import build_plan, list_used_nodes
from varuna_core.planner.result.refusal import search_or_explain
from varuna_core.planner.search.coverage import Coverage
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.partition import is_allowed
from varuna_core.planner.search.rank_bounds import PlacedBounds
from varuna_core.planner.search.search import Searched
from varuna_core.planner.search.space import Option, Wishes
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.held import follow_held
from varuna_core.schedule.registry import build_schedule

NODES = tuple(
    NodeKind(name=f"n{kind}", gpu=kind, gpus=2, count=2, price_per_hour=1.0) for kind in KINDS
)


def draw_chain(
    draw: random.Random, memory: float = 1e12, name: str = "", each: int = 0
) -> SeveralStages:
    """On nodes of two GPUs, of one kind or both."""
    ranks = draw.randint(1, 4)
    if not name:
        name, each = draw.choice([("zbv", 2), ("interleaved", 2), ("interleaved", 3)])
    size = ranks * each + draw.randint(0, 4)
    training = TrainingModel(
        batch=12, overlap_reduction=draw.random() < 0.7, data_s=draw.choice([0.0, 0.5])
    )
    replicas = draw.choice([1, 2])
    shape = Shape(tensor=1, replicas=replicas, micro_batch=1, zero=draw.choice([0, 1, 2]))
    nodes = [draw.choice(NODES) for _ in range(ranks)]
    placed = next(
        found
        for count in range(1, ranks + 1)
        if (found := place(tuple((n, 2) for n in nodes[:count]), ranks, 1, replicas))
    )
    work = build_schedule_model(
        name, ranks, draw.randint(1, 7), draw.choice(["none", "full"]), each
    )
    return SeveralStages(Tables(make_profile(draw, size, memory), training), shape, placed, work)


def list_partitions(chain: SeveralStages) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, chain.size), chain.num_stages - 1):
        yield (0, *cuts, chain.size)


def draw_partitions(draw: random.Random, chain: SeveralStages) -> list[tuple[int, ...]]:
    every = list(itertools.islice(list_partitions(chain), 500))
    return draw.sample(every, min(8, len(every)))


@pytest.mark.parametrize("seed", range(40))
def test_many_partitions_are_timed_as_each_is_simulated(seed: int) -> None:
    draw = random.Random(f"several/{seed}")
    chain = draw_chain(draw)
    partitions = draw_partitions(draw, chain)
    alone = [
        simulate_step(chain.compiled, chain.build_costs(bounds)).step_s for bounds in partitions
    ]
    assert chain.compute_steps(partitions) == pytest.approx(alone, rel=1e-9)


def count_bytes(chain: SeveralStages, bounds: tuple[int, ...], rank: int) -> float:
    """The most that a rank holds, action by action."""
    schedule, training = chain.compiled.schedule, chain.tables.training
    own = [stage for stage, place in enumerate(chain.places) if place == rank]
    pairs = {stage: (bounds[stage], bounds[stage + 1]) for stage in own}
    parameters = chain.tables.profile.model.parameters[1]
    cell = chain.tables.profile.estimate_cell(chain.placed.sites[rank].kinds[0], 1, 1)
    each = training.count_fixed_bytes(chain.shape.zero, chain.shape.replicas)
    inputs = {s: ([0.0, *cell.output_bytes])[a] for s, (a, e) in pairs.items()}
    graphs = {s: sum(cell.graph_bytes[a:e]) + inputs[s] for s, (a, e) in pairs.items()}
    live = max(
        sum(held.graphs[s] * graphs[s] + held.inputs[s] * inputs[s] for s in own)
        for _, held in follow_held(schedule.ranks[rank], own)
    )
    return (
        sum(sum(parameters[a:e]) for a, e in pairs.values()) * each
        + training.framework_bytes
        + max(max(cell.work_bytes[a:e]) for a, e in pairs.values())
        + live
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_fits_is_what_each_rank_can_hold(seed: int) -> None:
    draw = random.Random(f"memory/{seed}")
    chain = draw_chain(draw, memory=draw.uniform(5e9, 3e10))
    chain = replace_placed(chain)
    limit = chain.stages[0].times.memory_bytes
    ranks = range(len(chain.placed.sites))
    for bounds in draw_partitions(draw, chain):
        held = [count_bytes(chain, bounds, rank) for rank in ranks]
        assert is_allowed(chain, bounds) == (max(held) <= limit)


def replace_placed(chain: SeveralStages) -> SeveralStages:
    """With stages of one kind of GPU each, whose figures can be looked up."""
    sites = tuple(replace(site, kinds=site.kinds[:1]) for site in chain.placed.sites)
    placed = replace(chain.placed, sites=sites)
    return SeveralStages(chain.tables, chain.shape, placed, chain.schedule)


def test_messages_within_a_rank_cost_nothing_and_others_their_link() -> None:
    """zbv turns on the last rank; interleaved goes back to the first one, two nodes away."""
    draw = random.Random(1)
    tables = Tables(make_profile(draw, 8), TrainingModel(batch=4))
    shape = Shape(tensor=1, replicas=1, micro_batch=1)
    nodes = (NODES[0], 2), (NODES[1], 2)
    placed = place(nodes, 4, 1, 1)
    assert placed is not None
    v = SeveralStages(tables, shape, placed, build_schedule_model("zbv", 4, 4, "none", 2))
    assert not v.hops[3].any() and all(hop[:, 1:8].all() for s, hop in enumerate(v.hops) if s != 3)
    rounds = build_schedule_model("interleaved", 4, 4, "none", 2)
    back = SeveralStages(tables, shape, placed, rounds).hops[3]
    sent = tables.compute_outputs("small", 1, 1)
    there = tables.profile.network.find("small", "big", "inter")
    assert back[0, 1:8] == pytest.approx(there.compute_times(sent)[1:8])


@dataclass(frozen=True)
class Question:
    tables: Tables
    cluster: Cluster
    wishes: Wishes

    def search(self) -> Searched | None:
        try:
            return search_or_explain(
                self.tables.profile,
                self.tables.training,
                self.cluster,
                self.wishes,
                deadline=within(600),
            )
        except PlanningError:
            return None


def draw_question(draw: random.Random, schedule: str | None) -> Question:
    memory = draw.choice([1e12, 1e12, 2e10])
    training = TrainingModel(batch=draw.choice([2, 4, 6]))
    kinds = draw.choice([NODES[:1], NODES[1:], NODES])
    cluster = Cluster(kinds=tuple(replace(kind, count=1) for kind in kinds))
    wishes = Wishes(schedule=schedule, recompute="none", tensor=1, micro_batch=1)
    size = draw.randint(5, 7)
    return Question(Tables(make_profile(draw, size, memory), training), cluster, wishes)


def compute_least(question: Question, schedule: str) -> float:
    """Of every placement, number of stages and partition, with what the runtime would run."""
    least = float("inf")
    orders = list_all_orders(question.cluster, 1000)
    assert orders is not None
    for order, ranks, replicas, zero in itertools.product(orders, range(2, 5), (1, 2), (0, 1)):
        placed = place(order, ranks, 1, replicas)
        if placed is None or question.tables.training.batch % replicas:
            continue
        for each in (2,) if schedule == "zbv" else (2, 3, 4):
            count = question.tables.training.batch // replicas
            shape = Shape(tensor=1, replicas=replicas, micro_batch=1, zero=zero)
            work = build_schedule_model(schedule, ranks, count, "none", each)
            chain = SeveralStages(question.tables, shape, placed, work)
            for bounds in list_partitions(chain):
                run = chain.follow_costs(chain.compute_costs(bounds))
                if is_allowed(run, bounds):
                    least = min(least, run.compute_step(bounds))
    return least


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_what_is_found_is_near_the_best_of_all(schedule: str) -> None:
    """Nothing is proved of it: most plans are the best of all, others near, and where memory is
    scarce one may not be found: the actions in the order for even costs held too much."""
    ratios, missed = [], 0
    for seed in range(16):
        question = draw_question(random.Random(f"near/{schedule}/{seed}"), schedule)
        searched, least = question.search(), compute_least(question, schedule)
        if searched is None:
            missed += least < float("inf")
            continue
        ratios.append(searched.best.step_s / least)
    assert missed <= 1 and len(ratios) > 10
    assert min(ratios) >= 1 - 1e-9
    assert np.median(ratios) <= 1 + 1e-9
    assert max(ratios) < 1.1


def search(wishes: Wishes, batch: int = 4, memory: float = 1e12) -> Searched:
    draw = random.Random(7)
    profile = make_profile(draw, 10, memory)
    return search_or_explain(
        profile, TrainingModel(batch=batch), Cluster(kinds=NODES), wishes, deadline=within(600)
    )


def test_several_stages_a_rank_win_where_micro_batches_are_few() -> None:
    wishes = Wishes(replicas=1, tensor=1, micro_batch=1, stages=4, zero=0, recompute="none")
    searched = search(wishes)
    one = search(replace(wishes, schedule="1f1b"))
    assert searched.best.stages_per_rank == 2
    assert searched.best.step_s < one.best.step_s
    assert [(c.stages_per_rank, c.coverage) for c in one.classes] == [((1,), Coverage.WHOLLY)]
    assert one.gap == 0 and 0 < searched.bound_s <= searched.best.step_s


def test_no_partition_takes_less_than_its_bound() -> None:
    """In the order for even costs, and in that for its own."""
    for seed in range(60):
        draw = random.Random(f"bounds/{seed}")
        name, each = draw.choice(
            [("zbv", 2), ("zero_bubble", 1), ("interleaved", 2), ("interleaved", 3)]
        )
        chain = draw_chain(draw, draw.choice([1e12, 3e10]), name, each)
        cuts = np.array(list(list_partitions(chain)))[:300]
        option = Option(
            shape=chain.shape,
            schedule=name,
            recompute=chain.schedule.recompute,
            num_microbatches=chain.compiled.schedule.num_microbatches,
        )
        placed = PlacedBounds(chain.tables, option, chain.placed, each)
        bounds, least = placed.bound_partitions(cuts), placed.bound_all()
        steps = chain.compute_steps(cuts)
        fits = chain.select_fitting(cuts)
        assert (bounds[fits] <= steps[fits] * (1 + 1e-9)).all(), seed
        assert least <= steps[fits].min(initial=np.inf) * (1 + 1e-9), seed
        for row in draw_partitions(draw, chain):
            run = chain.follow_costs(chain.compute_costs(row))
            if is_allowed(run, row):
                own = float(placed.bound_partitions(np.array([row]))[0])
                assert max(own, least) <= run.compute_step(row) * (1 + 1e-9), seed


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_schedule_that_is_asked_for_is_planned(schedule: str) -> None:
    searched = search(Wishes(schedule=schedule, stages=2, replicas=1))
    assert {one.option.schedule for one in searched.candidates} == {schedule}
    tables = Tables(make_profile(random.Random(7), 10), TrainingModel(batch=4))
    plan = build_plan(tables, Cluster(kinds=NODES), searched.best)
    assert plan.step.step_s == pytest.approx(searched.best.step_s, rel=1e-9)
    stages = len(plan.counts)
    assert stages == len(plan.memory_bytes) == 2 * searched.best.stages_per_rank
    held = [stage for node in list_used_nodes(searched.best) for stage in node.stages]
    assert sorted(held) == list(range(stages))


def test_a_run_makes_the_order_of_its_plan_from_the_costs_that_the_plan_gives() -> None:
    """Where the host is slow the stages of that order cost otherwise than those it was made for."""
    differ = 0
    for seed in range(12):
        question = draw_question(random.Random(f"told/{seed}"), "zbv")
        searched = question.search()
        if searched is None:
            continue
        best = searched.best
        plan = build_plan(question.tables, question.cluster, best)
        assert best.order is not None
        made = best.order.compiled.schedule
        ranks, count = made.num_ranks, made.num_microbatches
        given = Costs(**plan.build_prediction().costs)
        run = build_schedule("zbv", ranks, count, stages_per_rank=2, costs=given)
        assert run.ranks == made.ranks
        shape, placed = best.option.shape, best.placed
        chain = SeveralStages(question.tables, shape, placed, best.order)
        differ += chain.compute_costs(best.bounds) != plan.costs
    assert differ


def test_given_cuts_are_kept_and_others_than_the_ranks_have_are_refused() -> None:
    cuts = (3, 2, 2, 3)
    found = search(Wishes(schedule="zbv", stages=2, partition=cuts)).best
    assert tuple(e - a for a, e in itertools.pairwise(found.bounds)) == cuts
    with pytest.raises(PlanningError, match="partition has 5 numbers"):
        search(Wishes(schedule="zbv", stages=2, partition=(2, 2, 2, 2, 2)))
    with pytest.raises(PlanningError, match="partition has 4 numbers"):
        search(Wishes(schedule="1f1b", stages=2, partition=cuts))


def test_what_does_not_fit_is_refused_with_reasons() -> None:
    with pytest.raises(PlanningError, match="times the memory"):
        search(Wishes(schedule="zbv", stages=2, replicas=1), memory=2e9)
