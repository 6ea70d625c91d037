"""What a stage of several segments costs, holds, and shares with stages beside it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.varuna_core.planner.profiles import make_profile
from varuna_core.planner.model.chain import Chain
from varuna_core.planner.model.cluster import (
    Boundary,
    Cluster,
    GpuRoute,
    NodeKind,
    PlacedPipeline,
    StageSite,
)
from varuna_core.planner.model.schedule_model import Levels, build_schedule_model
from varuna_core.planner.model.step import find_away, find_peaks, simulate_step
from varuna_core.planner.model.tables import Shape, Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import HALVES, Cell, Network, Profile, Tie, build_link
from varuna_core.planner.search.search import Search
from varuna_core.planner.search.space import Wishes
from varuna_core.schedule.compiled import KINDS
from varuna_core.schedule.recompute import Recompute

ACTION_S = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Of forward, backward, input gradient, weight gradient, recompute."""
OUTPUTS = (3.0, 5.0, 7.0, 0.0)


def build_profile(copies_beside: bool = True) -> Profile:
    """Four equal segments on one kind of GPU, links within a node alone."""
    drawn = make_profile(random.Random(1), 4)
    cell = Cell(
        forward_s=(1.0,) * 4,
        backward_s=(1.5,) * 4,
        input_grad_s=(1.1,) * 4,
        weight_grad_s=(0.9,) * 4,
        recompute_s=(0.8,) * 4,
        output_bytes=OUTPUTS,
        graph_bytes=(10.0,) * 4,
        work_bytes=(0.0,) * 4,
        selective_s=(0.3,) * 4,
        kept_bytes=(4.0,) * 4,
        offload_s=(2.5,) * 4,
        load_s=(1.25,) * 4,
        action_s=ACTION_S,
    )
    gpu = replace(
        drawn.gpus["big"],
        cells={(1, 1): cell},
        optimizer_s={1: (0.0,) * 4},
        copies_beside=copies_beside,
    )
    link = build_link(0.25, 1.0)
    tied = replace(drawn.model, ties=(Tie(segments=(0, 3), parameters=1000),))
    network = Network(links={("big", "big", "intra"): link}, all_reduces={})
    return replace(drawn, model=tied, gpus={"big": gpu}, network=network)


def make_chain(
    schedule: str,
    stages: int = 2,
    count: int = 3,
    flows: int = 1,
    recompute: Recompute = "none",
    copies_beside: bool = True,
) -> Chain:
    training = TrainingModel(
        batch=count, weight_bytes=0, gradient_bytes=0, state_bytes=0, framework_bytes=0
    )
    sites = tuple(StageSite(("big",), (("big", 1),), 1) for _ in range(stages))
    beside = Boundary((GpuRoute("big", "big", "intra", flows),))
    return Chain(
        Tables(build_profile(copies_beside), training),
        Shape(tensor=1, replicas=1, micro_batch=1),
        PlacedPipeline(sites, (beside,) * (stages - 1)),
        build_schedule_model(schedule, stages, count, recompute),
        least=0,
    )


def test_an_action_costs_its_segments_and_once_its_own() -> None:
    chain = make_chain("1f1b", stages=3)
    costs = chain.build_costs((0, 1, 1, 4)).columns[0].costs
    by_kind = {kind: costs[3 * i : 3 * i + 3] for i, kind in enumerate("FfRBIW")}
    # Of one segment, of none, of three.
    assert by_kind["F"] == by_kind["f"] == pytest.approx((1.1, 0.1, 3.1))
    assert by_kind["B"] == pytest.approx((1.7, 0.2, 4.7)), "not one gradient after the other"
    assert by_kind["I"] == pytest.approx((1.4, 0.3, 3.6))
    assert by_kind["W"] == pytest.approx((1.3, 0.4, 3.1))
    assert by_kind["R"] == pytest.approx((1.3, 0.5, 2.9))


def test_messages_that_share_a_link_meet_once() -> None:
    alone, shared = make_chain("1f1b"), make_chain("1f1b", flows=3)
    one, three = (chain.build_costs((0, 2, 4)) for chain in (alone, shared))
    took = 0.25 + OUTPUTS[1] * 1e-9
    assert one.columns[0].hops == one.columns[0].holds == three.columns[0].hops
    assert three.columns[0].hops == pytest.approx((took, took))
    more = 2 * OUTPUTS[1] * 1e-9
    assert three.columns[0].lag_s == pytest.approx(more) and not one.columns[0].lag_s
    steps = [simulate_step(alone.compiled, costs) for costs in (one, three)]
    # The last replica is behind by that, and nothing else waits for the link.
    assert steps[1].lag_s == three.columns[0].lag_s
    assert steps[1].step_s - steps[0].step_s == pytest.approx(more)
    times = (float(chain.compute_steps([(0, 2, 4)])[0]) for chain in (alone, shared))
    assert list(times) == pytest.approx([step.step_s for step in steps])


def test_a_link_that_is_full_holds_up_what_follows() -> None:
    compiled = make_chain("gpipe", count=4).compiled
    costs = [1.0] * 12
    free, full = (compiled.run(costs, [2.0, 2.0], holds=[hold] * 2) for hold in (0.5, 5.0))
    # Four forwards, the message, the last stage's forward and backward, the message, a backward:
    # one after the other, but where the link is full the fourth message begins 15 later.
    assert free.makespan == 1 + 2 + 4 + 4 + 2 + 1
    assert full.makespan == 1 + 15 + 2 + 1 + 1 + 15 + 2 + 1
    levels = Levels(compiled)
    rows = [levels.run([costs], [[2.0] * 2], [[hold] * 2])[0][0] for hold in (0.5, 5.0)]
    assert rows == [free.makespan, full.makespan]


def test_a_micro_batch_keeps_what_its_stage_sent_on() -> None:
    chain = make_chain("gpipe")
    peaks = find_peaks(chain.compiled, chain.list_memory((0, 2, 4)))
    assert peaks == pytest.approx((3 * (2 * 10 + OUTPUTS[1]), 3 * 2 * 10))
    assert float(chain.stages[0].graph[0, 2]) == 2 * 10 + OUTPUTS[1]


def test_a_recompute_between_products_has_figures_of_its_own() -> None:
    """Its own time, an action's own as of any recompute; and products beside what came in."""
    chain = make_chain("gpipe", recompute="selective")
    costs = chain.build_costs((0, 2, 4)).columns[0].costs
    again = costs[2 * KINDS.index("R") : 2 * KINDS.index("R") + 2]
    assert again == pytest.approx((2 * 0.3 + ACTION_S[4],) * 2)
    first, second = chain.list_memory((0, 2, 4))
    assert (first.inputs, second.inputs) == (2 * 4, 2 * 4 + OUTPUTS[1])
    peaks = find_peaks(chain.compiled, [first, second])
    # One graph, that of the last micro-batch or of the one that goes backward, and two others.
    assert peaks[0] == first.graph + 2 * first.inputs


def test_copies_cost_what_the_work_beside_them_does_not_hide() -> None:
    """gpipe of one stage: F0 O0 F1 O1 F2 O2 L0 F3 O3 L1 B0 L2 B1 L3 B2 B3."""
    chain = make_chain("gpipe", stages=1, count=4, recompute="offload")
    forward, both = 4 + ACTION_S[0], 4 * 1.5 + ACTION_S[1]
    # A segment's figures are without what came in: 10, 7, 5 and 3 bytes; together that is copied.
    more = 40 / 25
    out, back = more * 4 * 2.5, more * 4 * 1.25
    costs = chain.build_costs((0, 4)).columns[0].costs
    assert costs[len(KINDS) :] == pytest.approx(
        (
            (2 * (out - forward) + 2 * out) / 4,  # two have the other copy right behind them
            (back - forward + 3 * (back - both)) / 4,
        )
    )
    work = 4 * (forward + both) + 4 * sum(costs[len(KINDS) :])
    assert chain.compute_step((0, 4)) == pytest.approx(work)
    assert chain.compute_steps([(0, 4)])[0] == pytest.approx(work)
    (held,) = chain.list_memory((0, 4))
    assert find_peaks(chain.compiled, [held]) == (2 * held.graph + 2 * held.inputs,)
    assert find_away(chain.compiled, [held]) == (3 * (held.graph - held.inputs),)
    assert find_away(make_chain("gpipe").compiled, [held, held]) == (0, 0)


def test_where_nothing_runs_beside_a_copy_all_of_it_counts() -> None:
    chain = make_chain("gpipe", stages=1, count=4, recompute="offload", copies_beside=False)
    costs = chain.build_costs((0, 4)).columns[0].costs
    assert costs[len(KINDS) :] == pytest.approx((40 / 25 * 10, 40 / 25 * 5))


@pytest.mark.parametrize("deals_whole", [True, False])
def test_owners_are_reached_by_the_messages_of_their_zero(deals_whole: bool) -> None:
    """Whole parameters by reduce and broadcast; slices, of ZeRO 3 always, by the other two."""
    rates = {"reduce": 1.0, "broadcast": 2.0, "reduce_scatter": 4.0, "all_gather": 8.0}
    network = Network(
        links={},
        all_reduces={("big", 2, 2): build_link(0.0, 16.0)},
        halves={(half, "big", 2, 2): build_link(0.0, rates[half]) for half in HALVES},
    )
    training = TrainingModel(batch=4, deals_whole=deals_whole)
    tables = Tables(replace(build_profile(), network=network), training)
    site = StageSite(("big",), (("big", 2),), 1)
    count = float(tables.compute_parameters(1)[0, 4]) / 1e9
    summed, weights = count * training.reduced_bytes, count * training.weight_bytes

    def find(zero: int) -> list[float]:
        found = tables.compute_sums(site, Shape(tensor=1, replicas=2, micro_batch=1, zero=zero))
        rows = (found.reduce, found.exchange, found.scatter, found.gather)
        return [float(row[0, 4]) for row in rows]

    to, back = (1.0, 2.0) if deals_whole else (4.0, 8.0)
    assert find(0) == pytest.approx([summed / 16, 0, 0, 0])
    assert find(1) == pytest.approx([summed / to, weights / back, 0, 0])
    assert find(2) == pytest.approx([0, weights / back, summed / to, 0])
    assert find(3) == pytest.approx([0, 0, summed / 4, weights / 8])


def test_stages_of_one_node_sum_a_tied_weight_within_it() -> None:
    costs = make_chain("1f1b").build_costs((0, 2, 4))
    ((held, took),) = costs.ties
    # There and back, half of it at a time.
    assert held == (0, 1) and took == pytest.approx(2 * (0.25 + 2e-6), rel=1e-3)


def test_a_node_alone_needs_no_link_to_another_one() -> None:
    cluster = Cluster(kinds=(NodeKind(name="n", gpu="big", gpus=4, count=1),))
    drawn = build_profile()
    gpu = replace(drawn.gpus["big"], memory_bytes=1e15)
    profile, wishes = replace(drawn, gpus={"big": gpu}), Wishes(replicas=1)
    best = Search(profile, TrainingModel(batch=3), cluster, wishes).run().best
    assert len(best.placed.sites) > 1
