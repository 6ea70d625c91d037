"""Regular expressions: what they are held against may be a line of a megabyte."""

from __future__ import annotations

import re

from tests.patterns import Found, collect, find_slow
from varuna_core.records.logs import learner, progress

SIZE, LIMIT_S = 16_000, 0.005
"""A quadratic pattern takes ten times as long for so many characters."""


def test_a_long_line_of_a_log_takes_linear_time() -> None:
    """A thousand digits before `it/s` took a quarter of a second, cubic in their number."""
    values = (*vars(progress).values(), *vars(learner).values())
    found = [one for one in values if isinstance(one, re.Pattern)]
    assert len(found) > 20
    given = {Found(one.pattern, one.flags & ~int(re.UNICODE)): {"search"} for one in found}
    assert find_slow(given, SIZE, LIMIT_S) == {}


def test_every_pattern_takes_linear_time() -> None:
    """`Model:` and spaces, lines of `ip`, a `[` in a pattern of ours: all were quadratic."""
    found = collect()
    assert len(found) > 200
    assert find_slow(found, SIZE, LIMIT_S) == {}


def test_a_quadratic_pattern_is_found() -> None:
    assert set(find_slow({Found("a+b", 0): {"search"}}, SIZE, LIMIT_S)) == {"a+b"}
    assert not find_slow({Found("a+b", 0): {"match"}}, SIZE, LIMIT_S)
