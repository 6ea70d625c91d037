"""What a run does by itself with idle and slow nodes: the decisions alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs.confs import MORPH, MORPH_SPLIT, make_conf, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.records.logs.slow_ranks import PERSISTENT
from varuna_core.records.plan import GroupPlan
from varuna_core.records.rank_map import build_stages, encode_stage_map
from varuna_core.records.training import derive_facts
from vjob.jobs.monitor.model.snapshot import Point, Progress
from vjob.jobs.schedulers.job import list_fitting
from vjob.jobs.schedulers.slurm.commands import parse_time
from vjob.jobs.schedulers.slurm.nodes import build_sinfo_idle_command, parse_idle_nodes
from vjob.shelf.elastic.autoscale import find_recent_step_s, list_peers
from vjob.shelf.elastic.growth import (
    DEFAULT_PAUSE_S,
    Pause,
    SlowNode,
    Standing,
    choose_growth,
    choose_leaving,
    compute_pause,
    find_slow_nodes,
    still_pays,
)

ENOUGH = PERSISTENT.num_steps

CONF = MORPH.replace("a100:4", "a100:1").replace("min_nodes: 2", "min_nodes: 2, max_nodes: 64")
TRAINING = derive_facts(
    replace(GPT, layers=12, global_batch_size=64, micro_batch_size=1, partition=None)
)
FIVE_S = Pause(seconds=5.0, num_morphs=1)


def stand(**changes: Any) -> Standing:
    """Four nodes, a pipeline of four, 1000 steps of 2 s to go."""
    standing = Standing(
        plan=make_plan(make_conf(CONF)),
        facts=TRAINING,
        here=(0, 1, 2, 3),
        steps_left=1000,
        step_s=2.0,
        pause=FIVE_S,
    )
    return replace(standing, **changes)


def test_all_the_nodes_that_make_a_step_shorter_are_wanted() -> None:
    offer = choose_growth(stand(), 10, {"all": 9})
    assert offer is not None and offer.group.name == "all"
    assert (offer.count, offer.is_predicted) == (8, False), "a ninth has no place in 6 x 2"
    assert offer.then_s == pytest.approx(2.0 * (32 + 5) * 2 / ((64 + 3) * 3))
    few = choose_growth(stand(), 4, {"all": 9})
    assert few is not None and few.count == 4, "no more than there is room for"
    assert choose_growth(stand(), 10, {"all": 0}) is None
    assert choose_growth(stand(), 10, {}) is None


def test_a_gain_is_worth_twice_the_pause_or_nobody_is_asked_to_come() -> None:
    """Of 100 steps of 2 s a doubling spares (64 - 32) / 67 of 200 s: 95 s."""
    hundred = stand(steps_left=100)
    idle = {"all": 4}
    for pause_s, is_worth in ((45.0, True), (50.0, False)):
        standing = replace(hundred, pause=Pause(seconds=pause_s, num_morphs=3))
        assert (choose_growth(standing, 4, idle) is not None) == is_worth
    assert choose_growth(replace(hundred, left_s=8.0), 4, idle) is None, "the time is nearly up"
    assert choose_growth(replace(hundred, left_s=60.0), 4, idle) is not None
    # Whoever is on the way already is let go later than he would be called.
    late = replace(hundred, pause=Pause(seconds=60.0, num_morphs=3))
    wide = make_plan(make_conf(CONF.replace("count: 4", "count: 8")))
    assert still_pays(replace(late, plan=wide), [4, 5, 6, 7])
    assert not still_pays(replace(late, plan=wide, steps_left=50), [4, 5, 6, 7])


def test_what_was_planned_at_submit_decides() -> None:
    plan = replace(
        stand().plan,
        layout_steps={"a100/1*4": 2.0, "a100/1*5": 1.9, "a100/1*6": 1.95},
        layouts={"a100/1*5": (5, 1, "3-3-3-3-2"), "a100/1*6": (6, 1, "3-3-2-2-2-2")},
    )
    offer = choose_growth(stand(plan=plan), 2, {"all": 2})
    assert offer is not None and (offer.count, offer.is_predicted) == (1, True)
    assert offer.then_s == pytest.approx(1.9)


def test_a_pause_is_that_of_the_runs_own_morphs() -> None:
    assert compute_pause([]) == Pause(seconds=DEFAULT_PAUSE_S, num_morphs=0)
    assert str(compute_pause([])) == "a pause of 120 s (a guess)"
    assert str(compute_pause([12.0])) == "a pause of 12 s (the last)"
    assert str(compute_pause([900.0, 10.0, 11.0, 12.0, 13.0, 14.0])) == (
        "a pause of 12 s (median of the last 5)"
    )


SINFO = """\
n1|gpu1*|idle|gpu:a100:4(S:0-1)|64|512000|
n2|gpu1*|idle|gpu:v100:4|64|512000|
n3|gpu1*|idle~|gpu:a100:4|64|512000|
n4|gpu1*|idle*|gpu:a100:4|64|512000|
n5|gpu1*|draining|gpu:a100:4|64|512000|
n6|gpu2|idle|gpu:a100:8|8|64000|
n1|gpu2|idle|gpu:a100:4(S:0-1)|64|512000|
n7|cpu|idle|(null)|64|512000|
garbage
"""


def make_group(**changes: Any) -> GroupPlan:
    plan = make_plan(make_conf(MORPH))
    return replace(plan.groups[0], **changes)


def test_an_idle_node_fits_where_it_has_all_that_a_job_would_ask_for() -> None:
    nodes = parse_idle_nodes(SINFO)
    assert list_fitting(nodes, make_group()) == ["n1"]
    assert list_fitting(nodes, make_group(queue=None)) == ["n1"], "the queue with the star"
    assert list_fitting(nodes, make_group(queue="gpu2")) == ["n6", "n1"]
    assert list_fitting(nodes, make_group(queue="gpu1,gpu2")) == ["n1", "n6"]
    assert list_fitting(nodes, make_group(queue="gpu2", cpus=16)) == ["n1"]
    assert list_fitting(nodes, make_group(queue="gpu2", memory_gb=128)) == ["n1"]
    assert list_fitting(nodes, make_group(gpu_type=None)) == ["n1", "n2"]
    assert list_fitting(nodes, make_group(gpus=0, gpu_type=None, queue="cpu")) == ["n7"]
    assert list_fitting(nodes, make_group(), {"n1"}) == []


def test_sinfo_is_asked_for_the_queues_alone() -> None:
    assert "--partition=a,b" in build_sinfo_idle_command(["a", "b", "a"])
    assert not any("--partition" in word for word in build_sinfo_idle_command(["a", None]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784.0),
        (" 59:30 ", 3570.0),
        ("0:00", 0.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_time_that_slurm_leaves(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@given(st.text(max_size=60))
def test_whatever_slurm_says_is_no_error(text: str) -> None:
    assert parse_time(text) is None or parse_time(text) >= 0  # type: ignore[operator]
    parse_idle_nodes(text)


def progress(steps: int, step_s: float = 1.0, first: int = 1) -> Progress:
    points = tuple(Point(step=first + i, step_s=step_s) for i in range(steps))
    return Progress(step=first + steps - 1, points=points, first_step=first)


def test_a_pace_is_known_after_some_steps() -> None:
    assert find_recent_step_s(None) is None
    assert find_recent_step_s(Progress(step=3)) is None
    assert find_recent_step_s(progress(15)) is None
    assert find_recent_step_s(progress(40, 3.0, first=100)) == 3.0
    lines = tuple(Point(step=s, step_s=2.0) for s in range(10, 80, 10))
    assert find_recent_step_s(Progress(step=70, points=lines, first_step=1)) == 2.0


# Slow nodes.


def works(ranks: dict[int, float], steps: int = ENOUGH) -> dict[int, dict[int, float]]:
    return {rank: dict.fromkeys(range(10, 10 + steps), work) for rank, work in ranks.items()}


EACH = {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_node_over_fifteen_per_cent_behind_its_peers_is_slow() -> None:
    times = works({0: 1.0, 1: 1.0, 2: 1.2, 3: 1.02})
    (slow,) = find_slow_nodes(times, [[0, 1, 2, 3]], EACH)
    assert (slow.seat, slow.rank, slow.num_peers) == (2, 2, 3)
    assert slow.extra_s == pytest.approx(0.2)
    assert str(slow) == (
        "rank 2 works 20 % longer than its 3 peers, by 0.2 s a step, in the last 20 steps"
    )
    assert not find_slow_nodes(works({0: 1.0, 1: 1.0, 2: 1.14}), [[0, 1, 2]], EACH)


def test_nobody_is_slow_without_evidence() -> None:
    slow = {0: 1.0, 1: 2.0}
    assert find_slow_nodes(works(slow), [[0, 1]], EACH)
    assert not find_slow_nodes(works(slow, ENOUGH - 1), [[0, 1]], EACH), "too few steps"
    assert not find_slow_nodes(works(slow), [[0], [1]], EACH), "another stage is no peer"
    assert not find_slow_nodes(works(slow), [[0, 1]], {0: 0, 1: 0}), "nor is the same node"
    assert not find_slow_nodes({0: works(slow)[0]}, [[0, 1]], EACH), "one does not tell"
    now_and_then = works(slow)
    for step in range(10, 15):
        now_and_then[1][step] = 1.0
    assert not find_slow_nodes(now_and_then, [[0, 1]], EACH), "slow in three of four steps"


@given(
    st.lists(st.lists(st.floats(0.001, 1e3), min_size=25, max_size=25), min_size=2, max_size=6),
    st.floats(0.1, 10.0),
)
def test_at_most_half_of_all_are_slow_and_units_do_not_matter(
    times: list[list[float]], unit: float
) -> None:
    ranks = range(len(times))
    table = {rank: dict(enumerate(times[rank])) for rank in ranks}
    seats = {rank: rank for rank in ranks}
    found = find_slow_nodes(table, [list(ranks)], seats)
    assert len(found) <= len(times) / 2
    assert all(slow.extra_s > 0 and slow.ratio > 1.15 for slow in found)
    scaled = {rank: {s: unit * t for s, t in row.items()} for rank, row in table.items()}
    assert len(find_slow_nodes(scaled, [list(ranks)], seats)) == len(found)


def slow_node(seat: int, extra_s: float) -> SlowNode:
    (slow,) = find_slow_nodes(works({0: 1.0, 1: 1.0, 2: 1.5, 3: 1.0}), [[0, 1, 2, 3]], EACH)
    return replace(slow, seat=seat, rank=seat, extra_s=extra_s)


def spread(nodes: int) -> Standing:
    """A pipeline of one, a replica a node."""
    conf = make_conf(
        CONF.replace("count: 4", f"count: {nodes}").replace("pipeline: 4", "pipeline: 1")
    )
    return stand(plan=make_plan(conf), here=tuple(range(nodes)), steps_left=10_000)


def test_a_slow_node_leaves_where_the_rest_is_faster() -> None:
    """Of 16 one costs 5 micro-batches of 4, 25 %; of 4 it costs 22 of 16."""
    many = spread(16)
    parting = choose_leaving(many, [slow_node(5, 0.7)], 2)
    assert parting is not None and parting.seats == (5,)
    assert parting.then_s == pytest.approx(1.3 * 5 / 4)
    assert choose_leaving(many, [slow_node(5, 0.3)], 2) is None, "1.7 x 5 / 4 is over 2"
    assert choose_leaving(spread(4), [slow_node(1, 0.5)], 2) is None
    assert choose_leaving(spread(4), [slow_node(1, 0.7)], 4) is None, "fewer than min_nodes"
    assert choose_leaving(many, [], 2) is None


def test_two_that_are_as_slow_leave_together_or_not_at_all() -> None:
    both = [slow_node(3, 0.9), slow_node(7, 0.9)]
    parting = choose_leaving(spread(16), both, 2)
    assert parting is not None and set(parting.seats) == {3, 7}
    assert choose_leaving(spread(16), both, 15) is None, "one alone brings nothing"


def test_a_spare_node_makes_it_easy() -> None:
    """A pipeline of four on five nodes: as fast on four."""
    plan = make_plan(make_conf(CONF.replace("count: 4", "count: 5")))
    shared = replace(TRAINING, layers=4)
    standing = stand(plan=plan, here=(0, 1, 2, 3, 4), facts=shared)
    parting = choose_leaving(standing, [slow_node(2, 0.1)], 2)
    assert parting is not None and parting.then_s == pytest.approx(1.9)


def test_peers_hold_the_same_stages_on_the_same_device() -> None:
    plan = replace(
        make_plan(make_conf(CONF)),
        pipeline=2,
        data=2,
        stage_map=encode_stage_map(build_stages(2, 2, "data")),
    )
    assert list_peers(plan, {}) == [[0, 1], [2, 3]]
    assert list_peers(plan, {0: "A100", 1: "A10"}) == [[0], [1], [2, 3]]
    assert list_peers(replace(plan, tensor=2), {})[1] == [4, 5, 6, 7]


def test_groups_of_several_queues_are_asked_for_each_by_itself() -> None:
    text = MORPH_SPLIT.replace("min_nodes: 2", "max_nodes: 9").replace(":4}", ":1}")
    standing = stand(plan=make_plan(make_conf(text)))
    offer = choose_growth(standing, 5, {"master": 0, "slave": 5})
    assert offer is not None and offer.group.name == "slave"
    assert not math.isinf(offer.then_s)
