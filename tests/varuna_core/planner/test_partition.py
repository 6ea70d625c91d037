"""Partitions equal to brute force in the simulated step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.varuna_core.planner.profiles import make_chain
from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.step import find_peaks, simulate_step
from varuna_core.planner.search.bounds import Cells
from varuna_core.planner.search.partition import find_partition, is_allowed

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
        times = chain.find_steps(allowed)
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
            assert chain.bound <= float(chain.find_steps(allowed).min()) * (1 + 1e-12)


def test_no_partition_takes_less_than_its_cells_say() -> None:
    draw = random.Random(8)
    closer = 0
    for _ in range(500):
        chain = make_chain(draw)
        allowed = list_allowed(chain)
        if not allowed:
            continue
        best = float(chain.find_steps(allowed).min())
        limit = best * draw.uniform(0.9, 1.6)
        least = Cells(chain, limit, draw.randint(1, 8), draw.randint(1, 4)).find_least()
        assert min(least, limit) <= best * (1 + 1e-9)
        closer += min(least, limit) > chain.bound * 1.001
    assert closer > 50


def test_many_at_once_are_timed_as_one_by_one() -> None:
    draw = random.Random(4)
    for _ in range(150):
        chain = make_chain(draw)
        allowed = list_allowed(chain)[:20]
        times = chain.find_steps(allowed)
        for bounds, took in zip(allowed, times, strict=True):
            step = simulate_step(chain.compiled, chain.build_costs(bounds))
            assert step.step_s == pytest.approx(float(took), rel=1e-12)


def test_what_is_allowed_fits_memory_and_nothing_else_is() -> None:
    draw = random.Random(5)
    for _ in range(150):
        chain = make_chain(draw)
        for bounds in list_all(chain.size, chain.num_stages):
            counts = np.diff(bounds)
            peaks = find_peaks(chain.compiled, chain.list_memory(bounds))
            fits = all(
                p <= t.times.memory_bytes * (1 + 1e-12)
                for p, t in zip(peaks, chain.stages, strict=True)
            )
            holds = all(c >= n for c, n in zip(counts, chain.least, strict=True))
            assert is_allowed(chain, bounds) == (fits and holds)


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
