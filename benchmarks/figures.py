"""Figures with a bound, read from the tables that benchmarks print.

A table's bounds are in the column whose heading begins with "bound" or "limit"; "at least" in front
of a number makes it a lower one. The figure is the column "median", else the one before the bound,
else the one after it. The columns of a figure's spread are found by their headings too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOWEST = ("smallest", "least", "first decile")
HIGHEST = ("largest", "most", "last decile")
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number beside its bound."""

    what: str
    value: float
    bound: float
    at_least: bool = False
    spread: tuple[float, float] | None = None

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def shown_bound(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.bound:g}"

    @property
    def shown_spread(self) -> str:
        return "" if self.spread is None else f"{self.spread[0]:g} to {self.spread[1]:g}"

    def reach(self, value: float) -> float:
        """How far a value goes to its bound: up to 1 is within it."""
        above, below = (self.bound, value) if self.at_least else (value, self.bound)
        return above / below if below > 0 else float("inf")


def read_number(text: str) -> float | None:
    found = NUMBER.search(text.replace("`", ""))
    return float(found[0].replace(",", "")) if found else None


def find_figures(text: str) -> Iterator[Figure]:
    """In a text of benchmarks, in their order."""
    for head, rows in read_tables(text):
        for limit in [at for at, name in enumerate(head) if is_limit(at, name)]:
            if (place := find_value(head, limit)) is not None:
                for row in rows:
                    if (figure := read_figure(head, row, limit, place)) is not None:
                        yield figure


def is_limit(at: int, heading: str) -> bool:
    return at > 0 and heading.startswith(("bound", "limit"))


def find_value(head: Sequence[str], limit: int) -> int | None:
    if "median" in head:
        return head.index("median")
    if limit > 1:
        return limit - 1
    return limit + 1 if limit + 1 < len(head) else None


def read_figure(head: Sequence[str], row: Sequence[str], limit: int, place: int) -> Figure | None:
    value, bound = read_number(row[place]), read_number(row[limit])
    if value is None or bound is None:
        return None
    ends = [
        read_number(row[at])
        for words in (LOWEST, HIGHEST)
        for at, name in enumerate(head)
        if name in words
    ]
    spread = (ends[0], ends[1]) if len(ends) == 2 and None not in ends else None
    names = [cell for cell in row[: min(limit, place)] if not NUMBER.fullmatch(cell)]
    return Figure(
        what=", ".join(name for name in names if name) or row[0],
        value=value,
        bound=bound,
        at_least="at least" in row[limit],
        spread=spread,  # type: ignore[arg-type]  # neither is None
    )


def read_tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Headings and rows of each Markdown table."""
    lines = [*text.splitlines(), ""]
    at = 0
    while at < len(lines):
        if not (lines[at].startswith("|") and set(lines[at + 1]) <= set("|-: ") and lines[at + 1]):
            at += 1
            continue
        head, rows = split_row(lines[at]), []
        at += 2
        while lines[at].startswith("|"):
            row = split_row(lines[at])
            rows.append([*row, *[""] * (len(head) - len(row))])
            at += 1
        yield head, rows


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
