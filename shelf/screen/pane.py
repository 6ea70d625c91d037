"""A part of the screen that shows lines: only seen ones are made, only changed ones drawn.

Textual's own table and log hold and lay out every row; with thousands of nodes, over a slow ssh, a
refresh must cost what has changed. There are no scroll bars: titles say what part is seen.
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from vjob.shelf.screen import theme
from vjob.shelf.screen.theme import Marks


class Pane(Widget, can_focus=False):
    """Lines from the top. Subclasses say what line `y` is."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(id=id)
        self.marks = marks
        self._shown: dict[int, Text] = {}

    def make_line(self, y: int) -> Text:
        """Line `y` of what is seen now."""
        raise NotImplementedError

    def show(self) -> None:
        """Draw the lines that differ from what is drawn."""
        if not self.is_attached:
            return
        height, width = self.size.height, self.size.width
        self._shown = {y: line for y, line in self._shown.items() if y < height}
        for y in range(height):
            line = self.make_line(y)
            if self._shown.get(y) != line:
                self._shown[y] = line
                self.refresh(Region(0, y, width, 1))

    def render_line(self, y: int) -> Strip:
        line = self._shown.get(y)
        if line is None:
            line = self._shown[y] = self.make_line(y)
        base = self.rich_style + theme.PLAIN
        if isinstance(line.style, Style):
            base += line.style
        strip = Strip(line.render(self.app.console, end=""))
        return strip.adjust_cell_length(self.size.width, base).apply_style(base)

    def on_resize(self) -> None:
        self._shown.clear()
        self.refresh()


class TextLines(Pane):
    """Lines that are given to it."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.lines: list[Text] = []

    def make_line(self, y: int) -> Text:
        return self.lines[y] if y < len(self.lines) else Text()

    def take(self, lines: list[Text]) -> None:
        self.lines = lines
        self.show()


class ScrollPane(Pane, can_focus=True):
    """A pane with a title line and more rows than fit; keys and the wheel move through them."""

    num_top = 1
    """Lines above the rows."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.top = 0

    @property
    def num_rows(self) -> int:
        raise NotImplementedError

    @property
    def page(self) -> int:
        """Rows that are seen at once."""
        return max(0, self.size.height - self.num_top)

    def make_title(self, y: int) -> Text:
        raise NotImplementedError

    def make_row(self, number: int) -> Text:
        raise NotImplementedError

    def make_line(self, y: int) -> Text:
        if y < self.num_top:
            return self.make_title(y)
        number = self.top + y - self.num_top
        return self.make_row(number) if number < self.num_rows else Text(style=theme.PLAIN)

    def show(self) -> None:
        self.top = self.clip(self.top)
        super().show()

    def clip(self, top: int) -> int:
        return max(0, min(top, self.num_rows - self.page))

    def move(self, rows: int) -> None:
        """Scroll by that many rows, as far as there are some."""
        self.top = self.clip(self.top + rows)
        self.show()

    def format_part(self) -> str:
        """` 21-40 of 4,096`; empty where all is seen."""
        if self.num_rows <= self.page:
            return ""
        last = min(self.top + self.page, self.num_rows)
        return f" {self.top + 1:,}-{last:,} of {self.num_rows:,}"

    def action_move(self, rows: int) -> None:
        self.move(rows)

    def action_page(self, pages: int) -> None:
        self.move(pages * max(1, self.page - 1))

    def action_end(self, direction: int) -> None:
        self.move(direction * self.num_rows)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.move(-3)

    def on_focus(self) -> None:
        self.show()

    def on_blur(self) -> None:
        self.show()

    def on_resize(self) -> None:
        self.top = self.clip(self.top)
        super().on_resize()

    def begin_title(self, word: str) -> Text:
        """The pane's name; brighter where keys go, and underlined for monochrome."""
        style = theme.ACTIVE if self.has_focus else theme.TITLE
        return Text(style=theme.PLAIN).append(word, style)
