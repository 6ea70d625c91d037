"""The two ways of counting in a partition text, and what fits neither."""

import pytest

from varuna_core.records.layout import (
    PartitionError,
    exclude_ends,
    find_problem,
    include_ends,
    parse_counts,
)


def test_both_ways_of_counting_become_either() -> None:
    blocks, segments = parse_counts("0-2-1"), parse_counts("1-2-2")
    assert (blocks, segments) == ((0, 2, 1), (1, 2, 2))
    assert include_ends(blocks, 5) == include_ends(segments, 5) == segments
    assert exclude_ends(blocks, 5) == exclude_ends(segments, 5) == blocks


@pytest.mark.parametrize(
    ("text", "problem"),
    [("0-2-1", None), ("1-2-2", None), ("2-0-3", None), ("0-2-3", "ends"), ("1-2-1", "sum")],
)
def test_a_problem_says_what_does_not_fit(text: str, problem: str | None) -> None:
    assert find_problem(parse_counts(text), 5) == problem


@pytest.mark.parametrize("text", ["", "auto", "1-", "1--2", "1-x", " 1-2", "1-²", "1234567"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PartitionError, match="want numbers joined"):
        parse_counts(text)
