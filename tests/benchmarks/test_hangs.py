"""The guard over a made-up kernel and clock: disturbed runs are left alone, hangs are found."""

import pytest

from benchmarks.hangs.simulated import HANGS, run


@pytest.mark.parametrize("seed", [1, 2])
def test_hours_of_disturbances_make_no_action(seed):
    found, _, events = run(seed)
    assert found is None and len(events) > 2


@pytest.mark.parametrize(("hang", "witness"), HANGS.items())
def test_a_hang_after_them_is_named_in_time(hang, witness):
    found, after_s, events = run(3, hang)
    assert (found.witness, found.rank) == (witness, events[-1].rank)
    assert after_s < (120 if witness not in ("silent", "spinning") else 200)
