"""Weight gradients go back into the backward where the step gets no longer, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.schedule.csv_text import parse_csv, render_csv
from varuna_core.schedule.actions import Action, Schedule
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.fuse import EQUAL, count_fused, fuse
from varuna_core.schedule.recompute import Memory, apply_recompute, measure_memory
from varuna_core.schedule.registry import build_schedule
from varuna_core.schedule.verify import verify
from varuna_core.schedule.zero_bubble import Policy, build_greedy, place_v

FIGURE = st.integers(0, 7)


def split_all(p: int, m: int, costs: Costs, bound: int, patience: float = 1.0) -> Schedule:
    """A schedule whose backwards are all split, of one stage a rank or of two as a V."""
    stages = costs.num_stages
    placement = tuple(range(p)) if stages == p else place_v(p)
    ahead = tuple(min(bound, stages - stage) for stage in range(stages))
    policy = Policy(ahead=ahead, patience=patience)
    return build_greedy("split", placement, m, costs, (bound,) * p, policy)


def list_messages(schedule: Schedule) -> list[list[tuple[bool, int, int]]]:
    """What each rank makes for others, in order."""
    return [
        [(a.kind in "Ff", a.stage, a.microbatch) for a in actions if a.kind in "FfBI"]
        for actions in schedule.ranks
    ]


@given(
    st.integers(1, 5),
    st.integers(1, 10),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "full"]),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_fusing_changes_when_weight_gradients_are_made_and_nothing_else(
    p, m, each, recompute, data
) -> None:
    stages = p * each
    figures = st.lists(FIGURE, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(
        forward=data.draw(figures),
        input_grad=data.draw(figures),
        weight_grad=data.draw(figures),
        backward=data.draw(figures),
        hops=data.draw(figures)[1:],
    )
    bound = data.draw(st.integers(each, stages + 1))
    split = split_all(p, m, costs, bound, data.draw(st.sampled_from([0.0, 1.0])))
    split = apply_recompute(split, recompute)
    fused = fuse(split, costs)
    before, after = verify(split), verify(fused)
    assert all(a <= b for a, b in zip(after.graphs, before.graphs, strict=True))
    sizes = tuple(map(float, data.draw(figures)))
    memory = Memory(graphs=tuple(s + 1 for s in sizes), inputs=sizes, limits=(0.0,) * p)
    for held, most in zip(
        measure_memory(fused, memory), measure_memory(split, memory), strict=True
    ):
        assert held <= most
    assert list_messages(fused) == list_messages(split)
    assert simulate(fused, costs).makespan <= simulate(split, costs).makespan * EQUAL
    assert fuse(fused, costs) == fused
    for action in (a for actions in fused.ranks for a in actions if a.kind == "B"):
        apart = costs.input_grad[action.stage] + costs.weight_grad[action.stage]
        assert costs.backward[action.stage] <= apart


def try_one_more(schedule: Schedule, costs: Costs) -> bool:
    """True if an I and the next W of its stage fuse without a longer step: all are tried."""
    makespan = simulate(schedule, costs).makespan
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            if action.kind != "I":
                continue
            stage = action.stage
            later = range(index + 1, len(actions))
            drop = next(i for i in later if actions[i].kind == "W" and actions[i].stage == stage)
            changed = list(actions)
            changed[index] = Action("B", stage, action.microbatch)
            dropped = changed.pop(drop)
            own = Action("W", stage, action.microbatch)
            if own != dropped:  # what it was for takes its place
                changed[changed.index(own)] = dropped
            ranks = (*schedule.ranks[:rank], tuple(changed), *schedule.ranks[rank + 1 :])
            if simulate(replace(schedule, ranks=ranks), costs).makespan <= makespan * EQUAL:
                return True
    return False


@pytest.mark.parametrize("figures", [(1, 1, 1), (2, 3, 1), (2, 1, 3), (3, 2, 2)])
@pytest.mark.parametrize(("p", "m", "each"), [(2, 6, 1), (4, 8, 1), (2, 8, 2), (4, 8, 2)])
def test_no_more_can_be_fused_one_by_one(p: int, m: int, each: int, figures) -> None:
    costs = build_even_costs(p * each, *figures)
    split = split_all(p, m, costs, p * each)
    assert try_one_more(split, costs)
    assert not try_one_more(fuse(split, costs), costs)


def test_the_first_rank_of_a_pipeline_waits_for_nobody() -> None:
    """Stage 0 sends no gradient: its W go back one and all. Rank 0 waits for both of rank 1."""
    split = parse_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    fused = fuse(split, build_even_costs(2))
    assert render_csv(fused) == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_two_ranks_and_eight_micro_batches_fuse_most() -> None:
    """The story: zbv split all 32 backwards of a rank, where torch's DualPipeV splits 5 of 32."""
    schedule = build_schedule("zbv", 2, 8, stages_per_rank=2)
    assert count_fused(schedule) == 29
    assert simulate(schedule, build_even_costs(4)).makespan == 6 * 8 + 1


def test_a_graph_more_is_held_only_for_a_shorter_step() -> None:
    even, long = build_even_costs(8), build_even_costs(8, 0.8, 1.1, 1.1)

    def build(costs: Costs, graphs: float | None) -> Schedule:
        memory = None
        if graphs is not None:
            memory = Memory(graphs=(1.0,) * 8, inputs=(0.1,) * 8, limits=(graphs,) * 4)
        return build_schedule("zbv", 4, 16, stages_per_rank=2, costs=costs, memory=memory)

    assert max(verify(build(even, None)).graphs) == 8
    assert max(verify(build(long, None)).graphs) == 9
    assert build(long, 9.0) == build(long, None)
    bounded = build(long, 8.0)
    assert max(verify(bounded).graphs) == 8
    assert simulate(bounded, long).makespan > simulate(build(long, None), long).makespan


def test_zero_bubble_recomputes_what_it_fuses_last() -> None:
    """The weight gradients go back with the recomputes known: the step is no longer for it."""
    costs = build_even_costs(4)
    schedule = build_schedule("zero_bubble", 4, 12, costs=costs, recompute="full")
    verify(schedule)
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    assert {"f", "R", "B"} <= kinds
    plain = build_schedule("1f1b", 4, 12, costs=costs, recompute="full")
    assert simulate(schedule, costs).makespan <= simulate(plain, costs).makespan * EQUAL
