"""Ranges of numbers as people read them."""

from hypothesis import given
from hypothesis import strategies as st

from varuna_core.records.formatting import join_numbers


def test_neighbours_are_joined() -> None:
    assert join_numbers((3, 0, 1, 2, 8)) == "0-3,8" and join_numbers(()) == ""
    assert join_numbers([7, 5, 5], between=", ") == "5, 7"


@given(numbers=st.sets(st.integers(0, 60)))
def test_ranges_name_each_number_once(numbers: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, join_numbers(numbers).split(",")):
        low, _, high = part.partition("-")
        named += range(int(low), int(high or low) + 1)
    assert named == sorted(numbers)
