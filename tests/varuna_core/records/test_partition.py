"""Partition texts and the balanced cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.layout import balance, parse_partition


def sizes(stages: list[range]) -> list[int]:
    return [len(stage) for stage in stages]


def test_blocks_between_cuts_are_counted_and_the_ends_added() -> None:
    stages = parse_partition("0-11-8-8-8-8-5-0", num_cuts=49, num_stages=8)
    assert sizes(stages) == [1, 11, 8, 8, 8, 8, 5, 1]
    assert stages[0] == range(0, 1) and stages[-1] == range(49, 50)


def test_a_sum_of_all_segments_counts_each() -> None:
    assert sizes(parse_partition("2-0-3", num_cuts=4, num_stages=3)) == [2, 0, 3]
    assert parse_partition("1-0-2", 4, 3) == parse_partition([2, 0, 3], 4, 3)


def test_one_stage_holds_everything() -> None:
    assert parse_partition("1", num_cuts=0, num_stages=1) == [range(0, 1)]
    assert parse_partition("0", num_cuts=1, num_stages=1) == [range(0, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4-x", "want numbers"),
        ("", "want numbers"),
        ("1-1-1", "3 numbers for 2 stages"),
        ("5-5", "sums to 10; the model passes 4 CutPoints, so it must sum to 3 .* or 5"),
        ("0-5", "at least 1"),
    ],
)
def test_a_wrong_partition_is_refused_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_partition(text, num_cuts=4, num_stages=2)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=8).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
def test_the_balanced_cut_is_as_good_as_the_best_of_all(case: tuple[list[int], int]) -> None:
    costs, num_stages = case
    stages = balance(costs, num_stages)
    assert [i for stage in stages for i in stage] == list(range(len(costs)))
    assert len(stages) == num_stages and all(stages)

    def worst(inner: tuple[int, ...]) -> int:
        ends = [0, *inner, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(ends))

    best = min(worst(inner) for inner in combinations(range(1, len(costs)), num_stages - 1))
    assert max(sum(costs[i] for i in stage) for stage in stages) == best


def test_more_stages_than_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="need at least 3 CutPoints, the model passes 1"):
        balance([1, 1], 4)
