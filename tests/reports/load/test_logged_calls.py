"""Calls of Megatron's timers: clocks with bounds, blocks that lack calls, odd layouts."""

from __future__ import annotations

import pandas as pd
import pytest

from vjob.reports.load.logged_calls import Block, Layout, compare_clocks

LAYOUT = Layout({"PIPELINE_MP_SIZE": "2", "GLOBAL_BATCH_SIZE": "2"}, 2)
HOSTS = {0: "a", 1: "b"}


def make_events(ahead_s: float, drift_s: float = 0.0, kinds: str = "FB") -> pd.DataFrame:
    """Two stages on two nodes; the second one's clock, which may drift after its first action."""
    rows = []
    for number in range(2):
        at = 10.0 * number
        for kind, stage, begin, end in (
            ("F", 0, at, at + 1), ("F", 1, at + 1.02, at + 2.02),
            ("B", 1, at + 2.02, at + 4), ("B", 0, at + 4.02, at + 6),
        ):  # fmt: skip
            shift = (ahead_s + drift_s * number) if stage else 0.0
            rows.append(
                {"rank": stage, "replica": 0, "stage": stage, "kind": kind, "step": 1, "what": "",
                 "microbatch": number, "begin_s": begin + shift, "ready_s": begin + shift,
                 "end_s": end + shift}
            )  # fmt: skip
    events = pd.DataFrame(rows)
    return events[events["kind"].isin(list(kinds))]


def test_clocks_that_calls_allow_to_agree_are_left_alone() -> None:
    for ahead_s in (0.0, 0.015, -0.015):
        found = compare_clocks(make_events(ahead_s), LAYOUT, HOSTS)
        assert isinstance(found, dict)
        assert {clock.ahead_s for clock in found.values()} == {0.0}
        assert found[1].within_s == pytest.approx(0.02 + abs(ahead_s))


def test_a_clock_that_calls_disprove_is_put_right_by_the_middle_of_its_bounds() -> None:
    found = compare_clocks(make_events(0.35), LAYOUT, HOSTS)
    assert isinstance(found, dict)
    assert found[1].ahead_s - found[0].ahead_s == pytest.approx(0.35)
    assert found[1].within_s == pytest.approx(0.02) and found[1].is_wrong


def test_a_clock_with_one_bound_alone_is_said_to_be_wrong_and_not_put_right() -> None:
    found = compare_clocks(make_events(-0.35, kinds="F"), LAYOUT, HOSTS)
    assert found == pytest.approx(0.33)


def test_clocks_that_jump_contradict_each_other() -> None:
    found = compare_clocks(make_events(0.0, drift_s=0.5), LAYOUT, HOSTS)
    assert found == pytest.approx(0.46)


def test_ranks_of_one_node_have_one_clock_and_those_of_unknown_nodes_their_own() -> None:
    events = make_events(0.35)
    same = compare_clocks(events, LAYOUT, {0: "a", 1: "a"})
    assert isinstance(same, dict) and {clock.within_s for clock in same.values()} == {None}
    apart = compare_clocks(events, LAYOUT, {})
    assert isinstance(apart, dict) and apart[1].is_wrong


def make_calls(counts: dict[tuple[int, str], int]) -> pd.DataFrame:
    rows = [
        {"rank": rank, "timer": timer, "begin": float(at), "end": at + 0.5, "num_steps": 2}
        for (rank, timer), count in counts.items()
        for at in range(count)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("torn", "is_whole", "has_numbers"),
    [
        ({}, True, True),
        ({(1, "backward-compute"): 3}, False, True),
        ({(1, "backward-compute"): 0}, False, True),
        ({(1, "forward-compute"): 0, (1, "backward-compute"): 0}, False, True),
        # Two pieces of each stage: twice the calls, whose pieces nothing tells apart.
        ({key: 8 for key in [(r, f"{w}ward-compute") for r in (0, 1) for w in ("for", "back")]},
         True, False),
    ],
)  # fmt: skip
def test_a_block_is_whole_if_all_ranks_have_all_calls(
    torn: dict[tuple[int, str], int], is_whole: bool, has_numbers: bool
) -> None:
    counts = {(rank, f"{way}ward-compute"): 4 for rank in (0, 1) for way in ("for", "back")}
    block = Block(make_calls({**counts, **torn}), 20, 2, LAYOUT)
    assert block.is_whole is is_whole and block.first == 19
    if is_whole:
        events = block.build_events()
        assert sorted(set(events["step"])) == [19, 20]
        assert bool((events["microbatch"] >= 0).all()) is has_numbers
