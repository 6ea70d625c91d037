"""Check that a pattern of the catalogue takes bounded time on any line.

Python's `re` backtracks and cannot be interrupted, and a log may contain any line. So the structure
of each pattern is checked when the pattern is loaded:

    (a+)+b        refused: a repeat in a repeat, and nothing that tells one turn from the next
    (\\w+\\.)*b     allowed: each turn ends with a dot, which \\w does not match
    .*a.*b.*c     refused: on a long line each .* may end almost anywhere, in all combinations
    \\S+ on \\S+ c  allowed: \\S cannot match the space after it, so it ends in one place

`check_pattern` counts the combinations on a line of `MOST_CHARS` characters, starts included.
"""

from __future__ import annotations

import re
from typing import Any, FrozenSet, Iterable, List, Sequence, Tuple

try:
    from re import _parser as _parse  # type: ignore[attr-defined]  # from 3.11
except ImportError:
    import sre_parse as _parse

MOST_CHARS = 4096
"""Lines are truncated to this many characters before patterns are applied."""
MOST_STEPS = 4 * MOST_CHARS**2
"""Most combinations that a pattern may have: a second or two on a slow machine for a hostile
line."""
_LATIN = 256
_OTHERS = (0x660, 0x3B1, 0x2003, 0x2022)
"""A digit, a letter, a space and a sign: they stand for all characters beyond Latin-1."""
_ALL = frozenset((*range(_LATIN), *_OTHERS))
_NONE: FrozenSet[int] = frozenset()
_EXACT = frozenset(range(_LATIN))
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}

Item = Tuple[Any, Any]


class PatternError(ValueError):
    """Raised for a pattern that could take too long on a hostile line; the message says why."""


def check_pattern(pattern: str) -> None:
    """Raise PatternError if the pattern is invalid or may take too long on some line."""
    if count_steps(pattern) > MOST_STEPS:
        raise PatternError(
            f"{pattern!r} may take long on a long line: use fewer unbounded repeats, such as .*, "
            "or bound them, as in .{0,80}"
        )


def count_steps(pattern: str) -> int:
    """Return the most steps that the pattern may take on a line of MOST_CHARS characters. Raise
    PatternError if it is invalid, or if its steps double with each character."""
    try:
        items = list(_parse.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern!r} is not a regular expression: {error}") from None
    return sum(_steps_on_line(branch) for branch in _list_branches(items))


def _list_branches(items: List[Item]) -> List[List[Item]]:
    """Return the alternatives of a whole pattern; some may be anchored, and others not."""
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [list(branch) for branch in items[0][1][1]]
    return [items]


def _steps_on_line(items: Sequence[Item]) -> int:
    starts = 1 if _is_anchored(items) else MOST_CHARS // max(1, _literal_start(items))
    return starts * _cost(items, _NONE)[1]


def _cost(items: Sequence[Item], after: FrozenSet[int]) -> Tuple[int, int]:
    """Return the number of ways in which these items may match at one position, and the number of
    steps to try all of them.

    `after` is the set of characters that may follow the items.
    """
    ways, steps = 1, 1
    for at, (operation, value) in enumerate(items):
        follow, can_end = _first(items[at + 1 :])
        follow = follow | after if can_end else follow
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = value
            more, taken = _cost_of_repeat(int(least), int(most), list(body), follow)
        elif name == "SUBPATTERN":
            more, taken = _cost(list(value[-1]), follow)
        elif name == "BRANCH":
            costs = [_cost(list(branch), follow) for branch in value[1]]
            more, taken = max(cost[0] for cost in costs), max(cost[1] for cost in costs)
        elif name in ("ASSERT", "ASSERT_NOT"):
            more, taken = 1, _cost(list(value[1]), _NONE)[1]
        elif name in ("LITERAL", "NOT_LITERAL", "IN", "ANY", "AT", "CATEGORY"):
            continue
        else:
            raise PatternError(f"{name.lower()} is not allowed in a pattern")
        steps += ways * taken
        ways *= more
    return ways, steps


def _cost_of_repeat(
    least: int, most: int, body: List[Item], follow: FrozenSet[int]
) -> Tuple[int, int]:
    if most <= 1:
        ways, steps = _cost(body, follow)
        overlaps = least != most and bool(_first(body)[0] & follow)
        return ways * (2 if overlaps else 1), steps
    if not _is_plain(body) and not _is_delimited(body):
        raise PatternError(
            "a repeat contains a repeat or alternatives, without a character that ends each "
            "repetition"
        )
    length = min(most, MOST_CHARS)
    is_open = least != most and bool(_chars(body) & follow)
    return (length if is_open else 1), length


def _is_plain(body: Sequence[Item]) -> bool:
    return all(str(operation) in ("LITERAL", "IN", "ANY", "NOT_LITERAL") for operation, _ in body)


def _is_delimited(body: Sequence[Item]) -> bool:
    """True if the first or last character of each repetition occurs nowhere else in it."""
    if len(body) == 1 and str(body[0][0]) == "SUBPATTERN":
        return _is_delimited(list(body[0][1][-1]))
    for ends, rest in ((body[-1:], body[:-1]), (body[:1], body[1:])):
        if ends and str(ends[0][0]) in ("LITERAL", "IN") and not _chars(ends) & _chars(rest):
            return True
    return False


def _literal_start(items: Sequence[Item]) -> int:
    """Return the number of literal characters with which the pattern begins: the more there are,
    the fewer positions have to be tried."""
    number = 0
    for operation, value in items:
        name = str(operation)
        if name == "SUBPATTERN" and number == 0:
            return _literal_start(list(value[-1]))
        if name == "BRANCH" and number == 0:
            return min(_literal_start(list(branch)) for branch in value[1])
        if name == "LITERAL":
            number += 1
        elif name != "AT":
            break
    return number


def _is_anchored(items: Sequence[Item]) -> bool:
    """True if the pattern can match only at the beginning of a text."""
    for operation, value in items[:1]:
        name = str(operation)
        if name == "AT":
            return str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING")
        if name == "SUBPATTERN":
            return _is_anchored(list(value[-1]))
        if name == "BRANCH":
            return all(_is_anchored(list(branch)) for branch in value[1])
    return False


def _first(items: Sequence[Item]) -> Tuple[FrozenSet[int], bool]:
    """Return the characters that may begin these items, and True if they may match nothing."""
    found = _NONE
    for operation, value in items:
        name = str(operation)
        if name in ("AT", "ASSERT", "ASSERT_NOT"):
            continue
        if name == "SUBPATTERN":
            begins, is_empty = _first(list(value[-1]))
        elif name == "BRANCH":
            branches = [_first(list(branch)) for branch in value[1]]
            begins = frozenset().union(*(begin for begin, _ in branches))
            is_empty = any(empty for _, empty in branches)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            begins, is_empty = _first(list(value[2]))
            is_empty = is_empty or int(value[0]) == 0
        else:
            begins, is_empty = _set_of(name, value), False
        found = found | begins
        if not is_empty:
            return found, False
    return found, True


def _chars(items: Iterable[Item]) -> FrozenSet[int]:
    """Return all characters that these items may match."""
    found = _NONE
    for operation, value in items:
        name = str(operation)
        if name in ("AT", "ASSERT", "ASSERT_NOT"):
            continue
        if name == "SUBPATTERN":
            found |= _chars(value[-1])
        elif name == "BRANCH":
            found |= frozenset().union(*(_chars(branch) for branch in value[1]))
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            found |= _chars(value[2])
        else:
            found |= _set_of(name, value)
    return found


def _set_of(name: str, value: Any) -> FrozenSet[int]:
    """Return the characters of one item in both cases, as flags may make a pattern ignore case."""
    if name == "LITERAL":
        return _both_cases(value)
    if name == "NOT_LITERAL":
        return _ALL - {value}
    if name == "ANY":
        return _ALL
    if name == "CATEGORY":
        category = re.compile(_CATEGORIES[str(value)])
        return frozenset(c for c in _ALL if category.match(chr(c)))
    if name == "IN":
        parts = [_part_of_set(str(operation), part) for operation, part in value]
        found: FrozenSet[int] = frozenset().union(*parts)
        return _ALL - (found & _EXACT) if str(value[0][0]) == "NEGATE" else found
    return _ALL


def _part_of_set(name: str, value: Any) -> FrozenSet[int]:
    if name == "NEGATE":
        return _NONE
    if name == "RANGE":
        low, high = value
        found = frozenset().union(*(_both_cases(c) for c in range(low, min(high, _LATIN) + 1)))
        return found | frozenset(_OTHERS) if high >= _LATIN else found
    return _set_of(name, value)


def _both_cases(code: int) -> FrozenSet[int]:
    if code >= _LATIN:
        return frozenset(_OTHERS)
    cases = {ord(c) for c in {chr(code).lower(), chr(code).upper()} if len(c) == 1}
    return frozenset(c for c in cases | {code} if c < _LATIN)
