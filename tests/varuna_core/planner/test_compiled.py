"""The timing of every schedule is that of a plain walk through its actions."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from varuna_core.planner.model.schedule_model import (
    Levels,
    build_schedule_model,
    model_schedule,
)
from varuna_core.planner.model.step import (
    ActionCosts,
    StageMemory,
    StepCosts,
    find_peaks,
    simulate_step,
)
from varuna_core.planner.model.training import RECOMPUTES
from varuna_core.schedule.actions import Schedule
from varuna_core.schedule.compiled import (
    Compiled,
    list_all_costs,
    list_costs,
    list_hops,
    simulate,
    unlist_costs,
)
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.order import find_source, find_target, walk
from varuna_core.schedule.recompute import Memory, Recompute, measure_memory
from varuna_core.schedule.registry import build_schedule

NAMES = ("gpipe", "1f1b", "varuna", "zero_bubble", "interleaved", "zbv")


def draw_costs(draw: random.Random, stages: int) -> Costs:
    def row() -> tuple[float, ...]:
        return tuple(draw.uniform(0.1, 2) for _ in range(stages))

    hops = tuple(draw.choice([0.0, draw.random()]) for _ in range(stages - 1))
    return Costs(
        forward=row(),
        input_grad=row(),
        weight_grad=row(),
        backward=row(),
        recompute=row(),
        offload=row(),
        load=row(),
        hops=hops,
    )


def time_plainly(schedule: Schedule, costs: Costs) -> tuple[list[float], list[float]]:
    """The end of each rank and the start of each action, by the rules and nothing else."""
    placement, last = schedule.placement, schedule.num_stages - 1
    free = [0.0] * schedule.num_ranks
    links: dict[tuple[int, int], float] = {}
    arrivals: dict[tuple[bool, int, int], float] = {}
    starts = []
    for rank, action in walk(schedule):
        source = find_source(action, last + 1)
        start = free[rank]
        if source is not None:
            start = max(start, arrivals.pop((source[0], action.stage, action.microbatch)))
        starts.append(start)
        free[rank] = end = start + costs.by_kind[action.kind][action.stage]
        target = find_target(action, last + 1)
        if target is not None:
            forward, stage = target
            to = placement[stage]
            if to != rank:
                end = max(end, links.get((rank, to), 0.0)) + costs.hops[min(stage, action.stage)]
                links[rank, to] = end
            arrivals[forward, stage, action.microbatch] = end
    return free, starts


def make(name: str, draw: random.Random) -> tuple[Compiled, Costs]:
    ranks, count = draw.randint(1, 5), draw.randint(1, 9)
    each = 2 if name in ("interleaved", "zbv") else 1
    ways: list[Recompute] = ["none", "full", *(["offload"] * (name != "varuna"))]
    costs = draw_costs(draw, ranks * each)
    schedule = build_schedule(
        name,
        ranks,
        count,
        stages_per_rank=each,
        costs=costs,
        recompute=draw.choice(ways),
    )
    return Compiled(schedule), costs


@pytest.mark.parametrize("name", NAMES)
def test_it_times_as_a_plain_walk_does(name: str) -> None:
    draw = random.Random(name)
    for _ in range(12):
        compiled, costs = make(name, draw)
        free, starts = time_plainly(compiled.schedule, costs)
        timing = simulate(compiled.schedule, costs)
        timed = compiled.run(list_all_costs(costs), list_hops(costs), keep_starts=True)
        assert timed.ends == pytest.approx(free, rel=1e-12)
        assert timed.starts == pytest.approx(starts, rel=1e-12)
        assert (timing.makespan, timing.busy) == (max(free), timed.busy)
        assert sorted(timed.starts) == sorted(sum(timing.starts, ()))
        assert unlist_costs(list_all_costs(costs), list_hops(costs)).by_kind == costs.by_kind
        other = draw_costs(draw, compiled.num_stages)
        several = [costs, other, costs]
        makespans, ends, last = Levels(compiled).run(
            np.array(list(map(list_all_costs, several))),
            np.array([list_hops(one) for one in several]).reshape(3, -1),
        )
        assert makespans[0] == makespans[2] == pytest.approx(timed.makespan, rel=1e-12)
        assert makespans[1] == pytest.approx(
            max(time_plainly(compiled.schedule, other)[0]), rel=1e-12
        )
        assert ends[0] == pytest.approx(timed.ends, rel=1e-12)
        assert last[0] == pytest.approx(timed.last_backward, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_the_schedules_own_count(name: str) -> None:
    draw = random.Random(name)
    for _ in range(12):
        compiled, _ = make(name, draw)
        stages = range(compiled.num_stages)
        held = [
            StageMemory(fixed=1.0, graph=draw.uniform(2, 9), inputs=draw.uniform(0, 2), work=0.5)
            for _ in stages
        ]
        memory = Memory(
            graphs=tuple(one.graph for one in held),
            inputs=tuple(one.inputs for one in held),
            limits=(0.0,) * compiled.num_ranks,
        )
        per_rank = compiled.num_stages // compiled.num_ranks
        peaks = [m + per_rank + 0.5 for m in measure_memory(compiled.schedule, memory)]
        assert find_peaks(compiled, held) == pytest.approx(peaks)


ROLES: list[tuple[str, Recompute]] = [
    (name, recompute)
    for name in ("gpipe", "1f1b", "varuna")
    for recompute in RECOMPUTES
    if recompute != "auto" and (name, recompute) != ("varuna", "offload")
]


@pytest.mark.parametrize(("name", "recompute"), ROLES)
def test_roles_are_those_of_the_schedule_as_made(name: str, recompute: Recompute) -> None:
    for stages in range(1, 6):
        for count in range(1, 9):
            work = build_schedule_model(name, stages, count, recompute)
            made = model_schedule(work.compiled, recompute).roles
            for role, other in zip(work.roles, made, strict=True):
                assert replace(role, held=()) == replace(other, held=())
                assert set(role.held) == set(other.held)


def make_step(**changes: object) -> StepCosts:
    even = build_even_costs(2)
    fields: dict[str, object] = {
        "columns": (ActionCosts(costs=tuple(list_costs(even)), hops=(0.0, 0.0)),),
        "reduce_s": (0.0, 0.0),
        "num_buckets": (1, 1),
        "optimizer_s": (0.0, 0.0),
        "exchange_s": (0.0, 0.0),
    }
    return StepCosts(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_step_is_its_pipeline_and_what_follows_it() -> None:
    compiled = build_schedule_model("1f1b", 2, 4, "none").compiled
    # F, B of 2 units each stage: (4 + 1) x 3.
    assert simulate_step(compiled, make_step()).step_s == 15
    assert simulate_step(compiled, make_step(optimizer_s=(1.0, 3.0))).step_s == 18
    assert simulate_step(compiled, make_step(exchange_s=(0.0, 2.0), data_s=0.5)).step_s == 17.5
    # Stage 1 ends at 13; its sum of 2 is over when stage 0 ends.
    plain = {"overlap_reduction": False}
    assert simulate_step(compiled, make_step(reduce_s=(0.0, 2.0), **plain)).step_s == 15
    assert simulate_step(compiled, make_step(reduce_s=(1.0, 2.0), **plain)).step_s == 16
    # Four buckets: the last of them is summed after the backward, the others under it.
    step = make_step(reduce_s=(1.0, 0.0), num_buckets=(4, 1))
    assert simulate_step(compiled, step).step_s == 15.25
    # A tied weight waits for both stages.
    assert simulate_step(compiled, make_step(ties=(((0, 1), 0.5),))).step_s == 15.5


def test_replicas_that_differ_wait_for_the_slowest() -> None:
    compiled = build_schedule_model("1f1b", 2, 4, "none").compiled
    even, slow = build_even_costs(2), build_even_costs(2, forward=2.0)
    columns = tuple(ActionCosts(costs=tuple(list_costs(c)), hops=(0.0, 0.0)) for c in (even, slow))
    assert simulate_step(compiled, make_step(columns=columns)).step_s == 20
