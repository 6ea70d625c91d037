"""What is wrong with a schedule is found before it runs, and said with rank, action and reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.varuna_core.schedule.csv_text import parse_action, parse_csv, render_csv
from varuna_core.schedule.actions import Action, Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.generators import build_gpipe, build_interleaved, build_one_f_one_b
from varuna_core.schedule.order import compute_capacity
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify

NAMES = ["gpipe", "1f1b", "varuna", "zero_bubble", "interleaved", "zbv"]


@st.composite
def schedules(draw: st.DrawFn, least_ranks: int = 1) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ways = ["none", "full"] if name == "varuna" else ["none", "full", "offload"]
    return build_schedule(
        name,
        draw(st.integers(least_ranks, 4)),
        draw(st.integers(2, 7)),
        stages_per_rank=2 if name in ("interleaved", "zbv") else 1,
        recompute=draw(st.sampled_from(ways)),
    )


def edit(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(actions)
    return replace(schedule, ranks=tuple(ranks))


def pick(data: st.DataObject, schedule: Schedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))


@given(schedules(), st.data())
@settings(deadline=None)
def test_a_dropped_action_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank, index = pick(data, schedule)
    actions = list(schedule.ranks[rank])
    del actions[index]
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        verify(edit(schedule, rank, actions))


@given(schedules(), st.data())
@settings(deadline=None)
def test_an_action_run_twice_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank, index = pick(data, schedule)
    actions = list(schedule.ranks[rank])
    actions.insert(data.draw(st.integers(0, len(actions))), actions[index])
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        verify(edit(schedule, rank, actions))


@given(schedules(), st.data())
@settings(deadline=None)
def test_a_micro_batchs_actions_swapped_are_found(schedule: Schedule, data: st.DataObject) -> None:
    rank, index = pick(data, schedule)
    actions = list(schedule.ranks[rank])
    this = actions[index]
    others = [
        i
        for i, other in enumerate(actions)
        if i != index and (other.stage, other.microbatch) == (this.stage, this.microbatch)
    ]
    other = data.draw(st.sampled_from(others))
    actions[index], actions[other] = actions[other], actions[index]
    with pytest.raises(ScheduleError, match=f"rank {rank}, "):
        verify(edit(schedule, rank, actions))


@given(schedules(least_ranks=2), st.data())
@settings(deadline=None)
def test_micro_batches_swapped_on_one_rank_are_found(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Legal to each rank by itself; the neighbour sends or reads them in another order."""
    rank, _ = pick(data, schedule)
    stage = data.draw(
        st.sampled_from([s for s, owner in enumerate(schedule.placement) if owner == rank])
    )
    neighbours = {stage - 1, stage + 1} & set(range(schedule.num_stages))
    assume(any(schedule.placement[other] != rank for other in neighbours))
    swap = {0: 1, 1: 0}
    actions = [
        replace(a, microbatch=swap.get(a.microbatch, a.microbatch)) if a.stage == stage else a
        for a in schedule.ranks[rank]
    ]
    with pytest.raises(ScheduleError, match=r"rank \d+"):
        verify(edit(schedule, rank, actions))


@given(schedules(), st.data())
@settings(deadline=None)
def test_whatever_passes_after_a_random_swap_can_be_simulated(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank, index = pick(data, schedule)
    actions = list(schedule.ranks[rank])
    other = data.draw(st.integers(0, len(actions) - 1))
    actions[index], actions[other] = actions[other], actions[index]
    swapped = edit(schedule, rank, actions)
    try:
        verify(swapped)
    except ScheduleError:
        return
    simulate(swapped, build_even_costs(swapped.num_stages))


@pytest.mark.parametrize(
    ("csv", "message"),
    [
        ("0F0\n1F0,1B0\n", "rank 0: stage 0 ends with a graph of micro-batch 0; 0B0 or 0I0"),
        (
            "0B0,0F0\n",
            r"rank 0, 0B0 \(action 0\): the action needs a graph, but the micro-batch has nothing",
        ),
        ("0F0,0I0,0B0\n", "rank 0, 0B0 .* needs a graph, but .* has its input gradient"),
        ("0F0,0R0,0B0\n", "rank 0, 0R0 .* needs its inputs, but the micro-batch has a graph"),
        ("0f0,0B0\n", "rank 0, 0B0 .* needs a graph, but the micro-batch has its inputs"),
        (
            "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n",
            "rank 1, 1F1 .*: the next activation that rank 0 sends is for micro-batch 0 of stage 1",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            "deadlock: rank 0 at 0B0 .* waits for the gradient of micro-batch 0 from rank 1; "
            "rank 1 at 1F1 .* waits for the activation of micro-batch 1 from rank 0",
        ),
        (
            "0F0,3F0,0B0,3B0\n1F0,2F0,2B0,1B0\n",
            "deadlock: rank 0 at 0B0 .* gradient of micro-batch 0 from rank 1",
        ),
        ("0F0,0O0,0B0\n", "rank 0, 0B0 .* needs a graph, but .* has an offloaded graph"),
        ("0F0,0L0,0B0\n", "rank 0, 0L0 .* needs an offloaded graph, but .* has a graph"),
        ("0f0,0O0,0R0,0B0\n", "rank 0, 0O0 .* needs a graph, but .* has its inputs"),
        ("0F0,0O0\n", "stage 0 ends with an offloaded graph of micro-batch 0; 0L0 is missing"),
        ("1F0,0F0,1B0,0B0\n", "deadlock: rank 0 at 1F0 .* activation .* from rank 0"),
    ],
)
def test_errors_name_rank_action_and_reason(csv: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(parse_csv(csv))


def test_an_action_of_another_ranks_stage_is_found() -> None:
    schedule = build_gpipe(2, 1)
    with pytest.raises(ScheduleError, match=r"rank 0, 0F0 .*: the rank holds only stages \[1\]"):
        verify(replace(schedule, placement=(1, 0)))
    with pytest.raises(ScheduleError, match="there are only 1 micro-batches"):
        verify(replace(build_gpipe(1, 2), num_microbatches=1))
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2 of 2"):
        verify(replace(schedule, placement=(0, 2)))


def test_the_most_that_each_rank_holds_at_once_is_counted() -> None:
    assert verify(build_one_f_one_b(3, 5)).graphs == (3, 2, 1)
    varuna = build_schedule("varuna", 3, 5)
    assert str(verify(varuna)).startswith("rank 0: 1 graphs and 4 inputs; rank 1:")


def test_an_offloaded_graph_is_held_until_the_next_copy_begins() -> None:
    """By then the device has copied it, beside the action between."""
    held = verify(parse_csv("0F0,0O0,0F1,0O1,0L0,0B0,0L1,0B1\n"))
    assert (held.graphs, held.inputs, held.offloaded) == ((2,), (1,), (2,))
    assert str(held) == "rank 0: 2 graphs and 1 inputs, 2 graphs elsewhere"
    assert verify(parse_csv("0F0,0O0,0F1,0L0,0B0,0B1\n")).graphs == (2,)


def test_copies_take_the_time_of_their_rank_that_is_not_hidden() -> None:
    costs = Costs(
        forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,), offload=(0.5,), load=(0.25,)
    )
    assert simulate(parse_csv("0F0,0O0,0F1,0L0,0B0,0B1\n"), costs).makespan == 6.75
    assert simulate(parse_csv("0F0,0O0,0F1,0L0,0B0,0B1\n"), build_even_costs(1)).makespan == 6.0
    assert Costs(**costs.as_json()) == costs


def test_bounded_channels_can_lock_what_unbounded_ones_run() -> None:
    """Two ranks that both send before they read: each waits for the other to make room."""
    schedule = build_interleaved(2, 4, stages_per_rank=2)
    verify(schedule, capacity=2)
    assert compute_capacity(schedule) == 2
    with pytest.raises(ScheduleError, match=r"rank 0 at 2F0 .* waits for room to send to rank 1"):
        verify(schedule, capacity=1)


def test_a_schedule_that_no_room_would_help_says_where_it_is_stuck() -> None:
    schedule = build_one_f_one_b(2, 2)
    stuck = edit(schedule, 0, list(schedule.ranks[0][::-1]))
    with pytest.raises(ScheduleError, match="deadlock: rank 0"):
        compute_capacity(stuck)


@given(schedules())
@settings(deadline=None)
def test_the_capacity_found_suffices_and_one_less_does_not(schedule: Schedule) -> None:
    capacity = compute_capacity(schedule)
    verify(schedule, capacity=capacity)
    if schedule.num_stages == schedule.num_ranks:
        assert capacity == 1
    if capacity > 1:
        with pytest.raises(ScheduleError, match="room"):
            verify(schedule, capacity=capacity - 1)


def test_messages_share_a_link_one_after_another() -> None:
    costs = Costs(forward=(1.0, 1.0), input_grad=(1.0, 1.0), weight_grad=(0.0, 0.0), hops=(5.0,))
    timing = simulate(build_gpipe(2, 2), costs)
    # Sent at 1 and 2, there at 6 and 11; back from 13 and 14, there at 18 and 23.
    assert timing.starts[1] == (6.0, 11.0, 12.0, 13.0)
    assert timing.starts[0] == (0.0, 1.0, 18.0, 23.0)
    assert timing.makespan == 24.0
    assert timing.busy == (4.0, 4.0)
    assert timing.bubble == (20.0, 20.0)
    assert timing.bubble_share == 40 / 48


def test_costs_are_for_every_stage() -> None:
    with pytest.raises(ScheduleError, match="costs of R "):
        Costs(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,), recompute=(1.0, 2.0))
    with pytest.raises(ScheduleError, match="hops "):
        Costs(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,), hops=(1.0,))
    with pytest.raises(ScheduleError, match="costs are given for 3 stages"):
        simulate(build_gpipe(2, 2), build_even_costs(3))


@given(schedules())
@settings(deadline=None)
def test_a_schedule_survives_its_spelling(schedule: Schedule) -> None:
    assert parse_csv(render_csv(schedule), schedule.name) == schedule


@pytest.mark.parametrize("text", ["F0", "0X1", "0F", "-1F0", "0SEND_F1", "0F1B"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


def test_a_csv_that_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 1, 0B0: stage 0 is already on rank 0"):
        parse_csv("0F0\n0B0\n")
    with pytest.raises(ScheduleError, match="no rank has an action of stage 1"):
        parse_csv("0F0\n2F0\n")
    with pytest.raises(ScheduleError, match="no rank has an action of stage 0"):
        parse_csv("\n")
    assert parse_csv(",0F0,,0B0\n").ranks == ((parse_action("0F0"), parse_action("0B0")),)


def test_thousands_of_micro_batches_are_checked_without_running() -> None:
    p, m = 8, 2_000
    schedule = build_schedule("zero_bubble", p, m)
    assert max(verify(schedule, capacity=1).graphs) <= p
    timing = simulate(schedule, build_even_costs(p))
    assert timing.makespan == 3 * m + p - 1
