"""Tables of the live views: columns whose cells are text and a tone, and the order of rows. Pure.

Views render them: a screen with bars and colours, a page as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from vjob.jobs.monitor.model.snapshot import Health

REST = 0
"""Width of a column that takes the remaining space."""
Key = float | str | None
Row = TypeVar("Row")


class Tone(Enum):
    """Styles of a cell, none of which carries information beyond the text."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Cell:
    """A cell of a row, as text."""

    text: str = ""
    tone: Tone | Health = Tone.PLAIN
    percent: float | None = None
    """Percentage that a view may draw as a bar before the text."""


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """A column, whose width has room for the arrow of a sorted one."""

    title: str
    width: int
    place: int
    """Columns with the greatest place are dropped first if they do not fit."""
    show: Callable[[Row], Cell]
    key: Callable[[Row], Key]
    """Function from a row to its sort key; None sorts last in both directions."""
    is_number: bool = False
    is_fixed: bool = False
    """True if the width is fixed whatever the content, as for numbers."""
    first_down: bool = False
    """True if sorting by this column begins with the greatest."""

    def is_used(self, rows: Sequence[Row]) -> bool:
        """Return True if the column is shown: the first always, others if they have a value."""
        return self.place == 0 or not rows or any(self.key(row) is not None for row in rows)


class Order(Generic[Row]):
    """Order of rows, cached between refreshes so that unchanged rows are not compared again."""

    def __init__(self) -> None:
        self._way: tuple[str, bool] = ("", False)
        self._keys: list[Key] = []
        self._places: list[int] = []

    def sort(
        self, columns: Sequence[Column[Row]], rows: Sequence[Row], title: str, is_down: bool
    ) -> list[Row]:
        """Sort by a column; rows without a value come last, and equal ones keep their order."""
        column = next(column for column in columns if column.title == title)
        keys = [column.key(row) for row in rows]
        if keys != self._keys or self._way != (title, is_down):
            self._keys, self._way = keys, (title, is_down)
            known: Any = {at: key for at, key in enumerate(keys) if key is not None}
            unknown = [at for at, key in enumerate(keys) if key is None]
            self._places = [*sorted(known, key=known.__getitem__, reverse=is_down), *unknown]
        return [rows[at] for at in self._places]
