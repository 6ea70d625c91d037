"""Node table: its columns, how rows are sorted and filtered, and the pane that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message

from vjob.jobs.monitor.screen import theme
from vjob.jobs.monitor.screen.pane import ScrollPane
from vjob.jobs.monitor.screen.theme import Marks, format_age, format_seconds
from vjob.jobs.monitor.screen.view import NodeRow

LATE_S = 120.0
"""A sign of life older than this is painted; whether it is wrong is the verdict's to say."""
HOT = 85.0
BAR_WIDTH = 5
REST = 0
"""Width of a column that takes what the others leave."""
Cell = tuple[str, Style]
Key = float | str | None


@dataclass(frozen=True, kw_only=True)
class NodeColumn:
    """One column. Its width leaves room for the arrow of a sorted one."""

    title: str
    width: int
    place: int
    """Columns of the greatest place are left out first where they do not fit."""
    show: Callable[[NodeRow, Marks], Cell]
    key: Callable[[NodeRow], Key]
    """None sorts last, in either direction."""
    is_number: bool = False
    first_down: bool = False
    """The greatest comes first when it is chosen."""


def _age_cell(age_s: float | None) -> Cell:
    is_late = age_s is not None and age_s > LATE_S
    return format_age(age_s), theme.BAD if is_late else theme.PLAIN


def _bar_cell(percent: float | None, marks: Marks) -> Cell:
    if percent is None:
        return "", theme.DIM
    style = theme.BAD if percent < 5 else theme.GOOD
    return f"{marks.bar(percent, BAR_WIDTH)} {percent:3.0f}%", style


def _temperature_cell(degrees: float | None, marks: Marks) -> Cell:
    if degrees is None:
        return "", theme.DIM
    return f"{degrees:.0f}{marks.degree}", theme.BAD if degrees >= HOT else theme.PLAIN


def _percent_cell(percent: float | None) -> Cell:
    if percent is None:
        return "", theme.DIM
    return f"{percent:.0f}%", theme.BAD if percent > 97 else theme.PLAIN


COLUMNS = (
    NodeColumn(
        title="node", width=12, place=0,
        show=lambda row, marks: (row.node.name, theme.STRONG if row.is_culprit else theme.PLAIN),
        key=lambda row: row.index,
    ),
    NodeColumn(
        title="group", width=8, place=11,
        show=lambda row, marks: (row.node.group, theme.PLAIN),
        key=lambda row: row.node.group or None,
    ),
    NodeColumn(
        title="ranks", width=9, place=9,
        show=lambda row, marks: (row.ranks, theme.PLAIN),
        key=lambda row: min(row.node.ranks, default=None),
    ),
    NodeColumn(
        title="stage", width=5, place=8,
        show=lambda row, marks: (row.stages, theme.PLAIN), key=lambda row: row.stages or None,
    ),
    NodeColumn(
        title="state", width=16, place=1,
        show=lambda row, marks: (row.state, theme.BAD if row.is_bad else theme.PLAIN),
        key=lambda row: f"{not row.is_bad}{row.state}" if row.state else None,
    ),
    NodeColumn(
        title="beat", width=5, place=4, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.beat_age_s), key=lambda row: row.beat_age_s,
    ),
    NodeColumn(
        title="log", width=4, place=6, is_number=True, first_down=True,
        show=lambda row, marks: _age_cell(row.log_age_s), key=lambda row: row.log_age_s,
    ),
    NodeColumn(
        title="step", width=7, place=2, is_number=True,
        show=lambda row, marks: ("" if row.step is None else str(row.step), theme.PLAIN),
        key=lambda row: row.step,
    ),
    NodeColumn(
        title="s/step", width=7, place=7, is_number=True, first_down=True,
        show=lambda row, marks: (format_seconds(row.step_s), theme.PLAIN),
        key=lambda row: row.step_s,
    ),
    NodeColumn(
        title="GPU", width=10, place=3,
        show=lambda row, marks: _bar_cell(row.utilization, marks), key=lambda row: row.utilization,
    ),
    NodeColumn(
        title="CPU", width=10, place=3,
        show=lambda row, marks: _bar_cell(row.cpu_percent, marks), key=lambda row: row.cpu_percent,
    ),
    NodeColumn(
        title="mem", width=4, place=10, is_number=True, first_down=True,
        show=lambda row, marks: _percent_cell(row.memory), key=lambda row: row.memory,
    ),
    NodeColumn(
        title="temp", width=5, place=12, is_number=True, first_down=True,
        show=lambda row, marks: _temperature_cell(row.temperature, marks),
        key=lambda row: row.temperature,
    ),
    NodeColumn(
        title="error", width=REST, place=5,
        show=lambda row, marks: (row.error, theme.BAD), key=lambda row: row.error or None,
    ),
)  # fmt: skip
LEAST_REST = 12
MARGIN = 2
"""Two signs before a row: the cursor's and the culprit's."""


@dataclass(frozen=True, kw_only=True)
class PlacedColumn:
    """A column where it stands on the screen."""

    column: NodeColumn
    start: int
    width: int


def place_columns(rows: Sequence[NodeRow], width: int, marks: Marks) -> list[PlacedColumn]:
    """The columns that fit, as wide as they need; those that nothing is in give way first."""
    used = [column for column in COLUMNS if column.place == 0 or _has_any(column, rows)]
    widths = {column.title: _find_width(column, rows, marks) for column in used}
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


def _has_any(column: NodeColumn, rows: Sequence[NodeRow]) -> bool:
    return not rows or any(column.key(row) is not None for row in rows)


def _find_width(column: NodeColumn, rows: Sequence[NodeRow], marks: Marks) -> int:
    """Width of a column: of text as long as the longest, of numbers as it is set."""
    if column.width == REST:
        return LEAST_REST
    if column.is_number or column.title in ("GPU", "CPU"):
        return column.width
    longest = max((len(column.show(row, marks)[0]) for row in rows), default=column.width)
    return max(len(column.title) + 1, min(longest, 2 * column.width))


def render_titles(
    placed: Sequence[PlacedColumn], sorted_by: str, is_down: bool, marks: Marks
) -> Text:
    """The line above the rows; the column that rows are sorted by has an arrow."""
    line = Text(" " * MARGIN, style=theme.TITLE)
    for item in placed:
        title = item.column.title
        if title == sorted_by:
            title += marks.down if is_down else marks.up
        shown = title.rjust(item.width) if item.column.is_number else title.ljust(item.width)
        line.append(shown[: item.width] + " ")
    return line


def render_row(
    row: NodeRow, placed: Sequence[PlacedColumn], *, is_here: bool, marks: Marks
) -> Text:
    """One node."""
    line = Text(style=theme.HERE if is_here else theme.PLAIN)
    line.append(marks.here if is_here else " ")
    line.append(marks.culprit if row.is_culprit else " ", theme.BAD)
    for item in placed:
        text, style = item.column.show(row, marks)
        shown = marks.fit(marks.plain(text), item.width)
        line.append(
            shown.rjust(item.width) if item.column.is_number else shown.ljust(item.width), style
        )
        line.append(" ")
    return line


def sort_rows(rows: Sequence[NodeRow], title: str, is_down: bool) -> list[NodeRow]:
    """Sort by a column; rows of which nothing is known last, equal ones in the snapshot's order."""
    column = next(column for column in COLUMNS if column.title == title)
    keyed = [(column.key(row), row) for row in rows]
    known = [(key, row) for key, row in keyed if key is not None]
    known.sort(key=_first, reverse=is_down)
    return [row for _, row in known] + [row for key, row in keyed if key is None]


def _first(pair: tuple[Any, NodeRow]) -> Any:
    return pair[0]


IN_ORDER = COLUMNS[0].title


class NodePane(ScrollPane):
    """One row a node; the cursor stays on its node when rows move."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("up,k", "step(-1)", "up"),
        ("down,j", "step(1)", "down"),
        ("pageup", "leap(-1)", "page up"),
        ("pagedown", "leap(1)", "page down"),
        ("home", "goto(-1)", "first"),
        ("end", "goto(1)", "last"),
    ]
    num_top = 2

    class Chosen(Message):
        """The cursor came to a node; `is_meant` where it was by Enter or a click."""

        def __init__(self, node: str, is_meant: bool) -> None:
            super().__init__()
            self.node = node
            self.is_meant = is_meant

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.sorted_by = IN_ORDER
        self.is_down = False
        self.filter = ""
        self.chosen: str | None = None
        """The node of the cursor."""
        self.is_moved = False
        """The user moved the cursor; until then it stands on the culprit."""
        self.rows: list[NodeRow] = []
        """As shown: sorted and filtered."""
        self._all: tuple[NodeRow, ...] = ()
        self._placed: list[PlacedColumn] = []
        self._num_planned: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def here(self) -> int:
        """The cursor's row; the first where its node is not shown."""
        for number, row in enumerate(self.rows):
            if row.node.name == self.chosen:
                return number
        return 0

    def take(self, rows: tuple[NodeRow, ...], num_planned: int | None) -> None:
        """Rows of a new look."""
        self._all, self._num_planned = rows, num_planned
        self.renew()
        culprit = next((row.node.name for row in rows if row.is_culprit), None)
        wanted = culprit if culprit and not self.is_moved else self.chosen
        if rows and (wanted != self.chosen or wanted is None):
            self.chosen = wanted or rows[0].node.name
            self.post_message(self.Chosen(self.chosen, is_meant=False))
            self._reveal()

    def renew(self) -> None:
        """Filter, sort, and show."""
        wanted = self.filter.lower().split()
        rows = [row for row in self._all if all(word in row.words for word in wanted)]
        self.rows = sort_rows(rows, self.sorted_by, self.is_down)
        self._placed = place_columns(self._all, self.size.width, self.marks)
        self.show()

    def sort(self, title: str) -> None:
        """Sort by a column; by the same one again in the other direction."""
        column = next(column for column in COLUMNS if column.title == title)
        self.is_down = not self.is_down if title == self.sorted_by else column.first_down
        self.sorted_by = title
        self.renew()
        self._reveal()

    def sort_next(self, direction: int) -> None:
        """Sort by the next column of those that are seen."""
        titles = [item.column.title for item in self._placed] or [IN_ORDER]
        place = titles.index(self.sorted_by) if self.sorted_by in titles else 0
        self.sort(titles[(place + direction) % len(titles)])

    def set_filter(self, text: str) -> None:
        self.filter = text
        self.renew()
        self._reveal()

    def make_title(self, y: int) -> Text:
        if y == 1:
            return render_titles(self._placed, self.sorted_by, self.is_down, self.marks)
        title = self.begin_title("nodes")
        planned, have = self._num_planned, len(self._all)
        missing = f"{have:,} of {planned:,}" if planned and planned != have else f"{have:,}"
        title.append(f"  {missing}", theme.PLAIN)
        if self.filter:
            words = f"  filter {self.marks.plain(self.filter)!r}: {self.num_rows:,}"
            title.append(words, theme.WARM)
        if self.format_part():
            title.append(f"  row{self.format_part()}", theme.DIM)
        return title

    def make_row(self, number: int) -> Text:
        row = self.rows[number]
        is_here = row.node.name == self.chosen
        return render_row(row, self._placed, is_here=is_here, marks=self.marks)

    def choose(self, number: int, *, is_meant: bool) -> None:
        """Put the cursor on a row."""
        if not self.rows:
            return
        self.is_moved = True
        name = self.rows[max(0, min(number, self.num_rows - 1))].node.name
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
        self._placed = place_columns(self._all, self.size.width, self.marks)
        super().on_resize()
        self._reveal()
