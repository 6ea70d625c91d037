"""The log pane: a node's lines, or all nodes' merged, followed and searched."""

from __future__ import annotations

import zlib

from rich.style import Style
from rich.text import Text

from vjob.jobs.monitor.model.snapshot import Line
from vjob.jobs.monitor.screen import paint
from vjob.jobs.monitor.screen.log_buffer import LogBuffer, find_spans
from vjob.jobs.monitor.screen.marks import Marks
from vjob.jobs.monitor.screen.pane import ScrollPane

LONGEST = 2000
"""Characters of a line that are shown, however far one scrolls to the right."""
SIDE = 20


class LogPane(ScrollPane):
    """Lines of `node`; of all nodes where it is None."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("up,k", "move(-1)", "up"),
        ("down,j", "move(1)", "down"),
        ("pageup", "page(-1)", "page up"),
        ("pagedown", "page(1)", "page down"),
        ("home", "end(-1)", "first"),
        ("end", "end(1)", "last"),
        ("left", "side(-1)", "left"),
        ("right", "side(1)", "right"),
    ]

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.node: str | None = None
        self.is_following = True
        self.searched = ""
        self.found: int | None = None
        """Number of the line that a search came to."""
        self.said = ""
        """What the last search came to, in words."""
        self.problem = ""
        """Why lines could not be read."""
        self.side = 0
        """Characters that are left of what is seen."""
        self.buffer = LogBuffer()

    @property
    def num_rows(self) -> int:
        return self.buffer.end - self.buffer.first

    def look_at(self, node: str | None) -> None:
        """Show another node's lines, from their end."""
        if node != self.node:
            self.buffer = LogBuffer()
            self.node, self.found, self.said, self.side = node, None, "", 0
            self.is_following = True
        self.show()

    def take(self, node: str | None, lines: list[Line], problem: str = "") -> None:
        """New lines; those of a node that is no longer shown are of no use."""
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
        """Who scrolls up stops following; who comes to the end follows again."""
        self.top = self.clip(self.top + rows)
        self.is_following = self.top + self.page >= self.num_rows
        self.show()

    def toggle_follow(self) -> None:
        self.is_following = not self.is_following
        self.show()

    def search(self, text: str) -> None:
        """From the end backwards: what was written last is what one looks for."""
        self.searched, self.found, self.said = text, None, ""
        if text:
            self.go_on(-1)
        self.show()

    def go_on(self, direction: int) -> None:
        """To the next line with the searched text."""
        if not self.searched:
            self.said = "nothing searched yet: /"
            self.show()
            return
        found = self.buffer.find(self.searched, self._start(direction), direction)
        self._go_to(found, f"no line with {self.searched!r}")

    def go_to_known(self, direction: int) -> None:
        """To the next line of a known kind: an error, or what follows from one."""
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
            f" of {self.marks.plain(self.node) if self.node else 'all nodes'}", paint.PLAIN
        )
        title.append("  following" if self.is_following else "  held", paint.DIM)
        if self.searched:
            title.append(f"  /{self.marks.plain(self.searched)}", paint.WARM)
        if self.said:
            title.append(f"  {self.marks.plain(self.said)}", paint.WARM)
        if self.side:
            title.append(f"  from character {self.side + 1}", paint.DIM)
        title.append(f" {self.say_part()}" if self.say_part() else "", paint.DIM)
        if self.problem:
            title.append(f"  {self.marks.plain(self.problem)}", paint.BAD)
        return title

    def make_row(self, number: int) -> Text:
        number += self.buffer.first
        line = self.buffer[number]
        is_found = number == self.found
        row = Text(style=paint.HERE if is_found else paint.PLAIN)
        row.append(self.marks.here if is_found else "!" if line.kind else " ", paint.BAD)
        speaker = self._name_speaker(line)
        if speaker:
            row.append(f"{speaker} ", _paint_speaker(line))
        text = self.marks.plain(line.text[:LONGEST])
        shown = Text(text, style=paint.BAD if line.kind else "")
        for start, end in find_spans(text, self.searched):
            shown.stylize(paint.FOUND, start, end)
        if line.num_same > 1:
            shown.append(f" x{line.num_same}", paint.DIM)
        return row.append_text(shown[self.side :] if self.side else shown)

    def _name_speaker(self, line: Line) -> str:
        """`n062 r5 err`: the node only where lines of several are shown."""
        words = [self.marks.plain(line.node)] if self.node is None and line.node else []
        words += [f"r{line.rank}"] if line.rank is not None else []
        words += ["err"] if line.file.endswith(".err") else []
        return " ".join(words)

    def action_side(self, direction: int) -> None:
        self.side = max(0, min(self.side + direction * SIDE, LONGEST - SIDE))
        self.show()


def _paint_speaker(line: Line) -> Style:
    """The same colour for the same rank, or node, every time."""
    number = zlib.crc32(line.node.encode()) if line.rank is None else line.rank
    return paint.speaker(number)
