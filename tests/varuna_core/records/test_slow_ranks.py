"""One rule for a slow rank: what it says, and that status, autoscaler and report agree."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.monitor.builders import healthy
from varuna_core.records.logs.slow_ranks import (
    PERSISTENT,
    RECENT_STEPS,
    WARM_UP_STEPS,
    compute_peers_work,
    find_slow_ranks,
)
from vjob.jobs.monitor.rules.speed import find_stragglers as find_alarming
from vjob.reports.analysis.balance import find_stragglers
from vjob.shelf.elastic.growth import find_slow_nodes

STEPS = 30


def make_works(ratio: float, share: float, peers: int, steps: int) -> dict[int, dict[int, float]]:
    """Rank 0 takes `ratio` times a second in `share` of the steps, spread evenly."""
    slow = [int((step + 1) * share) > int(step * share) for step in range(steps)]
    own = {step + 1: ratio if is_slow else 1.0 for step, is_slow in enumerate(slow)}
    return {0: own, **{rank + 1: dict.fromkeys(own, 1.0) for rank in range(peers)}}


def judge(works: dict[int, dict[int, float]]) -> tuple[bool, bool, bool]:
    """Whether status, the autoscaler and the report name rank 0."""
    ranks, step_s = list(works), dict.fromkeys(works, 2.0)
    later = {
        rank: dict(list(own.items())[WARM_UP_STEPS:][-RECENT_STEPS:]) for rank, own in works.items()
    }
    slow = {item.rank: item for item in find_slow_ranks(later, [ranks], step_s)}
    snapshot = healthy(
        ranks=tuple(
            replace(
                healthy().ranks[0],
                rank=rank,
                work_s=statistics.median(list(works[rank].values())[-10:]),
                step_s=2.0,
                slow=slow.get(rank),
            )
            for rank in ranks
        )
    )
    status = {rank.rank for rank, _, _ in find_alarming(snapshot)}
    left = {node.rank for node in find_slow_nodes(later, [ranks], {r: r for r in ranks}, step_s)}
    rows = [
        {"attempt": "0", "rank": rank, "stage": 0, "step": step, "work_s": work}
        for rank, own in works.items()
        for step, work in {0: 5.0, **own}.items()
    ]
    places = [{"attempt": "0", "rank": rank, "host": f"n{rank}", "device": ""} for rank in ranks]
    named = {item.rank for item in find_stragglers(pd.DataFrame(rows), pd.DataFrame(places))}
    return 0 in status, 0 in left, 0 in named


@pytest.mark.parametrize("peers", [1, 3, 7])
@pytest.mark.parametrize(
    ("ratio", "share", "steps", "status", "left", "named"),
    [
        (1.08, 1.0, STEPS, False, False, False),
        (1.12, 1.0, STEPS, False, False, True),
        (1.12, 0.5, STEPS, False, False, False),
        (1.3, 1.0, STEPS, True, True, True),
        (1.3, 0.9, STEPS, True, True, True),
        (1.3, 0.7, STEPS, False, False, True),
        (1.3, 0.5, STEPS, False, False, False),
        (2.0, 1.0, STEPS, True, True, True),
        (2.0, 0.7, STEPS, True, False, True),
        (1.3, 1.0, 15, False, False, True),
        (2.0, 1.0, 15, True, False, True),
    ],
)
def test_the_ladder(
    ratio: float, share: float, steps: int, peers: int, status: bool, left: bool, named: bool
) -> None:
    assert judge(make_works(ratio, share, peers, steps)) == (status, left, named)


def test_a_rank_that_became_slow_late_is_named_by_all() -> None:
    works = make_works(1.3, 1.0, 3, 400)
    works[0].update(dict.fromkeys(range(1, 350), 1.0))
    assert judge(works) == (True, True, True)


@given(st.integers(1, 5), st.integers(0, 2**32), st.integers(1, 90), st.floats(1.1, 1.6))
def test_whoever_is_left_out_was_named(peers: int, seed: int, steps: int, ratio: float) -> None:
    works = make_works(ratio, 1.0, peers, steps)
    for step in works[0]:  # noise that is the same in each run
        works[0][step] *= 1 + ((seed * (step + 7)) % 101 - 50) / 250
    status, left, named = judge(works)
    assert not left or (status and named)


@given(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=9))
def test_the_peers_of_a_slow_rank_are_all_others(works: list[float]) -> None:
    *others, _ = sorted(works)
    assert compute_peers_work(list(works)) == pytest.approx(statistics.median(others))


def test_what_costs_little_is_no_rank_to_act_on() -> None:
    works = make_works(1.3, 1.0, 3, STEPS)
    tiny = {rank: {step: s / 10 for step, s in own.items()} for rank, own in works.items()}
    assert find_slow_ranks(works, [list(works)], dict.fromkeys(works, 2.0))
    assert not find_slow_ranks(works, [list(works)], dict.fromkeys(works, 4.0)), "a long step"
    assert not find_slow_ranks(tiny, [list(works)], dict.fromkeys(works, 0.2)), "0.03 s"


def test_a_step_that_few_have_told_yet_does_not_count() -> None:
    works = make_works(1.3, 1.0, 3, PERSISTENT.num_steps)
    for rank in (2, 3):
        del works[rank][1]
    assert not find_slow_ranks(works, [list(works)])
