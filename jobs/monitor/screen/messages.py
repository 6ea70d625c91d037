"""What threads tell the screen, and what it asks of them."""

from __future__ import annotations

from collections.abc import Callable

from textual.message import Message

from vjob.jobs.monitor.model.snapshot import Line
from vjob.jobs.monitor.screen.view import View


class Looked(Message):
    """A look at the job came back."""

    def __init__(self, view: View, at: float) -> None:
        super().__init__()
        self.view = view
        self.at = at
        """By the monotonic clock."""


class Failed(Message):
    """A look did not."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class Read(Message):
    """New lines of a node, or of all where it is None."""

    def __init__(self, node: str | None, lines: list[Line], problem: str = "") -> None:
        super().__init__()
        self.node = node
        self.lines = lines
        self.problem = problem


class Done(Message):
    """What a key asked for is done, or could not be."""

    def __init__(self, what: str, text: str, is_good: bool) -> None:
        super().__init__()
        self.what = what
        self.text = text
        self.is_good = is_good


class LinesWanted(Message):
    """The log shows other lines than before: do not wait for the next look."""


class WorkWanted(Message):
    """A key asked for work that takes its time; Done tells of it."""

    def __init__(self, what: str, work: Callable[[], str]) -> None:
        super().__init__()
        self.what = what
        self.work = work
