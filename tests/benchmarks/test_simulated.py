"""No schedule of torch is shorter than ours, or as long with more backwards in one go."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ours_are_no_worse_than_torchs_on_the_same_costs(ranks: int) -> None:
    from benchmarks.pipeline.simulated import COSTS, TORCHS, compare

    sizes = [ranks * times for times in (1, 2, 4)]
    found = [one for costs in COSTS for m in sizes for one in compare(costs, ranks, m)]
    assert {one.torchs for one in found} == set(TORCHS)
    assert not [one for one in found if one.is_behind]
    # Where theirs fuses more, ours is the shorter: the other way about neither is better.
    assert all(one.is_shorter for one in found if one.fuses_fewer)


def test_torchs_lists_are_read_as_torch_runs_them() -> None:
    from benchmarks.pipeline.simulated import build_torchs
    from varuna_core.schedule.generators import build_one_f_one_b
    from varuna_core.schedule.verify import verify

    theirs = build_torchs("1F1B", 4, 6)
    assert theirs is not None
    assert theirs.ranks[0][:5] == build_one_f_one_b(4, 6).ranks[0][:5]
    assert verify(theirs).graphs == (4, 3, 2, 1)
    dual = build_torchs("DualPipeV", 2, 8)
    assert dual is not None
    backwards = [action.kind for actions in dual.ranks for action in actions]
    assert (backwards.count("B"), backwards.count("I")) == (27, 5)
    assert build_torchs("DualPipeV", 4, 4) is None
