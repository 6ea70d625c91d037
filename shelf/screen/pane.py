"""A pane of lines that renders only visible lines and draws only changed ones.

Textual's own table and log keep and lay out every row; with thousands of nodes over a slow ssh, a
refresh must cost only what has changed. There are no scroll bars: titles show the visible part.
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
    """Lines from the top; subclasses define line `y`."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(id=id)
        self.marks = marks
        self._shown: dict[int, Text] = {}

    def make_line(self, y: int) -> Text:
        """Return visible line `y`."""
        raise NotImplementedError

    def show(self) -> None:
        """Draw the lines that have changed."""
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

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("up,k", "move(-1)", "up"),
        ("down,j", "move(1)", "down"),
        ("pageup", "page(-1)", "page up"),
        ("pagedown", "page(1)", "page down"),
        ("home", "end(-1)", "first"),
        ("end", "end(1)", "last"),
    ]
    num_top = 1
    """Number of lines above the rows."""

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.top = 0

    @property
    def num_rows(self) -> int:
        raise NotImplementedError

    @property
    def page(self) -> int:
        """Number of visible rows."""
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
        """Scroll by this many rows, within limits."""
        self.top = self.clip(self.top + rows)
        self.show()

    def format_part(self) -> str:
        """Format ` 21-40 of 4,096`; empty if all is visible."""
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
        """Return the pane's title, brighter if it has the focus, and underlined for monochrome."""
        style = theme.ACTIVE if self.has_focus else theme.TITLE
        return Text(style=theme.PLAIN).append(word, style)
