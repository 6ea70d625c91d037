"""A table with a cursor: the layout of its columns, and the pane that filters and sorts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message

from vjob.shelf.screen import theme
from vjob.shelf.screen.pane import ScrollPane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.table import REST, Column, Order, Row

Flag = tuple[str, Style]
"""Sign before a row, or a space, with its style."""
BAR_WIDTH = 5
LEAST_REST = 12
MARGIN = 2
"""Width of the two signs before a row: the cursor's and the flag."""


@dataclass(frozen=True, kw_only=True)
class PlacedColumn(Generic[Row]):
    """A column with its position on the screen."""

    column: Column[Row]
    start: int
    width: int


def place_columns(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int
) -> list[PlacedColumn[Row]]:
    """Lay out the columns that fit; empty ones are dropped first."""
    used = [column for column in columns if column.is_used(rows)]
    widths = {column.title: _compute_width(column, rows) for column in used}
    while len(used) > 1 and sum(widths[c.title] + 1 for c in used) + MARGIN > width:
        used.remove(max(used, key=lambda column: column.place))
    rest = width - MARGIN - sum(widths[column.title] + 1 for column in used)
    placed, start = [], MARGIN
    for column in used:
        own = widths[column.title] + (max(0, rest) if column.width == REST else 0)
        own = min(own, max(1, width - start))
        placed.append(PlacedColumn(column=column, start=start, width=own))
        start += own + 1
    return placed


def _compute_width(column: Column[Row], rows: Sequence[Row]) -> int:
    """Return a column's width: as set for numbers, else that of the longest text."""
    if column.width == REST:
        return LEAST_REST
    if column.is_number or column.is_fixed:
        return column.width
    longest = max((len(column.show(row).text) for row in rows), default=column.width)
    return max(len(column.title) + 1, min(longest, 2 * column.width))


def render_titles(
    placed: Sequence[PlacedColumn[Row]], sorted_by: str, is_down: bool, marks: Marks
) -> Text:
    """Render the column titles, with an arrow at the sorted one."""
    line = Text(" " * MARGIN, style=theme.TITLE)
    for item in placed:
        title = item.column.title
        if title == sorted_by:
            title += marks.down if is_down else marks.up
        shown = title.rjust(item.width) if item.column.is_number else title.ljust(item.width)
        line.append(shown[: item.width] + " ")
    return line


def render_row(
    row: Row, placed: Sequence[PlacedColumn[Row]], *, is_here: bool, flag: Flag, marks: Marks
) -> Text:
    """Render a row; `flag` is the sign before it."""
    line = Text(style=theme.HERE if is_here else theme.PLAIN)
    line.append(marks.here if is_here else " ")
    line.append(*flag)
    for item in placed:
        cell = item.column.show(row)
        text = marks.plain(cell.text)
        if cell.percent is not None:
            text = f"{marks.bar(cell.percent, BAR_WIDTH)} {text:>4}"
        shown, style = marks.fit(text, item.width), theme.style_of(cell.tone)
        line.append(
            shown.rjust(item.width) if item.column.is_number else shown.ljust(item.width), style
        )
        line.append(" ")
    return line


class TablePane(ScrollPane, Generic[Row]):
    """Table whose cursor stays on the same item, such as a node or a run, when rows move."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("up,k", "step(-1)", "up"),
        ("down,j", "step(1)", "down"),
        ("pageup", "leap(-1)", "page up"),
        ("pagedown", "leap(1)", "page down"),
        ("home", "goto(-1)", "first"),
        ("end", "goto(1)", "last"),
    ]
    num_top = 2
    columns: tuple[Column[Row], ...]

    class Chosen(Message):
        """Message: the cursor came to a row; `is_meant` if by Enter or a click."""

        def __init__(self, name: str, is_meant: bool) -> None:
            super().__init__()
            self.name = name
            self.is_meant = is_meant

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.sorted_by = self.columns[0].title
        self.is_down = False
        self.filter = ""
        self.chosen: str | None = None
        """The name of the cursor's row."""
        self.is_moved = False
        """True if the user has moved the cursor."""
        self.rows: list[Row] = []
        """The rows shown, sorted and filtered."""
        self.all_rows: tuple[Row, ...] = ()
        self._placed: list[PlacedColumn[Row]] = []
        self._order: Order[Row] = Order()

    def name_row(self, row: Row) -> str:
        """Return a row's name, by which the cursor stays on it."""
        raise NotImplementedError

    def render_words(self, row: Row) -> str:
        """Return the text that the filter searches, in lower case."""
        raise NotImplementedError

    def flag_row(self, row: Row) -> Flag:
        raise NotImplementedError

    def make_heading(self) -> Text:
        """Return the title above the columns, without filter and visible part."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def here(self) -> int:
        """Index of the cursor's row; the first if that row is not shown."""
        for number, row in enumerate(self.rows):
            if self.name_row(row) == self.chosen:
                return number
        return 0

    @property
    def row_here(self) -> Row | None:
        return self.rows[self.here] if self.rows else None

    def take_rows(self, rows: tuple[Row, ...], wanted: str | None = None) -> None:
        """Show the rows of a new snapshot; the cursor goes to `wanted` until the user moves it."""
        self.all_rows = rows
        self.renew()
        name = wanted if wanted and not self.is_moved else self.chosen
        if rows and (name != self.chosen or name is None):
            self.chosen = name or self.name_row((self.rows or list(rows))[0])
            self.post_message(self.Chosen(self.chosen, is_meant=False))
            self._reveal()

    def renew(self) -> None:
        """Filter and sort the rows, and show them."""
        rows = self.all_rows
        if wanted := self.filter.lower().split():
            words = [(row, self.render_words(row)) for row in rows]
            rows = tuple(row for row, text in words if all(word in text for word in wanted))
        self.rows = self._order.sort(self.columns, rows, self.sorted_by, self.is_down)
        self._placed = place_columns(self.columns, self.all_rows, self.size.width)
        self.show()

    def sort(self, title: str) -> None:
        """Sort by a column; a second time reverses the direction."""
        column = next(column for column in self.columns if column.title == title)
        self.is_down = not self.is_down if title == self.sorted_by else column.first_down
        self.sorted_by = title
        self.renew()
        self._reveal()

    def sort_next(self, direction: int) -> None:
        """Sort by the next visible column."""
        titles = [item.column.title for item in self._placed] or [self.sorted_by]
        place = titles.index(self.sorted_by) if self.sorted_by in titles else 0
        self.sort(titles[(place + direction) % len(titles)])

    def set_filter(self, text: str) -> None:
        self.filter = text
        self.renew()
        self._reveal()

    def make_title(self, y: int) -> Text:
        if y == 1:
            return render_titles(self._placed, self.sorted_by, self.is_down, self.marks)
        title = self.make_heading()
        if self.filter:
            words = f"  filter {self.marks.plain(self.filter)!r}: {self.num_rows:,}"
            title.append(words, theme.WARM)
        if self.format_part():
            title.append(f"  row{self.format_part()}", theme.DIM)
        return title

    def make_row(self, number: int) -> Text:
        row = self.rows[number]
        is_here = self.name_row(row) == self.chosen
        flag = self.flag_row(row)
        return render_row(row, self._placed, is_here=is_here, flag=flag, marks=self.marks)

    def choose(self, number: int, *, is_meant: bool) -> None:
        """Move the cursor to a row."""
        if not self.rows:
            return
        self.is_moved = True
        name = self.name_row(self.rows[max(0, min(number, self.num_rows - 1))])
        if name != self.chosen or is_meant:
            self.chosen = name
            self.post_message(self.Chosen(name, is_meant))
        self._reveal()

    def _reveal(self) -> None:
        here = self.here
        if self.page:
            self.top = min(max(self.top, here - self.page + 1), here)
        self.show()

    def action_step(self, rows: int) -> None:
        self.choose(self.here + rows, is_meant=False)

    def action_leap(self, pages: int) -> None:
        self.choose(self.here + pages * max(1, self.page - 1), is_meant=False)

    def action_goto(self, direction: int) -> None:
        self.choose(self.num_rows if direction > 0 else 0, is_meant=False)

    def key_enter(self) -> None:
        self.choose(self.here, is_meant=True)

    def on_click(self, event: events.Click) -> None:
        if event.y == 1:
            for item in self._placed:
                if item.start <= event.x <= item.start + item.width:
                    self.sort(item.column.title)
            return
        number = self.top + event.y - self.num_top
        if event.y >= self.num_top and number < self.num_rows:
            self.choose(number, is_meant=event.chain > 1)

    def on_resize(self) -> None:
        self._placed = place_columns(self.columns, self.all_rows, self.size.width)
        super().on_resize()
        self._reveal()
