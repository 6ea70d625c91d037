"""Numbers and durations as people read them."""

from __future__ import annotations

import math

import pytest

from varuna_core.records.formatting import (
    format_duration,
    format_seconds,
    format_share,
    format_size,
    wrap_columns,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"), (0.0062, "less than 1 s"), (1.25, "1.2 s"), (9.5, "10 s"), (119.4, "119 s"),
        (120, "2 min"), (7170, "2 h"), (7500, "2 h 5 min"),
        (2 * 86400, "2 d"), (2 * 86400 + 3600, "2 d 1 h"),
        (math.inf, "ever"), (math.nan, "ever"),
    ],
)  # fmt: skip
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (85e-6, "85 µs"), (0.001, "1 ms"), (0.1342, "134.2 ms"), (1, "1 s"),
        (5.888, "5.888 s"), (119.9, "119.9 s"), (120, "2 min"), (-0.5, "-500 ms"),
    ],
)  # fmt: skip
def test_a_time_that_may_be_short_has_its_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.005, "0.5 %"), (0.0994, "9.9 %"), (0.0995, "10 %"), (0.42, "42 %")]
)
def test_a_share_is_per_cent_with_two_digits(share: float, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(812, "812 B"), (1024, "1 KiB"), 
     (36 * 1024, "36 KiB"), (1 << 20, "1.0 MiB"), (1 << 40, "1.0 TiB")],
)  # fmt: skip
def test_a_size_is_in_binary_units(size: int, text: str) -> None:
    assert format_size(size) == text


def test_the_last_cell_wraps_beside_the_others_or_below_them() -> None:
    rows = [("a", "bb", "one " * 15 + "end"), ("ccc", "d", "")]
    beside = wrap_columns(rows, 60)
    assert beside[0].startswith("a    bb  one one") and beside[1].startswith(" " * 9 + "one")
    assert beside[-1] == "ccc  d" and max(map(len, beside)) <= 60
    below = wrap_columns(rows, 30)
    assert below[0] == "a    bb" and below[1].startswith("    one one")
    assert below[-1] == "ccc  d" and max(map(len, below)) <= 30
    wide = wrap_columns([("head", "x" * 30, "y" * 40, "word")], 50)
    assert wide[0] == "head  " + "x" * 30 and wide[1] == "    " + "y" * 40
    assert wide[2] == "    word"
