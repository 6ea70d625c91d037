"""No pattern takes long on any line: it is judged by its structure, without a clock."""

from __future__ import annotations

import pytest

from varuna_core.facts.catalogue.known_line import KnownLine, Scope
from varuna_core.facts.catalogue.patterns import MOST_CHARS, PatternError, check_pattern
from varuna_core.facts.catalogue.tables import BUILT_IN, match_rows

ROWS = [row for scope in Scope for row in BUILT_IN.rows(scope)]
HOSTILE = (
    "a" * MOST_CHARS,
    " " * MOST_CHARS,
    "1" * MOST_CHARS,
    "Error: " * 600,
    "srun: error: " * 320,
    "block: [1,1,1], thread: [ Assertion " * 115,
    "ibv_" * MOST_CHARS,
    "a." * MOST_CHARS,
    "Xid (" * 800,
    "python" * 700,
)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b",
        r"(\w*\s*)+x",
        r"(.*)*x",
        r"(x+x+)+y",
        r"(?:a|aa)+$",
        r"^(([a-z])+.)+[A-Z]([a-z])+$",
        r"((a{0,3}){0,40})*",
        r".*a.*b.*c",
        r".*.*=",
        r"\s*\s*x",
        r"a.{0,90}b.{0,90}c.{0,90}d",
        r"(\d+)\1",
        r"(?>a+)b",
        r"[",
    ],
)
def test_a_pattern_that_may_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [r"(\w+\.)*Error", r"\S+ on \S+ failed", r"(ab){2,30}c", r"(cp|tar): .*No space", r"(?i)a|b"],
)
def test_a_pattern_that_ends_soon_is_allowed(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.scope.value}-{row.name}")
def test_every_row_may_be_tried_on_any_line(row: KnownLine) -> None:
    check_pattern(row.pattern)
    for line in HOSTILE:
        match_rows([row], line)
