"""Costs as they are measured: what has run counts, the rest follows it, noise moves nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.schedule.actions import Kind
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.measured import MEASURED, WORK, KnownCosts

NOTHING: dict[Kind, list[float]] = {kind: [0.0] for kind in MEASURED}
SECONDS = st.floats(1e-4, 1e2)


def measure_plain(*forward: float, backward: float = 2.0) -> dict[Kind, list[float]]:
    """What 1f1b runs."""
    none = [0.0] * len(forward)
    figures: dict[Kind, list[float]] = {kind: none for kind in MEASURED}
    return figures | {"F": list(forward), "B": [backward * one for one in forward]}


def test_the_drawing() -> None:
    known = KnownCosts(Costs(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,)))
    assert known.measure(measure_plain(3.0, backward=3.0), []) == Costs(
        forward=(3.0,), input_grad=(4.0,), weight_grad=(4.0,), backward=(9.0,), recompute=(4.0,)
    )


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5), st.data())
def test_what_ran_is_as_measured_and_the_rest_keeps_its_share(figures, data) -> None:  # type: ignore[no-untyped-def]
    stages = len(figures)
    known = KnownCosts(build_even_costs(stages))
    ran: set[Kind] = data.draw(st.sets(st.sampled_from(WORK), min_size=1))
    none = [0.0] * stages
    given: dict[Kind, list[float]] = {kind: none for kind in MEASURED}
    given |= {kind: [pair[kind in "BR"] for pair in figures] for kind in ran}
    before = known.costs
    after = known.measure(given, [None] * (stages - 1))
    assert after is not None
    for stage in range(stages):
        was = sum(before.by_kind[kind][stage] for kind in ran)
        factor = sum(given[kind][stage] for kind in ran) / was
        for kind in WORK:
            expected = given[kind][stage] if kind in ran else before.by_kind[kind][stage] * factor
            assert after.by_kind[kind][stage] == pytest.approx(expected)


def test_what_was_measured_before_keeps_its_share_when_it_runs_no_longer() -> None:
    known = KnownCosts(build_even_costs(1))
    known.measure(NOTHING | {"F": [1.0], "I": [2.0], "W": [1.0]}, [])
    slower = known.measure(NOTHING | {"F": [2.0], "B": [4.0]}, [])
    # The backward was believed 2 x 4 / 3, so the stage takes 6 / (11 / 3) times as long.
    assert slower is not None
    assert slower.input_grad == pytest.approx((2 * 18 / 11,))
    assert slower.weight_grad == pytest.approx((18 / 11,))


def test_copies_are_as_measured_and_move_nothing_else() -> None:
    known = KnownCosts(build_even_costs(1))
    first = known.measure(NOTHING | {"F": [1.0], "B": [2.0], "O": [0.5], "L": [0.25]}, [])
    assert first == known.measure(NOTHING | {"F": [1.0], "B": [2.0]}, [])
    assert first is not None and (first.offload, first.load) == ((0.5,), (0.25,))
    assert first.input_grad == (1.0,) and first.recompute == (1.0,)


def test_a_hop_that_is_not_measured_goes_with_the_rest() -> None:
    known = KnownCosts(build_even_costs(3, hop=0.5))
    costs = known.measure(measure_plain(2.0, 2.0, 2.0), [None, 7.0])
    assert costs is not None and costs.hops == (1.0, 7.0)


def test_a_stage_of_which_nothing_is_known_decides_nothing() -> None:
    known = KnownCosts(build_even_costs(2))
    assert known.measure(measure_plain(1.0, 0.0), [0.1]) is None
    assert known.costs == KnownCosts(build_even_costs(2)).costs


@given(st.lists(st.floats(-0.04, 0.04), min_size=4, max_size=30))
def test_noise_moves_nothing_and_a_drift_does(noise: list[float]) -> None:
    known = KnownCosts(build_even_costs(2))
    known.measure(measure_plain(1.0, 1.0), [0.0])
    assert known.has_moved(), "the first ones always have"
    for one in noise:
        known.measure(measure_plain(1.0 + one, 1.0 - one), [0.01])
        assert not known.has_moved()
    drifted = []
    for step in range(1, 31):
        known.measure(measure_plain(1.0 + 0.01 * step, 1.0), [0.01])
        drifted.append(known.has_moved())
    assert 1 <= sum(drifted) <= 6
    known.measure(measure_plain(1.3, 1.0), [1.0])
    assert known.has_moved(), "a slow link"


def test_what_was_of_no_use_has_to_move_further() -> None:
    known = KnownCosts(build_even_costs(1))
    moved = []
    for factor in (1.0, 1.2, 1.3, 1.6, 1.9, 2.5):
        known.measure(measure_plain(factor), [])
        moved.append(known.has_moved())
        if moved[-1]:
            known.note_use(factor == 1.9)
    assert moved == [True, False, True, False, True, True]
