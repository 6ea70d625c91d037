"""Partitions: read once from text, counted in two ways, refused with what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.facts.partition import Partition, PartitionError

COUNTS = st.lists(st.integers(0, 999_999), min_size=1, max_size=12)


@given(COUNTS)
def test_a_partition_is_read_back_from_its_text(counts: list[int]) -> None:
    partition = Partition(counts)
    assert Partition.parse(partition.spell()) == partition == Partition.take(counts)
    assert Partition.find(f" {partition} \n") == partition == Partition.take(partition)
    assert hash(Partition.parse(str(partition))) == hash(partition)
    assert partition.num_stages == len(counts)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_each_way_of_counting_gives_the_same_ranges(counts: list[int]) -> None:
    """All segments are in them once, in order."""
    layers = sum(counts)
    blocks = Partition(counts)
    whole = blocks.with_ends(layers + 2)
    assert whole.without_ends(layers + 2) == blocks == whole.blocks(layers)
    assert whole.with_ends(layers + 2) == whole and blocks.without_ends(layers + 2) == blocks
    assert blocks.find_problem(layers + 2) is None is whole.find_problem(layers + 2)
    stages = blocks.ranges(layers + 1, len(counts))
    assert stages == whole.ranges(layers + 1, len(counts))
    assert [len(stage) for stage in stages] == list(whole.counts)
    assert [segment for stage in stages for segment in stage] == list(range(layers + 2))


def test_blocks_between_cuts_are_counted_and_the_ends_added() -> None:
    stages = Partition.parse("0-11-8-8-8-8-5-0").ranges(num_cuts=49, num_stages=8)
    assert [len(stage) for stage in stages] == [1, 11, 8, 8, 8, 8, 5, 1]
    assert stages[0] == range(0, 1) and stages[-1] == range(49, 50)
    assert Partition.parse("0-2-1").blocks(None) == Partition.parse("0-2-1")
    assert Partition.take("1 - 0 - 2").ranges(4, 3) == Partition([2, 0, 3]).ranges(4, 3)


def test_one_stage_holds_everything() -> None:
    assert Partition.parse("1").ranges(num_cuts=0, num_stages=1) == [range(0, 1)]
    assert Partition.parse("0").ranges(num_cuts=1, num_stages=1) == [range(0, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1-1-1", "3 numbers for 2 stages"),
        ("5-5", "sums to 10; the model passes 4 CutPoints, so it must sum to 3 .* or 5"),
        ("0-5", "at least 1"),
    ],
)
def test_a_partition_of_another_model_is_refused_with_what_is_allowed(
    text: str, words: str
) -> None:
    with pytest.raises(PartitionError, match=words):
        Partition.parse(text).ranges(num_cuts=4, num_stages=2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("0-2-1", None), ("1-2-2", None), ("2-0-3", None), ("0-2-3", "ends"), ("1-2-1", "sum")],
)
def test_a_problem_says_what_does_not_fit(text: str, problem: str | None) -> None:
    assert Partition.parse(text).find_problem(5) == problem


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", ""),
        ("auto", ""),
        ("1-", "; number 2 is ''"),
        ("1--2", "; number 2 is ''"),
        ("1-x-3", "; number 2 is 'x'"),
        (" 1-2", "; number 1 is ' 1'"),
        ("1-\u00b2", "; number 2 is '\u00b2'"),
        ("1-1234567", "; number 2 is '1234567'"),
    ],
)
def test_an_error_names_the_number_that_is_none(text: str, where: str) -> None:
    with pytest.raises(PartitionError) as raised:
        Partition.parse(text)
    said = f"partition {text!r}: expected numbers joined by '-', such as 0-11-8-5-0{where}"
    assert str(raised.value) == said
    assert Partition.find(text.strip()) is None or text == " 1-2"


@pytest.mark.parametrize("counts", [[], [1, -1]])
def test_numbers_that_are_no_partition_are_refused(counts: list[int]) -> None:
    with pytest.raises(PartitionError, match="expected numbers of 0 or more"):
        Partition.take(counts)
