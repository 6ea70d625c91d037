"""The last lines of a log, to look through: bounded, searched, with the place of known lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vjob.jobs.monitor.model.snapshot import Line

MOST_LINES = 5000


class LogBuffer:
    """Lines by numbers that stay the same while old ones are dropped."""

    def __init__(self, most_lines: int = MOST_LINES) -> None:
        self.first = 0
        """Number of the oldest line that is kept."""
        self._lines: list[Line] = []
        self._most_lines = most_lines

    @property
    def end(self) -> int:
        """One past the newest line's number."""
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
        """The next line from `start` on, that one included, with the text; around the end.

        Capitals count only where the text has some.
        """
        wanted = text if text != text.lower() else None

        def has(line: Line) -> bool:
            return wanted in line.text if wanted else text in line.text.lower()

        return self._find(has, start, direction)

    def find_known(self, start: int, direction: int) -> int | None:
        """The next line of a known kind from `start` on, around the end."""
        return self._find(lambda line: bool(line.kind), start, direction)

    def _find(self, fits: Callable[[Line], bool], start: int, direction: int) -> int | None:
        num_lines = len(self._lines)
        for distance in range(num_lines):
            place = (start - self.first + direction * distance) % num_lines
            if fits(self._lines[place]):
                return self.first + place
        return None


def find_spans(line: str, text: str) -> list[tuple[int, int]]:
    """Where the text stands in a line, by the same rule."""
    if not text:
        return []
    where = line if text != text.lower() else line.lower()
    spans, start = [], where.find(text)
    while start >= 0:
        spans.append((start, start + len(text)))
        start = where.find(text, start + len(text))
    return spans
