"""Replicas whose messages share links: timed together, by a drawn order of their messages."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.varuna_core.planner.profiles import make_profile
from tests.varuna_core.planner.test_band import EVEN, find, spread_out
from tests.varuna_core.planner.test_compiled import NAMES, make
from varuna_core.planner.model.cluster import NodeKind, place
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.shared_links import run_together
from varuna_core.planner.model.step import ActionCosts, simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import build_link
from varuna_core.planner.result.band import UNEXPLAINED
from varuna_core.schedule.compiled import Compiled, list_all_costs, list_hops
from varuna_core.schedule.registry import build_schedule


@pytest.mark.parametrize("name", NAMES)
def test_replicas_with_links_of_their_own_are_timed_as_one(name: str) -> None:
    draw = random.Random(name)
    for _ in range(6):
        compiled, given = make(name, draw)
        costs = ActionCosts(costs=tuple(list_all_costs(given)), hops=tuple(list_hops(given)))
        alone = compiled.run(costs.costs, costs.hops).makespan
        sharing = [1] * max(1, compiled.num_stages - 1)
        assert run_together(compiled, costs, sharing, draw) == pytest.approx(alone, rel=1e-12)


def make_costs(stages: int, hop: float, sharing: int) -> ActionCosts:
    hops = (hop,) * 2 * (stages - 1)
    each = (1.0,) * 3 * stages + (2.0,) * stages + (1.0,) * 2 * stages
    return ActionCosts(costs=each, hops=hops, holds=tuple(hop * sharing for hop in hops))


def test_the_last_of_equal_replicas_waits_for_the_messages_of_the_others() -> None:
    """Whichever goes first: F, three messages one after another, F B, the last gradient, B."""
    compiled = Compiled(build_schedule("gpipe", 2, 1))
    costs = make_costs(2, 0.5, 3)
    for seed in range(5):
        took = run_together(compiled, costs, [3], random.Random(seed))
        assert took == pytest.approx(1 + 3 * 0.5 + 1 + 2 + 0.5 + 2)
    in_turn = compiled.run(costs.costs, costs.hops, holds=costs.holds).makespan + costs.lag_s
    assert took == pytest.approx(in_turn)


def test_a_replica_that_others_get_ahead_of_makes_the_step_longer() -> None:
    compiled = Compiled(build_schedule("interleaved", 4, 4, stages_per_rank=3))
    costs = make_costs(12, 1.5, 2)
    in_turn = compiled.run(costs.costs, costs.hops, holds=costs.holds).makespan + costs.lag_s
    drawn = [run_together(compiled, costs, [2] * 11, random.Random(seed)) for seed in range(9)]
    assert drawn[0] == run_together(compiled, costs, [2] * 11, random.Random(0))
    assert len(set(drawn)) > 1 and np.median(drawn) > in_turn


def make_chain(replicas: int, schedule: str, each: int) -> SeveralStages:
    """On two nodes, whose link the replicas share."""
    profile = spread_out(make_profile(random.Random(7), 12), EVEN, EVEN)
    slow = ("small", "small", "inter"), build_link(0.01, 0.003)
    network = replace(profile.network, links={**profile.network.links, slow[0]: slow[1]})
    profile = replace(profile, network=network)
    shape = Shape(tensor=1, replicas=replicas, micro_batch=1)
    node = NodeKind(name="n", gpu="small", gpus=2 * replicas, count=2)
    placed = place(((node, 2), (node, 2)), 4, 1, replicas)
    assert placed is not None
    work = build_schedule_model(schedule, 4, 4, "none", each)
    return SeveralStages(Tables(profile, TrainingModel(batch=4 * replicas)), shape, placed, work)


@pytest.mark.parametrize(("schedule", "each"), [("zbv", 2), ("interleaved", 3)])
def test_a_prediction_holds_what_replicas_wait_for_each_other(schedule: str, each: int) -> None:
    for replicas in (1, 4):
        chain = make_chain(replicas, schedule, each)
        sizes = [1] * (4 * each - 1)
        bounds = (0, *itertools.accumulate(sizes), chain.size)
        step = simulate_step(chain.compiled, chain.build_costs(bounds))
        band = find(chain, bounds)
        assert sorted(set(chain.sharing)) == ([1] if replicas == 1 else [1, 4])
        if replicas == 1:
            assert band.middle_s == pytest.approx(step.step_s)
        else:
            assert band.middle_s > step.step_s * (1 + 1e-6)
            assert band.apart > UNEXPLAINED
        assert band.low_s < step.step_s < band.high_s
