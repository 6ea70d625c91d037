"""The node table: thousands of nodes, sorted and filtered; only the seen rows are made."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.message import Message

from vjob.jobs.monitor.screen import paint
from vjob.jobs.monitor.screen.columns import (
    COLUMNS,
    Placed,
    place_columns,
    render_row,
    render_titles,
    sort_rows,
)
from vjob.jobs.monitor.screen.marks import Marks
from vjob.jobs.monitor.screen.pane import ScrollPane
from vjob.jobs.monitor.screen.view import NodeRow

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
        """Whether the user moved the cursor; until then it stands on the culprit."""
        self.rows: list[NodeRow] = []
        """As shown: sorted and filtered."""
        self._all: tuple[NodeRow, ...] = ()
        self._placed: list[Placed] = []
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
        """By a column; by the same one again in the other direction."""
        column = next(column for column in COLUMNS if column.title == title)
        self.is_down = not self.is_down if title == self.sorted_by else column.first_down
        self.sorted_by = title
        self.renew()
        self._reveal()

    def sort_next(self, direction: int) -> None:
        """By the next column of those that are seen."""
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
        title.append(f"  {missing}", paint.PLAIN)
        if self.filter:
            words = f"  filter {self.marks.plain(self.filter)!r}: {self.num_rows:,}"
            title.append(words, paint.WARM)
        if self.say_part():
            title.append(f"  row{self.say_part()}", paint.DIM)
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
