"""Cost against time: nothing on the front is beaten, and nothing that was planned for beats it."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.varuna_core.planner.profiles import make_profile
from varuna_core.planner.model.cluster import Cluster, NodeKind
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.result.front import (
    MOST_PARTS,
    choose_by_deadline,
    choose_within_budget,
    compute_front,
    list_parts,
)
from varuna_core.planner.search.deadline import within
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes

TRAINING = TrainingModel(batch=4)
WISHES = Wishes(schedule="1f1b", tensor=1)


def make_cluster(draw: random.Random) -> Cluster:
    return Cluster(
        kinds=(
            NodeKind(name="b", gpu="big", gpus=2, count=1, price_per_hour=draw.uniform(1, 9)),
            NodeKind(name="s", gpu="small", gpus=2, count=2, price_per_hour=draw.uniform(1, 9)),
        )
    )


def test_nothing_beats_the_front() -> None:
    draw = random.Random(5)
    for _ in range(5):
        profile, cluster = make_profile(draw, 5), make_cluster(draw)
        front = compute_front(profile, TRAINING, cluster, WISHES)
        assert front.num_left == 0 and front.num_parts == 5
        for one, next_one in itertools.pairwise(front.offers):
            assert one.step_s < next_one.step_s and one.price > next_one.price
        prices = {kind.name: kind.price_per_hour or 0.0 for kind in cluster.kinds}
        for part in list_parts(cluster):
            best = Search(profile, TRAINING, part, WISHES).run().best
            price = sum(prices[name] for name in best.placed.nodes) * best.step_s / 3600
            assert any(
                one.step_s <= best.step_s * (1 + 1e-9) and one.price <= price * (1 + 1e-9)
                for one in front.offers
            )


def test_limits_choose_from_it() -> None:
    draw = random.Random(6)
    front = compute_front(make_profile(draw, 5), TRAINING, make_cluster(draw), WISHES)
    for one in front.offers:
        assert choose_within_budget(front, one.price) == one
        assert choose_by_deadline(front, one.step_s) == one
    with pytest.raises(PlanningError, match="the cheapest costs"):
        choose_within_budget(front, front.offers[-1].price / 2)
    with pytest.raises(PlanningError, match="the fastest takes"):
        choose_by_deadline(front, front.offers[0].step_s / 2)


def test_time_that_runs_out_is_told() -> None:
    draw = random.Random(7)
    profile, cluster = make_profile(draw, 5), make_cluster(draw)
    known = Search(profile, TRAINING, cluster, WISHES).run().candidates
    front = compute_front(profile, TRAINING, cluster, WISHES, known, deadline=within(0.0))
    assert front.num_parts == 0 and front.num_left == 5 and front.offers


@pytest.mark.parametrize("counts", [(1,), (7, 1), (128,), (11, 11, 10), (40, 3, 9, 2)])
def test_parts_are_not_too_many(counts: tuple[int, ...]) -> None:
    cluster = Cluster(
        kinds=tuple(NodeKind(name=str(i), gpu="big", gpus=8, count=n) for i, n in enumerate(counts))
    )
    parts = list(list_parts(cluster))
    assert 1 <= len(parts) <= MOST_PARTS and len(set(parts)) == len(parts)
    assert parts[-1] == cluster
