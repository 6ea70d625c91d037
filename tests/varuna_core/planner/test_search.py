"""A search: wishes kept, refusals in words, floors below; tests of whole plans stand apart."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.planner.profiles import make_placed, make_profile
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import Cluster, NodeKind, list_all_orders
from varuna_core.planner.model.schedule_model import build_least_model, build_schedule_model
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import OPTIONAL, Profile
from varuna_core.planner.result.certificate import render_certificate
from varuna_core.planner.result.plan import build_plan, render_table
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.partition import is_allowed
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes, list_options
from varuna_core.schedule.recompute import Recompute

CLUSTER = Cluster(
    kinds=(
        NodeKind(name="b", gpu="big", gpus=2, count=1, price_per_hour=4.0),
        NodeKind(name="s", gpu="small", gpus=2, count=2, price_per_hour=1.0),
    )
)


def count_by_hand(counts: tuple[int, ...]) -> int:
    """Orders of some of so many nodes of each kind: the empty one and each that one node begins."""
    return 1 + sum(
        count_by_hand((*counts[:at], count - 1, *counts[at + 1 :]))
        for at, count in enumerate(counts)
        if count
    )


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 60))
def test_all_orders_are_listed_or_none(counts: list[int], most: int) -> None:
    kinds = [
        NodeKind(name=str(at), gpu="big", gpus=1, count=count) for at, count in enumerate(counts)
    ]
    expected = count_by_hand(tuple(counts)) - 1
    orders = list_all_orders(Cluster(kinds=tuple(kinds)), most)
    assert (orders is None) == (expected > most)
    if orders is not None:
        assert len(set(orders)) == len(orders) == expected


def test_thousands_of_nodes_of_several_kinds_are_too_many_orders() -> None:
    """It once went down a level for each node, and met Python's limit at a thousand."""
    for counts in ((10240, 1), (1, 10240), (400, 400, 400)):
        kinds = tuple(
            NodeKind(name=str(at), gpu="big", gpus=8, count=count)
            for at, count in enumerate(counts)
        )
        assert list_all_orders(Cluster(kinds=kinds), 3000) is None
    alone = NodeKind(name="a", gpu="big", gpus=8, count=2000)
    orders = list_all_orders(Cluster(kinds=(alone,)), 3000)
    assert orders is not None and len(orders) == 2000


def find_by_brute_force(chains: list[Chain], size: int) -> float:
    best = float("inf")
    for chain in chains:
        every = (
            (0, *cuts, size)
            for cuts in itertools.combinations(range(1, size), chain.num_stages - 1)
        )
        allowed = [bounds for bounds in every if is_allowed(chain, bounds)]
        if allowed:
            best = min(best, float(chain.compute_steps(allowed).min()))
    return best


def test_no_placement_takes_less_than_its_closer_floor() -> None:
    draw = random.Random(3)
    for _ in range(6):
        question = Search(make_profile(draw, draw.randint(3, 5)), TrainingModel(batch=4), CLUSTER)
        for option, columns, counts, _floor in question._list_floors(question.deadline):
            sharp = question.floors.sharpen(option, columns, counts, 1e9)
            for row, least in zip(counts.tolist(), sharp, strict=True):
                for chain in question._make_chains(option, tuple(row)):
                    best = find_by_brute_force([chain], chain.size)
                    assert least <= best * (1 + 1e-9)


def test_no_chain_takes_less_than_the_bound_of_all_ways() -> None:
    draw = random.Random(5)
    ways: tuple[Recompute, ...] = ("none", "auto", "selective", "offload")
    for _ in range(60):
        size, stages, count = draw.randint(4, 6), draw.randint(1, 4), draw.randint(1, 6)
        tables = Tables(make_profile(draw, size, draw.uniform(5e9, 2e10)), TrainingModel(batch=12))
        shape = Shape(tensor=1, replicas=2, micro_batch=1, zero=draw.choice([0, 1, 2]))
        placed = make_placed(draw, stages, 2)
        least = Chain(tables, shape, placed, build_least_model("1f1b", stages, count))
        for way in ways:
            work = build_schedule_model("1f1b", stages, count, way)
            chain = Chain(tables, shape, placed, work)
            assert least.bound <= chain.bound * (1 + 1e-12)


def forget_ways(profile: Profile) -> Profile:
    """As one that was made before they were measured."""
    nothing: dict[str, Any] = dict.fromkeys(OPTIONAL, ())
    gpus = {
        kind: replace(gpu, cells={key: replace(cell, **nothing) for key, cell in gpu.cells.items()})
        for kind, gpu in profile.gpus.items()
    }
    return replace(profile, gpus=gpus)


def test_ways_that_a_profile_does_not_know_are_not_proposed_and_asked_for_refused() -> None:
    profile, training = make_profile(random.Random(3), 5), TrainingModel(batch=8)
    old = forget_ways(profile)

    def list_ways(profile: Profile, wishes: Wishes) -> set[str]:
        return {one.recompute for one in list_options(profile, training, CLUSTER, wishes)}

    assert list_ways(profile, Wishes()) == {"none", "full", "auto", "selective", "offload"}
    assert list_ways(old, Wishes()) == {"none", "full", "auto"}
    assert list_ways(profile, Wishes(recompute="offload")) == {"offload"}
    for way in ("selective", "offload"):
        with pytest.raises(MissingData, match=f"no times of recompute {way}: profile again"):
            list_ways(old, Wishes(recompute=way))
    assert list_ways(profile, Wishes(zero=3)) == {"none", "full", "selective"}
    with pytest.raises(PlanningError, match=r"offload needs parallel\.zero 0, 1"):
        list_ways(profile, Wishes(zero=3, recompute="offload"))
    with pytest.raises(PlanningError, match="which contradicts recompute offload"):
        list_ways(profile, Wishes(schedule="varuna", recompute="offload"))
    found = list_options(profile, training, CLUSTER, Wishes(recompute="selective"))
    assert {one.schedule for one in found} == {"1f1b", "gpipe", "varuna"}


def search(wishes: Wishes, limit_s: float = 60.0, cluster: Cluster = CLUSTER) -> Search:
    return Search(
        make_profile(random.Random(3), 5),
        TrainingModel(batch=8),
        cluster,
        wishes,
        deadline=within(limit_s),
    )


def test_a_plan_says_what_it_is_made_of() -> None:
    question = search(Wishes())
    searched = question.run()
    plan = build_plan(question.tables, CLUSTER, searched.best)
    assert plan.step.step_s == pytest.approx(searched.best.step_s, rel=1e-12)
    assert sum(plan.counts) == 5
    assert len(plan.memory_bytes) == len(plan.counts) == plan.partition.num_stages
    held = zip(plan.memory_bytes, plan.limit_bytes, strict=True)
    assert all(bytes_ <= limit for bytes_, limit in held)
    assert plan.price_per_hour is not None
    assert "gap 0 %" in render_certificate(searched)
    assert len(render_table(plan).splitlines()) == 1 + len(plan.counts)
    assert set(plan.build_prediction().as_json()) == {
        "step_s",
        "stage_s",
        "not_covered",
        "bubble_share",
        "memory_mb",
        "costs",
    }
    assert all(cost > 0 for cost in plan.costs.forward) and len(plan.costs.hops) == 2


def test_wishes_are_kept() -> None:
    for wishes in (
        Wishes(stages=3, micro_batch=2),
        Wishes(replicas=2, schedule="1f1b", zero=1),
        Wishes(tensor=2, schedule="varuna"),
        Wishes(recompute="full"),
    ):
        best = search(wishes).run().best
        shape = best.option.shape
        assert wishes.stages in (None, len(best.placed.sites))
        assert wishes.micro_batch in (None, shape.micro_batch)
        assert wishes.replicas in (None, shape.replicas)
        assert wishes.tensor in (None, shape.tensor)
        assert wishes.zero in (None, shape.zero)
        assert wishes.schedule in (None, best.option.schedule)
        assert wishes.recompute in (None, best.option.recompute)


def test_a_given_partition_is_timed_as_it_is() -> None:
    best = search(Wishes(partition=(2, 1, 2), stages=3)).run().best
    assert best.bounds == (0, 2, 3, 5)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(tensor=3), "tensor 3 is not possible here; possible are 1, 2"),
        (Wishes(replicas=5), "replicas 5 is not possible here; possible are 1, 2, 4"),
        (Wishes(schedule="fast"), "schedule 'fast' is not planned: use 1f1b, gpipe, varuna"),
        (Wishes(schedule="varuna", recompute="none"), "which contradicts recompute none"),
        (Wishes(replicas=4, micro_batch=4), "8 is not divisible by replicas 4 times micro_batch 4"),
        (Wishes(stages=9), "no plan"),
    ],
)
def test_contradictions_are_told(wishes: Wishes, message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        search(wishes).run()


def test_what_cannot_fit_says_by_how_much() -> None:
    profile = make_profile(random.Random(3), 5, memory=1e9)
    with pytest.raises(PlanningError, match=r"a segment lacks \d\.\d GB even as a stage"):
        Search(profile, TrainingModel(batch=8), CLUSTER).run()


def test_one_gpu_and_one_segment_are_planned() -> None:
    cluster = Cluster(kinds=(NodeKind(name="b", gpu="big", gpus=1, count=1),))
    searched = search(Wishes(), cluster=cluster).run()
    assert searched.best.bounds == (0, 5)
    alone = make_profile(random.Random(3), 1)
    assert Search(alone, TrainingModel(batch=8), cluster).run().best.bounds == (0, 1)


def test_time_that_ran_out_leaves_a_gap_that_is_told() -> None:
    times = itertools.count()
    question = Search(
        make_profile(random.Random(3), 5),
        TrainingModel(batch=8),
        CLUSTER,
        deadline=within(60, lambda: float(next(times))),
    )
    searched = question.run()
    assert searched.gap > 0
    assert "stopped by time" in render_certificate(searched)
    assert searched.bound_s <= search(Wishes()).run().best.step_s
