"""What a model returns for micro-batches is made one, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.runtime.engine.microbatch import join_outputs
from varuna_core.runtime.split.cut import SplitError


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 9))
def test_samples_are_joined_where_the_inputs_have_theirs(
    sizes: list[int], dim: int, seed: int
) -> None:
    """Also where another dimension happens to be as long."""
    draw = torch.Generator().manual_seed(seed)
    shape = torch.randint(1, 4, (3,), generator=draw).tolist()
    shape[dim] = sum(sizes)
    whole = torch.randn(shape, generator=draw)
    assert torch.equal(join_outputs(whole.split(sizes, dim), sizes, [dim]), whole)


def test_structures_losses_and_the_rest() -> None:
    def make(size: int, loss: float, extra: Any) -> Any:
        rows = torch.full((size, 3), loss)
        return {"loss": torch.tensor(loss), "pair": (rows, None), "note": "a", "extra": extra}

    joined = join_outputs([make(2, 1.0, 1), make(1, 4.0, 2)], [2, 1], [0])
    assert joined["loss"] == 2.0 and joined["loss"].dtype == torch.float32
    assert joined["pair"][0].tolist() == [[1.0] * 3, [1.0] * 3, [4.0] * 3]
    assert joined["pair"][1] is None and joined["note"] == "a" and joined["extra"] == [1, 2]


def test_tensors_without_samples_are_stacked_or_listed() -> None:
    counts = join_outputs([torch.tensor(3), torch.tensor(5)], [2, 2], [0])
    assert counts.tolist() == [3, 5]
    assert join_outputs([torch.ones(7), torch.zeros(7)], [2, 1], [0]).shape == (2, 7)
    ragged = join_outputs([torch.ones(2, 7), torch.zeros(2, 6)], [2, 2], [0])
    assert [tuple(one.shape) for one in ragged] == [(2, 7), (2, 6)]


def test_another_dimension_is_found_where_the_inputs_do_not_tell() -> None:
    parts = [torch.ones(5, 2), torch.zeros(5, 1)]
    assert join_outputs(parts, [2, 1], [0]).shape == (5, 3)


def test_nothing_comes_of_nothing_and_other_structures_are_refused() -> None:
    assert join_outputs([], [], [0]) is None
    with pytest.raises(SplitError, match="other structures"):
        join_outputs([(torch.ones(1),), torch.ones(1)], [1, 1], [0])
