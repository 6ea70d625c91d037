"""Pages that cover the live screen: the keys, the whole verdict, stacks, a question."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.screen import ModalScreen

from vjob.jobs.monitor.model.snapshot import Snapshot, Verdict
from vjob.shelf.screen import theme
from vjob.shelf.screen.heading import format_place
from vjob.shelf.screen.pane import ScrollPane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.formats import format_age

KEYS = (
    ("q", "quit; the job goes on, the exit code is the verdict's"),
    ("v", "the full verdict: all evidence, facts, remarks, settings"),
    ("Tab, Shift-Tab", "next pane: nodes, GPUs, log"),
    ("z", "only the active pane, and back"),
    ("arrows, j, k", "move; in the log left and right too; PgUp, PgDn, Home, End"),
    ("f", "filter nodes by name, state, error ...; `culprit`; Esc clears"),
    ("<  >  o", "sort nodes by the previous or the next column; reverse the order"),
    ("Enter", "the log of the node under the cursor"),
    ("a", "the log of all nodes, or of the one under the cursor"),
    ("space", "follow the log, or stop following"),
    ("/  n  N", "search the log from its end; older and newer matches"),
    ("e  E", "the next known error in the log; the previous error"),
    ("s", "stacks: what every rank is doing now"),
    ("r", "write the report page"),
    ("c", "cancel the job, after confirmation"),
    ("mouse", "click: sort by a column, choose a node; Shift-drag: select"),
)


class TextPane(ScrollPane):
    BINDINGS = [("space", "page(1)", "page down")]  # noqa: RUF012 - Textual's own way

    def __init__(self, marks: Marks, title: str, lines: Sequence[Text]) -> None:
        super().__init__(marks, id="text")
        self._title = title
        self._lines = lines
        self._wrapped: list[Text] = []

    @property
    def num_rows(self) -> int:
        return len(self._wrapped)

    def make_title(self, y: int) -> Text:
        title = Text(self._title, style=theme.STRONG)
        return title.append(f"  Esc: back{self.format_part()}", theme.DIM)

    def make_row(self, number: int) -> Text:
        return self._wrapped[number]

    def on_resize(self) -> None:
        width = max(10, self.size.width)
        self._wrapped = []
        for line in self._lines:
            self._wrapped += list(line.wrap(self.app.console, width)) or [Text()]
        super().on_resize()


class TextPage(ModalScreen[None]):
    """Page of text, left with Esc."""

    BINDINGS = [("escape,q,enter", "dismiss", "back")]  # noqa: RUF012 - Textual's own way

    def __init__(self, marks: Marks, title: str, lines: Sequence[Text]) -> None:
        super().__init__()
        self.pane = TextPane(marks, title, lines)

    def compose(self) -> ComposeResult:
        yield self.pane


class Confirmation(ModalScreen[bool]):
    """Asks before an action, which only `y` confirms."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("y", "dismiss(True)", "yes"),
        ("n,escape,q", "dismiss(False)", "no"),
    ]

    def __init__(self, marks: Marks, title: str, text: str) -> None:
        super().__init__()
        lines = [Text(), Text(marks.plain(text), style=theme.PLAIN), Text()]
        answer = Text("y", style=theme.KEY).append(" does it, ", theme.PLAIN)
        answer.append("n", theme.KEY).append(" or Esc changes nothing", theme.PLAIN)
        self.pane = TextPane(marks, title, [*lines, answer])

    def compose(self) -> ComposeResult:
        yield self.pane


def render_keys(keys: Sequence[tuple[str, str]]) -> list[Text]:
    width = max(len(key) for key, _ in keys) + 2
    return [Text(key.ljust(width), style=theme.KEY).append(does, theme.PLAIN) for key, does in keys]


def render_verdict(snapshot: Snapshot, verdict: Verdict, marks: Marks) -> list[Text]:
    """Render everything that the verdict rests on, and the settings that the run printed."""
    plain = marks.plain
    lines = [Text(style=theme.PLAIN)]
    lines[0].append(f" {plain(verdict.health.value)} ", theme.badge(verdict.health))
    lines[0].append(f" {plain(verdict.reason)}", theme.STRONG)
    if verdict.advice:
        lines.append(Text(f"{marks.advice} {plain(verdict.advice)}", style=theme.WARM))
    lines.append(Text(f"rule: {plain(verdict.rule)}", style=theme.DIM))
    sections = (
        ("lines that say so", [f"{format_place(x)} | {x.text}" for x in verdict.evidence]),
        ("facts", verdict.facts),
        ("also", verdict.remarks),
        ("earlier attempts", [f"{item.number}: {item.reason}" for item in snapshot.earlier]),
        ("settings", [f"{name} = {value}" for name, value in snapshot.info.items()]),
        (
            "disks",
            [f"{d.path} ({d.what}): {d.free_bytes / 2**30:,.0f} GiB free" for d in snapshot.disks],
        ),
        ("unreadable", [f"{name}: {why}" for name, why in snapshot.unreadable.items()]),
        ("files", [snapshot.folder]),
        ("batch script", snapshot.scheduler_lines),
    )
    for title, items in sections:
        if items:
            lines += [Text(), Text(title, style=theme.TITLE)]
            lines += [Text(f"  {plain(item)}", style=theme.PLAIN) for item in items]
    if snapshot.scheduler.problem:
        age = format_age(snapshot.scheduler.age_s) or "an unknown time"
        lines += [Text(), Text(plain(f"{snapshot.scheduler.problem} ({age})"), style=theme.WARM)]
    return lines
