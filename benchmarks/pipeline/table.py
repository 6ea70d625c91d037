"""Rows, bounds and the text of a result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(times, base, strict=True)]


def show_seconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.4f}"


@dataclass(kw_only=True)
class Bound:
    """A figure that has a limit."""

    what: str
    value: float
    limit: float
    at_least: bool = False
    digits: int = 3

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def render(self) -> str:
        word = ("at least" if self.at_least else "at most") + f" {self.limit:.{self.digits}f}"
        verdict = "met" if self.is_met else "**missed**"
        return f"| {self.what} | {word} | {self.value:.{self.digits}f} | {verdict} |"


@dataclass(kw_only=True)
class Table:
    """Medians with their spread."""

    title: str
    columns: tuple[str, ...] = ()
    """More than what, median, smallest and largest: a figure of each row."""
    digits: int = 3
    rows: list[str] = field(default_factory=list)

    def add(self, name: str, values: Sequence[float], *more: str) -> float:
        """A row; returns its median."""
        middle, digits = statistics.median(values), self.digits
        shown = (f"{value:.{digits}f}" for value in (middle, min(values), max(values)))
        self.rows.append("| " + " | ".join([name, *shown, *more]) + " |")
        return middle

    def render(self) -> str:
        columns = [self.title, "median", "smallest", "largest", *self.columns]
        rule = "|" + "---|" * len(columns)
        return "\n".join(["| " + " | ".join(columns) + " |", rule, *self.rows])


@dataclass(kw_only=True)
class Part:
    """The result of one part of the benchmark."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)

    def render(self) -> str:
        pieces = [f"## {self.title}", *self.notes]
        if self.bounds:
            head = "| bound | limit | median | |\n|---|---|---|---|"
            pieces.append("\n".join([head, *(bound.render() for bound in self.bounds)]))
        pieces += [table.render() for table in self.tables]
        return "\n\n".join(pieces)
