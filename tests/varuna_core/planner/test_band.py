"""Bands of predicted steps, and the simpler plan where they do not tell two plans apart."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.varuna_core.planner.profiles import call_measured, make_chain, make_profile
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.step import simulate_step
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import TIMES, Profile, Spread
from varuna_core.planner.result.band import (
    UNEXPLAINED,
    Band,
    _draw_factors,
    find_band,
    prefer_simpler,
)
from varuna_core.planner.result.plan import build_plan, explain_simpler
from varuna_core.planner.search.partition import find_partition, is_allowed
from varuna_core.planner.search.search import Search, measure_simplicity

EVEN = (1.0,) * 5
WIDE = (0.9, 0.97, 1.0, 1.04, 1.2)
CLUSTER = Cluster(
    kinds=(
        NodeKind(name="b", gpu="big", gpus=2, count=1, price_per_hour=4.0),
        NodeKind(name="s", gpu="small", gpus=2, count=2, price_per_hour=1.0),
    )
)


def spread_out(profile: Profile, rounds: tuple[float, ...], actions: tuple[float, ...]) -> Profile:
    """With one spread everywhere."""
    spread = Spread(rounds=rounds, actions=(actions,) * len(TIMES))
    gpus = {
        kind: replace(gpu, cells={k: replace(c, spread=spread) for k, c in gpu.cells.items()})
        for kind, gpu in profile.gpus.items()
    }
    return replace(profile, gpus=gpus)


def remake(chain: Chain, rounds: tuple[float, ...], actions: tuple[float, ...]) -> Chain:
    tables = Tables(spread_out(chain.tables.profile, rounds, actions), chain.tables.training)
    return Chain(tables, chain.shape, chain.placed, chain.schedule, chain.least[1])


def draw_chain(seed: int) -> tuple[Chain, tuple[int, ...]]:
    """With several stages, and a partition of them."""
    draw = random.Random(seed)
    while True:
        chain = make_chain(draw)
        found = find_partition(chain) if chain.num_stages > 1 else None
        if found is not None:
            return chain, found.bounds


def find(chain: Chain, bounds: tuple[int, ...]) -> Band:
    band = find_band(chain, bounds)
    assert band is not None
    return band


@pytest.mark.parametrize("seed", range(5))
def test_a_band_is_as_wide_as_what_was_measured(seed: int) -> None:
    chain, bounds = draw_chain(seed)
    assert find_band(chain, bounds) is None, "nothing is known of its spread"
    step_s = chain.compute_step(bounds)
    even = find(remake(chain, EVEN, EVEN), bounds)
    assert even.middle_s == pytest.approx(step_s)
    assert even.low_s == pytest.approx(step_s * (1 - UNEXPLAINED))
    assert even.high_s == pytest.approx(step_s * (1 + UNEXPLAINED))
    assert even.apart == pytest.approx(UNEXPLAINED)
    slow = find(remake(chain, WIDE, EVEN), bounds)
    assert slow.low_s < even.low_s and slow.high_s > even.high_s
    assert slow.middle_s == pytest.approx(step_s)
    assert slow.apart == pytest.approx(even.apart), "both plans would meet the slow machine"
    uneven = find(remake(chain, EVEN, WIDE), bounds)
    assert uneven.middle_s > step_s, "stages wait for the slowest of uneven actions"
    assert uneven.apart > UNEXPLAINED
    assert uneven == find(remake(chain, EVEN, WIDE), bounds), "the same each time"


def test_drawn_steps_are_those_of_the_plain_simulation() -> None:
    for seed in range(5):
        chain, bounds = draw_chain(seed)
        spread = Spread(rounds=EVEN, actions=(WIDE,) * len(TIMES))
        factors, rounds = _draw_factors(chain, [spread] * chain.num_stages)
        assert (rounds == 1).all() and factors.min() == WIDE[0] and factors.max() == WIDE[-1]
        assert np.median(factors) == pytest.approx(1, abs=0.01)
        costs = chain.build_costs(bounds).columns[0]
        makespans, _, _ = chain.schedule.levels.run(
            *(np.repeat([row], 3, axis=0) for row in (costs.costs, costs.hops)),
            factors=factors[:, :3],
        )
        for column, makespan in enumerate(makespans):
            plain = chain.compiled.run(costs.costs, costs.hops, factors=factors[:, column].tolist())
            assert plain.makespan == pytest.approx(float(makespan), rel=1e-12)
        step = simulate_step(chain.compile(bounds), chain.build_costs(bounds)).step_s
        assert step == pytest.approx(chain.compute_step(bounds))


def find_least_simplicity(question: Search, limit_s: float) -> tuple[int, ...]:
    """By trying all plans."""
    found = []
    for option, _, counts, _ in question._list_floors(question.deadline):
        for row in counts.tolist():
            for chain in question._make_chains(option, tuple(row)):
                every = (
                    (0, *cuts, chain.size)
                    for cuts in itertools.combinations(range(1, chain.size), chain.num_stages - 1)
                )
                allowed = [bounds for bounds in every if is_allowed(chain, bounds)]
                if allowed and float(chain.compute_steps(allowed).min()) <= limit_s:
                    found.append(option.measure_simplicity(chain.num_stages))
    return min(found)


def test_the_simplest_of_what_is_not_told_apart_is_chosen() -> None:
    draw = random.Random(5)
    simpler = 0
    for number in range(12):
        drawn = make_profile(draw, draw.randint(3, 5), draw.choice([1e12, 4e10]))
        profile = spread_out(drawn, WIDE, WIDE if number % 2 else EVEN)
        training = TrainingModel(batch=draw.choice([2, 4]))
        question = Search(profile, training, CLUSTER)
        searched = prefer_simpler(question, question.run(), question.deadline)
        best, chosen = searched.best, searched.chosen
        band = build_plan(question.tables, CLUSTER, best).band
        assert band is not None
        limit_s = best.step_s * (1 + band.apart)
        assert best.step_s <= chosen.step_s <= limit_s, "it never costs more than the band"
        assert measure_simplicity(chosen) == find_least_simplicity(question, limit_s)
        again = Search(profile, training, CLUSTER)
        assert prefer_simpler(again, again.run(), again.deadline).chosen == chosen
        if searched.simpler is not None:
            simpler += 1
            assert "cannot tell from the fastest" in explain_simpler(searched)
        plain = Search(drawn, training, CLUSTER)
        without = plain.run()
        assert prefer_simpler(plain, without, plain.deadline) is without, (
            "nothing is known of its spread"
        )
    assert 3 < simpler < 12


def test_a_plan_has_its_band() -> None:
    profile = call_measured(spread_out(make_profile(random.Random(3), 5), WIDE, WIDE))
    question = Search(profile, TrainingModel(batch=8), CLUSTER)
    plan = build_plan(question.tables, CLUSTER, question.run().best)
    told = plan.build_prediction()
    assert plan.band is not None and told.step_s == plan.step_s == plan.band.middle_s
    assert told.band_s == (plan.band.low_s, plan.band.high_s)
    assert told.band_s[0] < plan.step.step_s < told.band_s[1]
