"""The balanced cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.rank_map import balance


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
