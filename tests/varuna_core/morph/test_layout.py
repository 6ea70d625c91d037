"""Plans for the nodes that are there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.varuna_core.agent.local_run import make_group, make_plan
from tests.varuna_core.programs.trainings import GPT
from varuna_core.morph.layout import (
    AttemptPlan,
    LayoutRequest,
    ParallelShape,
    build_attempt,
    choose_layout,
)
from varuna_core.records.plan import Plan
from varuna_core.records.rank_map import (
    build_stages,
    decode_stage_map,
    encode_stage_map,
    parse_stage_map,
)
from varuna_core.records.training import derive_facts


def question(shares: int, pipeline: int = 4, layers: int = 12, micro: int = 8) -> LayoutRequest:
    return LayoutRequest(shares=shares, pipeline=pipeline, layers=layers, micro_batches=micro)


def test_a_pipeline_keeps_its_depth_where_it_can_and_gives_up_replicas() -> None:
    assert choose_layout(question(8)) == ParallelShape(4, 2)
    assert choose_layout(question(7)) == ParallelShape(7, 1) or choose_layout(
        question(7)
    ) == ParallelShape(6, 1)
    assert choose_layout(question(4)) == ParallelShape(4, 1)
    assert choose_layout(question(32, micro=64)) == ParallelShape(4, 8)


def test_it_gets_shallower_only_where_ranks_are_too_few() -> None:
    assert choose_layout(question(3)) == ParallelShape(3, 1)
    assert choose_layout(question(1)) == ParallelShape(1, 1)
    assert choose_layout(question(0)) is None


def test_no_replica_is_without_a_micro_batch_and_no_stage_without_a_layer() -> None:
    assert choose_layout(question(64, pipeline=1, layers=2, micro=3)) == ParallelShape(1, 3)
    assert choose_layout(question(9, pipeline=9, layers=4, micro=1)) == ParallelShape(4, 1)


def test_replicas_that_are_told_one_share_have_as_many_micro_batches() -> None:
    even = replace(question(7, pipeline=1, layers=1, micro=8), is_even=True)
    assert choose_layout(even) == ParallelShape(1, 4)
    assert choose_layout(replace(even, layers=None, shares=3)) == ParallelShape(1, 2)
    assert choose_layout(replace(even, micro_batches=7)) == ParallelShape(1, 7)


def plan_of(ranks: int, nodes: int, pipeline: int, tensor: int) -> Plan:
    data = ranks * nodes // (pipeline * tensor)
    return make_plan(
        make_group("all", nodes, ranks),
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        order="data",
        stage_map=encode_stage_map(build_stages(pipeline, data, "data")),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, AttemptPlan | None, list[int], int]:
    tensor = draw(st.sampled_from([1, 2]))
    ranks = tensor * draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 6))
    layers = draw(st.integers(1, 16))
    deepest = min(ranks * nodes // tensor, layers)
    pipeline = draw(st.sampled_from([d for d in range(1, deepest + 1) if not ranks * nodes % d]))
    micro_batches = draw(st.integers(1, 12))
    plan = plan_of(ranks, nodes, pipeline, tensor)
    training = replace(
        GPT,
        layers=layers,
        global_batch_size=2 * micro_batches,
        micro_batch_size=2,
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        partition=None,
        tensor=tensor,
    )
    seats = draw(st.lists(st.integers(0, nodes - 1), unique=True, min_size=1))
    return plan, build_attempt(plan, derive_facts(training), seats), seats, training.layers


@given(cases())
def test_an_attempt_uses_what_is_there_and_names_what_is_left(
    case: tuple[Plan, AttemptPlan | None, list[int], int],
) -> None:
    plan, found, seats, layers = case
    assert found is not None
    own = found.plan
    assert own.world == own.pipeline * own.data * own.tensor
    assert own.tensor == plan.tensor and own.pipeline <= layers
    assert set(found.seats) <= set(seats) and list(found.seats) == sorted(found.seats)
    assert own.num_nodes == len(found.seats)
    held = sorted(rank for index in range(own.num_nodes) for rank in own.node(index).ranks)
    assert held == list(range(own.world))
    assert all(own.node(index).group.ranks % own.tensor == 0 for index in range(own.num_nodes))
    stages = decode_stage_map(own.stage_map)
    assert [len(replicas) for replicas in stages] == [own.data] * own.pipeline
    assert parse_stage_map(own.stage_map, own.world, own.tensor).depth == own.pipeline
    room = sum(plan.node(seat).group.ranks for seat in seats)
    if len(seats) == plan.num_nodes and plan.world == plan.pipeline * plan.data * plan.tensor:
        assert own == plan
    idle = sum(int(text.split(" ")[0]) for text in found.idle)
    assert own.world + idle == room


def test_a_pipeline_deeper_than_all_nodes_have_ranks_is_cut_to_them() -> None:
    plan = replace(plan_of(1, 4, 4, 1), pipeline=8, data=0, stage_map=";" * 8)
    training = replace(GPT, layers=12, global_batch_size=16, micro_batch_size=2)
    found = build_attempt(plan, derive_facts(training), range(4))
    assert found is not None
    assert (found.plan.pipeline, found.plan.data, found.plan.world) == (4, 1, 4)


def test_with_all_nodes_there_it_is_the_runs_own_plan() -> None:
    plan = plan_of(2, 4, 4, 1)
    training = replace(GPT, layers=4, global_batch_size=16, micro_batch_size=2)
    found = build_attempt(plan, derive_facts(replace(training, schedule="1f1b")), [3, 1, 0, 2])
    assert found is not None and found.plan == plan and found.idle == ()
