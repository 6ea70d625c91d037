"""Log pane: the lines of a node, or of all nodes merged, followed and searched."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from rich.style import Style
from rich.text import Text

from vjob.jobs.monitor.model.snapshot import Line
from vjob.shelf.screen import theme
from vjob.shelf.screen.pane import ScrollPane
from vjob.shelf.screen.theme import Marks

MOST_LINES = 5000


class LogBuffer:
    """Log lines with numbers that stay the same when old lines are dropped."""

    def __init__(self, most_lines: int = MOST_LINES) -> None:
        self.first = 0
        """Number of the oldest line that is kept."""
        self._lines: list[Line] = []
        self._most_lines = most_lines

    @property
    def end(self) -> int:
        """The newest line's number plus one."""
        return self.first + len(self._lines)

    def __getitem__(self, number: int) -> Line:
        if not self.first <= number < self.end:
            raise IndexError(number)
        return self._lines[number - self.first]

    def add(self, lines: Sequence[Line]) -> None:
        self._lines.extend(lines)
        excess = len(self._lines) - self._most_lines
        if excess > 0:
            del self._lines[:excess]
            self.first += excess

    def find(self, text: str, start: int, direction: int) -> int | None:
        """Return the index of the next line with the text, from `start` on and wrapping around.
        `direction` is 1 or -1.

        The search ignores case unless the text has capitals.
        """
        wanted = text if text != text.lower() else None

        def has(line: Line) -> bool:
            return wanted in line.text if wanted else text in line.text.lower()

        return self._find(has, start, direction)

    def find_known(self, start: int, direction: int) -> int | None:
        """Return the index of the next line of a known kind, from `start` on, wrapping around."""
        return self._find(lambda line: bool(line.kind), start, direction)

    def _find(self, fits: Callable[[Line], bool], start: int, direction: int) -> int | None:
        num_lines = len(self._lines)
        for distance in range(num_lines):
            place = (start - self.first + direction * distance) % num_lines
            if fits(self._lines[place]):
                return self.first + place
        return None


def find_spans(line: str, text: str) -> list[tuple[int, int]]:
    """Return start and end of each occurrence of the text in a line, ignoring case unless the text
    has capitals."""
    if not text:
        return []
    where = line if text != text.lower() else line.lower()
    spans, start = [], where.find(text)
    while start >= 0:
        spans.append((start, start + len(text)))
        start = where.find(text, start + len(text))
    return spans


LONGEST = 2000
"""Characters shown of a line, however far the user scrolls to the right."""
SIDE = 20


class LogPane(ScrollPane):
    """Log of `node`, or of all nodes if None."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("left", "side(-1)", "left"),
        ("right", "side(1)", "right"),
    ]

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.node: str | None = None
        self.is_following = True
        self.searched = ""
        self.found: int | None = None
        """Number of the line that the last search found."""
        self.said = ""
        """Result of the last search, in words."""
        self.problem = ""
        """Why lines could not be read."""
        self.side = 0
        """Characters scrolled to the right."""
        self.buffer = LogBuffer()

    @property
    def num_rows(self) -> int:
        return self.buffer.end - self.buffer.first

    def show_node(self, node: str | None) -> None:
        """Show another node's lines, from the end."""
        if node != self.node:
            self.buffer = LogBuffer()
            self.node, self.found, self.said, self.side = node, None, "", 0
            self.is_following = True
        self.show()

    def take(self, node: str | None, lines: list[Line], problem: str = "") -> None:
        """Add new lines, unless their node is no longer shown."""
        if node == self.node:
            before = self.buffer.first
            self.buffer.add(lines)
            self.problem = problem
            self.top -= self.buffer.first - before
            self.show()

    def show(self) -> None:
        if self.is_following:
            self.top = self.num_rows
        super().show()

    def move(self, rows: int) -> None:
        """Scroll; scrolling up stops following, and reaching the end resumes it."""
        self.top = self.clip(self.top + rows)
        self.is_following = self.top + self.page >= self.num_rows
        self.show()

    def toggle_follow(self) -> None:
        self.is_following = not self.is_following
        self.show()

    def search(self, text: str) -> None:
        """Search backwards from the end, since the newest lines matter most."""
        self.searched, self.found, self.said = text, None, ""
        if text:
            self.go_on(-1)
        self.show()

    def go_on(self, direction: int) -> None:
        """Go to the next line with the searched text."""
        if not self.searched:
            self.said = "nothing searched yet: /"
            self.show()
            return
        found = self.buffer.find(self.searched, self._start(direction), direction)
        self._go_to(found, f"no line with {self.searched!r}")

    def go_to_known(self, direction: int) -> None:
        """Go to the next line of a known kind: an error, or a consequence of one."""
        found = self.buffer.find_known(self._start(direction), direction)
        self._go_to(found, "no known error in these lines")

    def _start(self, direction: int) -> int:
        if self.found is not None and self.buffer.first <= self.found < self.buffer.end:
            return self.found + direction
        return self.buffer.first if direction > 0 else self.buffer.end - 1

    def _go_to(self, found: int | None, otherwise: str) -> None:
        self.found = found
        self.said = otherwise if found is None else ""
        if found is not None:
            kind = self.buffer[found].kind
            self.said = f"line {found - self.buffer.first + 1:,}" + (f": {kind}" if kind else "")
            self.is_following = False
            self.top = self.clip(found - self.buffer.first - self.page // 2)
        self.show()

    def make_title(self, y: int) -> Text:
        title = self.begin_title("log")
        title.append(
            f" of {self.marks.plain(self.node) if self.node else 'all nodes'}", theme.PLAIN
        )
        title.append("  following" if self.is_following else "  held", theme.DIM)
        if self.searched:
            title.append(f"  /{self.marks.plain(self.searched)}", theme.WARM)
        if self.said:
            title.append(f"  {self.marks.plain(self.said)}", theme.WARM)
        if self.side:
            title.append(f"  from character {self.side + 1}", theme.DIM)
        title.append(f" {self.format_part()}" if self.format_part() else "", theme.DIM)
        if self.problem:
            title.append(f"  {self.marks.plain(self.problem)}", theme.BAD)
        return title

    def make_row(self, number: int) -> Text:
        number += self.buffer.first
        line = self.buffer[number]
        is_found = number == self.found
        row = Text(style=theme.HERE if is_found else theme.PLAIN)
        row.append(self.marks.here if is_found else "!" if line.kind else " ", theme.BAD)
        speaker = self._name_speaker(line)
        if speaker:
            row.append(f"{speaker} ", _paint_speaker(line))
        text = self.marks.plain(line.text[:LONGEST])
        shown = Text(text, style=theme.BAD if line.kind else "")
        for start, end in find_spans(text, self.searched):
            shown.stylize(theme.FOUND, start, end)
        if line.num_same > 1:
            shown.append(f" x{line.num_same}", theme.DIM)
        return row.append_text(shown[self.side :] if self.side else shown)

    def _name_speaker(self, line: Line) -> str:
        """Name the origin of a line, `n062 r5 err`; with the node only if several are shown."""
        words = [self.marks.plain(line.node)] if self.node is None and line.node else []
        words += [f"r{line.rank}"] if line.rank is not None else []
        words += ["err"] if line.file.endswith(".err") else []
        return " ".join(words)

    def action_side(self, direction: int) -> None:
        self.side = max(0, min(self.side + direction * SIDE, LONGEST - SIDE))
        self.show()


def _paint_speaker(line: Line) -> Style:
    """Return the colour of a rank or node, always the same."""
    number = zlib.crc32(line.node.encode()) if line.rank is None else line.rank
    return theme.speaker(number)
