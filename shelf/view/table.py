"""Tables of the live views: columns whose cells are text and a tone, and the order of rows. Pure.

A view lays them out: a screen with bars and colours, a page as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from vjob.jobs.monitor.model.snapshot import Health

REST = 0
"""Width of a column that takes what the others leave."""
Key = float | str | None
Row = TypeVar("Row")


class Tone(Enum):
    """Ways to show a cell; none says anything that its text does not say."""

    PLAIN = "plain"
    DIM = "dim"
    STRONG = "strong"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True)
class Cell:
    """One value of a row, as text."""

    text: str = ""
    tone: Tone | Health = Tone.PLAIN
    percent: float | None = None
    """Share that a view may draw as a bar before the text."""


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """One column. Its width leaves room for the arrow of a sorted one."""

    title: str
    width: int
    place: int
    """Columns of the greatest place are left out first where they do not fit."""
    show: Callable[[Row], Cell]
    key: Callable[[Row], Key]
    """None sorts last, in either direction."""
    is_number: bool = False
    is_fixed: bool = False
    """As wide as it is set, whatever stands in it; so are numbers."""
    first_down: bool = False
    """The greatest comes first when it is chosen."""

    def is_used(self, rows: Sequence[Row]) -> bool:
        """True where it is to be shown: the first always, others where they have a value."""
        return self.place == 0 or not rows or any(self.key(row) is not None for row in rows)


class Order(Generic[Row]):
    """The order of rows; at most looks no row moves, and none is compared."""

    def __init__(self) -> None:
        self._way: tuple[str, bool] = ("", False)
        self._keys: list[Key] = []
        self._places: list[int] = []

    def sort(
        self, columns: Sequence[Column[Row]], rows: Sequence[Row], title: str, is_down: bool
    ) -> list[Row]:
        """Sort by a column; rows of which nothing is known last, equal ones as they come."""
        column = next(column for column in columns if column.title == title)
        keys = [column.key(row) for row in rows]
        if keys != self._keys or self._way != (title, is_down):
            self._keys, self._way = keys, (title, is_down)
            known: Any = {at: key for at, key in enumerate(keys) if key is not None}
            unknown = [at for at, key in enumerate(keys) if key is None]
            self._places = [*sorted(known, key=known.__getitem__, reverse=is_down), *unknown]
        return [rows[at] for at in self._places]
