"""Whole plans equal to trying them all: the fastest, and the cheapest of each time.

With VJOB_EXPLORE=1 there are 2,000 new questions of each kind; a red run names the seed.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.varuna_core.planner.brute_force import (
    Instance,
    draw_instance,
    find_best,
    find_best_by_nodes,
    keep_front,
)
from tests.varuna_core.planner.profiles import make_profile
from varuna_core.planner.model.training import RECOMPUTES
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.front import compute_front
from varuna_core.planner.search import space
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Search, Searched
from varuna_core.planner.search.space import Wishes

EXPLORING = bool(os.environ.get("VJOB_EXPLORE"))
MANY, SOME, FEW = (2000, 2000, 2000) if EXPLORING else (150, 60, 10)

LIMIT_S, CLOCK = 600.0, time.process_time
"""A machine that others use must not look like a search that gave up."""


def draw_instances(name: str, count: int) -> Iterator[tuple[str, Instance]]:
    seed = random.SystemRandom().randrange(10**9) if EXPLORING else 1
    for number in range(count):
        named = f"{name}/{seed}/{number}"
        yield named, draw_instance(random.Random(named))


def search(one: Instance) -> Searched | None:
    try:
        return Search(
            one.profile, one.training, one.cluster, one.wishes, deadline=within(LIMIT_S, CLOCK)
        ).run()
    except PlanningError:
        return None


def check(named: str, one: Instance, best: float) -> bool:
    """Whether anything fits."""
    searched = search(one)
    if searched is None:
        assert best == float("inf"), named
        return False
    assert searched.best.step_s == pytest.approx(best, rel=1e-9), named
    assert searched.gap == 0, named
    return True


def test_the_fastest_plan_is_brute_forces() -> None:
    fitting = sum(check(named, one, find_best(one)) for named, one in draw_instances("all", MANY))
    assert MANY / 2 < fitting < MANY


def test_ways_that_need_less_memory_are_chosen_where_brute_force_does() -> None:
    """Where memory is scarce, micro-batches are many, and the ways may all be the best."""
    chosen: Counter[str] = Counter()
    for named, one in draw_instances("memory", SOME):
        draw = random.Random(named)
        profile = make_profile(draw, draw.randint(3, 6), draw.uniform(5e9, 1.2e10))
        gpus = {kind: replace(gpu, copies_beside=True) for kind, gpu in profile.gpus.items()}
        one = replace(
            one,
            profile=replace(profile, gpus=gpus),
            training=replace(one.training, batch=draw.choice([6, 8]), recomputes=RECOMPUTES),
            wishes=Wishes(tensor=1, micro_batch=1, zero=0),
        )
        best = find_best(one)
        check(named, one, best)
        if best < float("inf"):
            searched = search(one)
            assert searched is not None
            chosen[searched.best.option.recompute] += 1
    assert set(chosen) == set(RECOMPUTES), chosen


def test_the_fastest_plan_of_blocks_is_brute_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "MOST_ORDERS", 0)
    for named, one in draw_instances("blocks", SOME):
        check(named, one, find_best(one, grouped=True))


def test_cost_against_time_is_brute_forces() -> None:
    """Of all plans of all nodes, priced by the nodes they use, those that none beats in both."""
    for named, one in draw_instances("front", FEW):
        best = list(keep_front(one, find_best_by_nodes(one)))
        front = compute_front(
            one.profile, one.training, one.cluster, one.wishes, deadline=within(LIMIT_S, CLOCK)
        )
        assert front.num_left == 0, named
        found = [(offer.step_s, offer.price) for offer in front.offers]
        assert len(found) == len(best), named
        for offered, wanted in zip(found, best, strict=True):
            assert offered == pytest.approx(wanted, rel=1e-9), named
