"""The loss scale as a state machine, and the arguments that make one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.runtime.optim.updates import GROWTH_STEPS, build_loss_scale

RUNS = st.lists(st.integers(0, 2 * GROWTH_STEPS + 5), max_size=12)
"""Lengths of runs of good steps, an overflow between each two."""


@given(RUNS, st.integers(0, 24), st.integers(0, 12))
def test_the_scale_follows_from_the_good_runs(runs: list[int], start: int, below: int) -> None:
    least = 2.0 ** (start - below)
    ours = build_loss_scale("dynamic", 2.0**start, least)
    exponent = start
    for number, run in enumerate(runs):
        for _ in range(run):
            ours.update(False)
        exponent += run // GROWTH_STEPS
        assert ours.scale == 2.0**exponent
        assert ours.good_steps == run % GROWTH_STEPS
        if number < len(runs) - 1:
            ours.update(True)
            exponent = max(exponent - 1, start - below)
            assert ours.scale == 2.0**exponent >= least
            assert ours.good_steps == 0


@given(st.lists(st.booleans()), st.floats(1e-6, 1e6))
def test_a_static_scale_stays(verdicts: list[bool], scale: float) -> None:
    ours = build_loss_scale(scale, 2.0**20, 1.0)
    for overflow in verdicts:
        ours.update(overflow)
    assert ours.scale == scale


def test_the_least_may_lie_between_two_halvings() -> None:
    ours = build_loss_scale("dynamic", 16.0, 3.0)
    seen = []
    for _ in range(4):
        ours.update(True)
        seen.append(ours.scale)
    assert seen == [8.0, 4.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("static", 2.0, 1.0), "loss_scale 'static': expected 'dynamic' or a number"),
        ((0, 2.0, 1.0), "loss_scale 0: want a number above 0"),
        ((float("inf"), 2.0, 1.0), "loss_scale inf"),
        (("dynamic", -1, 1.0), "init_loss_scale -1"),
        (("dynamic", 2.0, float("nan")), "min_loss_scale nan"),
        (("dynamic", 2.0, 4.0), r"min_loss_scale 4.0 is above init_loss_scale 2.0"),
    ],
)
def test_what_is_no_scale_is_refused(arguments: tuple[float, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_loss_scale(*arguments)
