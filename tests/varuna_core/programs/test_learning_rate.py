"""The learning rate warms up, decays and stays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.programs.building import LearningRate

rates = st.builds(
    lambda kind, lr, share, warmup, more: LearningRate(
        kind=kind, lr=lr, min_lr=lr * share, warmup_steps=warmup, decay_steps=warmup + more
    ),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(1e-6, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 50),
    st.integers(0, 200),
)


@given(rates)
def test_it_rises_to_the_peak_then_falls_to_its_end_and_stays(rate: LearningRate) -> None:
    found = [rate.at(taken) for taken in range(rate.decay_steps + 5)]
    warm, rest = found[: rate.warmup_steps], found[rate.warmup_steps :]
    assert warm == sorted(warm) and all(value > 0 for value in warm)
    if warm:
        assert warm[-1] == pytest.approx(rate.lr)
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(rest))
    last = rate.lr if rate.kind == "constant" else rate.min_lr
    assert rest[-5:] == pytest.approx([last] * 5)


@pytest.mark.parametrize(("kind", "half"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_half_way_it_is_half_way(kind: str, half: float) -> None:
    values: dict[str, Any] = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay_steps": 110}
    assert LearningRate(kind=kind, **values).at(59) == pytest.approx(half)


def test_the_seeds_recipe_warms_up_as_its_log_says() -> None:
    """lr 1.5e-4, 3200 of 320000 steps of warm-up: 7.031E-07 after fifteen good steps."""
    rate = LearningRate(
        kind="cosine", lr=1.5e-4, min_lr=1e-5, warmup_steps=3200, decay_steps=320000
    )
    assert f"{rate.at(14):.3E}" == "7.031E-07"
