"""A script's place in its data: the same samples in each step, whatever the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from varuna_core.data.place import DataPlace, permute

sizes = st.integers(1, 200)


@given(st.integers(1, 2000), st.integers(0, 2**64))
def test_each_number_below_the_size_comes_once(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@given(sizes, st.integers(1, 40), st.integers(0, 2**70), st.booleans(), st.data())
def test_ranks_of_any_world_share_the_same_batches_without_overlap(
    num_samples: int, batch: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, 50))
    alone = DataPlace(num_samples, batch, seed=seed, shuffle=shuffle, rank=0, world=1)
    world = data.draw(st.integers(1, batch))
    ranks = [
        DataPlace(num_samples, batch, seed=seed, shuffle=shuffle, rank=rank, world=world)
        for rank in range(world)
    ]
    shares = [place.list_samples(step) for place in ranks]
    whole = alone.list_samples(step)
    assert Counter(i for share in shares for i in share) == Counter(whole)
    assert [share[0] for share in shares] == whole[:world]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert sum(place.weight for place in ranks) == pytest.approx(world)
    assert [place.weight * batch / world for place in ranks] == pytest.approx(
        list(map(len, shares))
    )


@given(sizes, st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=8), st.data())
def test_a_run_that_changes_its_ranks_and_batches_takes_each_sample_once_an_epoch(
    num_samples: int, attempts: list[tuple[int, int]], data: st.DataObject
) -> None:
    state, taken, steps = None, list[int](), 0
    for batch, count in attempts:
        world = data.draw(st.integers(1, batch))
        ranks = [DataPlace(num_samples, batch, seed=3, rank=r, world=world) for r in range(world)]
        alone = DataPlace(num_samples, batch, seed=3, rank=0, world=1)
        for place in (alone, *ranks):
            if state is not None:
                place.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(count):
            samples = alone.list_samples()
            assert Counter(samples) == Counter(i for r in ranks for i in r.list_samples())
            taken += samples
            steps += 1
            for place in (alone, *ranks):
                place.advance()
        state = ranks[-1].state_dict()
        assert all(place.state_dict() == state for place in ranks)
        assert (state["step"], state["consumed"]) == (steps, len(taken))
    for first in range(0, len(taken), num_samples):
        epoch = taken[first : first + num_samples]
        assert len(set(epoch)) == len(epoch)


def test_epochs_have_other_orders_and_seeds_too() -> None:
    place = DataPlace(100, 100, seed=1, rank=0, world=1)
    other = DataPlace(100, 100, seed=2, rank=0, world=1)
    orders = [place.list_samples(0), place.list_samples(1), other.list_samples(0)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert DataPlace(5, 5, shuffle=False, rank=0, world=1).list_samples(7) == [0, 1, 2, 3, 4]


def test_it_iterates_ahead_of_what_is_done() -> None:
    place = DataPlace(50, 4, rank=1, world=2)
    place.advance()
    ahead = iter(place)
    assert [next(ahead) for _ in range(3)] == [place.list_samples(step) for step in (1, 2, 3)]
    assert (place.step, place.consumed, place.epoch) == (1, 4, 0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a batch of 2 has no sample for some of 3 ranks"):
        DataPlace(10, 2, rank=0, world=3)
    with pytest.raises(ValueError, match=r"rank 3 of 3"):
        DataPlace(10, 4, rank=3, world=3)
    with pytest.raises(ValueError, match=r"0 samples"):
        DataPlace(0, 4, rank=0, world=1)
    place = DataPlace(10, 2, seed=1, rank=0, world=1)
    with pytest.raises(ValueError, match=r"the checkpoint's seed is 1, but now it is 2"):
        DataPlace(10, 2, seed=2, rank=0, world=1).load_state_dict(place.state_dict())


def test_the_rank_is_that_of_the_layout_and_torch_is_not_imported() -> None:
    code = """
import sys
from varuna_core import DataPlace, leaving
place = DataPlace(10, 4)
assert "torch" not in sys.modules
print(place.rank, place.world)
"""
    names = ({}, {"RANK": "3", "WORLD_SIZE": "4"})
    layouts = [names[0], names[1], {**names[1], "VJOB_REPLICA": "1", "VJOB_DATA": "2"}]
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT), **env},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout.strip()
        for env in layouts
    ]  # fmt: skip
    assert said == ["0 1", "3 4", "1 2"]
