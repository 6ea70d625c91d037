"""Partitions equal to brute force in the simulated step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.varuna_core.planner.profiles import make_chain
from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.step import ActionCosts, find_peaks, simulate_step
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.search.bounds import Cells
from varuna_core.planner.search.partition import find_partition, is_allowed
from varuna_core.schedule.actions import Schedule, ScheduleError
from varuna_core.schedule.compiled import Compiled, simulate, unlist_costs
from varuna_core.schedule.recompute import USABLE, Memory, apply_recompute, measure_memory

INSTANCES = 2000


def list_all(size: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations_with_replacement(range(size + 1), stages - 1):
        yield (0, *cuts, size)


def list_allowed(chain: Chain) -> list[Bounds]:
    every = list_all(chain.size, chain.num_stages)
    return [bounds for bounds in every if is_allowed(chain, bounds)]


def test_the_step_of_the_best_partition_is_brute_forces() -> None:
    draw = random.Random(2)
    fitting = 0
    for _ in range(INSTANCES):
        chain = make_chain(draw)
        allowed = list_allowed(chain)
        found = find_partition(chain)
        if not allowed or found is None:
            assert found is None and not allowed
            continue
        fitting += 1
        times = chain.compute_steps(allowed)
        assert found.step_s == pytest.approx(float(times.min()), rel=1e-9)
        assert found.gap == 0
        assert found.bounds in allowed
    assert fitting > INSTANCES / 2


def test_no_partition_takes_less_than_its_bound() -> None:
    draw = random.Random(3)
    for _ in range(300):
        chain = make_chain(draw)
        allowed = list_allowed(chain)
        if allowed:
            assert chain.bound <= float(chain.compute_steps(allowed).min()) * (1 + 1e-12)


def test_no_partition_takes_less_than_its_cells_say() -> None:
    draw = random.Random(8)
    closer = 0
    for _ in range(500):
        chain = make_chain(draw)
        allowed = list_allowed(chain)
        if not allowed:
            continue
        best = float(chain.compute_steps(allowed).min())
        limit = best * draw.uniform(0.9, 1.6)
        least = Cells(chain, limit, draw.randint(1, 8), draw.randint(1, 4)).compute_least()
        assert min(least, limit) <= best * (1 + 1e-9)
        closer += min(least, limit) > chain.bound * 1.001
    assert closer > 50


def test_many_at_once_are_timed_as_one_by_one() -> None:
    draw = random.Random(4)
    for _ in range(150):
        chain = make_chain(draw)
        allowed = list_allowed(chain)[:20]
        times = chain.compute_steps(allowed)
        for bounds, took in zip(allowed, times, strict=True):
            step = simulate_step(chain.compile(bounds), chain.build_costs(bounds))
            assert step.step_s == pytest.approx(float(took), rel=1e-12)


def test_what_is_allowed_fits_memory_and_nothing_else_is() -> None:
    draw = random.Random(5)
    for _ in range(150):
        chain = make_chain(draw)
        if chain.schedule.keeps_what_fits:
            continue
        for bounds in list_all(chain.size, chain.num_stages):
            counts = np.diff(bounds)
            peaks = find_peaks(chain.compiled, chain.list_memory(bounds))
            fits = all(
                p <= t.times.memory_bytes * (1 + 1e-12)
                for p, t in zip(peaks, chain.stages, strict=True)
            )
            holds = all(c >= n for c, n in zip(counts, chain.least, strict=True))
            assert is_allowed(chain, bounds) == (fits and holds)


def test_what_is_kept_is_what_the_runtime_keeps() -> None:
    """Of `recompute: auto`: what fits, which actions run, what they hold, and how long it takes."""
    draw = random.Random(9)
    refused = some = 0
    for _ in range(400):
        chain = make_chain(draw)
        if not chain.schedule.keeps_what_fits or chain.num_stages < 2:
            continue
        chain = give_memory(chain, draw.uniform(4e9, 2e10))
        for bounds in itertools.islice(list_all(chain.size, chain.num_stages), 40):
            counts = zip(np.diff(bounds), chain.least, strict=True)
            if any(count < least for count, least in counts):
                continue
            held = chain.list_memory(bounds)
            share, stages = chain.tables.training.memory_share, chain.stages
            room = [
                min(s.times.memory_bytes - one.fixed - one.work,
                    USABLE * (s.times.memory_bytes / share - one.fixed))
                for s, one in zip(stages, held, strict=True)
            ]  # fmt: skip
            memory = Memory(
                graphs=tuple(one.graph for one in held),
                inputs=tuple(one.inputs for one in held),
                limits=tuple(room),
            )
            try:
                schedule = apply_recompute(chain.schedule.plain, "auto", memory)
            except ScheduleError:
                refused += 1
                assert not is_allowed(chain, bounds)
                continue
            fits = all(
                h <= limit for h, limit in zip(measure_memory(schedule, memory), room, strict=True)
            )
            assert is_allowed(chain, bounds) == fits
            if not fits:
                continue
            assert chain.compile(bounds).schedule == schedule
            some += any(a.kind == "R" for actions in schedule.ranks for a in actions)
            costs = chain.build_costs(bounds)
            step = simulate_step(Compiled(schedule), costs)
            assert chain.compute_step(bounds) == step.step_s
            assert step.step_s == pytest.approx(float(chain.compute_steps([bounds])[0]), rel=1e-12)
            plain = find_makespan(schedule, costs.columns[0])
            assert step.pipeline_s - step.lag_s == pytest.approx(plain, rel=1e-12)
    assert refused > 20 and some > 50


def give_memory(chain: Chain, memory: float) -> Chain:
    """The chain on GPUs with so much."""
    profile = chain.tables.profile
    gpus = {kind: replace(gpu, memory_bytes=memory) for kind, gpu in profile.gpus.items()}
    tables = Tables(replace(profile, gpus=gpus), chain.tables.training)
    return Chain(tables, chain.shape, chain.placed, chain.schedule, chain.least[1])


def find_makespan(schedule: Schedule, costs: ActionCosts) -> float:
    """As `simulate` has it; messages of a link that is full apart."""
    if costs.holds == costs.hops and costs.hops[::2] == costs.hops[1::2]:
        return simulate(schedule, unlist_costs(costs.costs, costs.hops)).makespan
    return Compiled(schedule).run(costs.costs, costs.hops, holds=costs.holds).makespan


def test_an_incumbent_that_cannot_be_beaten_ends_the_search() -> None:
    chain = make_chain(random.Random(6))
    found = find_partition(chain)
    assert found is not None
    assert find_partition(chain, incumbent=chain.bound) is None


def test_what_a_budget_leaves_open_is_told_as_a_gap() -> None:
    draw = random.Random(7)
    gaps = []
    for _ in range(100):
        chain = make_chain(draw)
        found = find_partition(chain, max_nodes=0)
        if found is not None:
            best = find_partition(chain)
            assert best is not None
            assert found.bound_s <= best.step_s * (1 + 1e-9) <= found.step_s * (1 + 2e-9)
            gaps.append(found.gap)
    assert max(gaps) > 0
