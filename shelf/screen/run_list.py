"""The live list of all runs: a row for each, details of the selected one, and keys.

The list ends with the folder of a run to open, or with none; `start.py` opens that run's screen and
then shows the list again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Input

from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.readers.run_table import RunTable
from vjob.shelf.screen import theme
from vjob.shelf.screen.actions import ListActions
from vjob.shelf.screen.key_screen import FILTER, Failed, KeyApp, KeyScreen, Repeat
from vjob.shelf.screen.pages import Confirmation
from vjob.shelf.screen.pane import TextLines
from vjob.shelf.screen.table_pane import Flag, TablePane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.formats import format_coarse_duration
from vjob.shelf.view.runs import RUN_COLUMNS

DETAIL = 5
"""Lines about the selected run, as in CSS; none on a low screen."""
LOW = 14
LATE_S = 15.0
LIST_KEYS = (
    ("Enter", "the live screen of the run under the cursor; q returns"),
    ("q", "quit; all runs continue"),
    ("arrows, j, k", "move; PgUp, PgDn, Home, End"),
    ("f", "filter: type a part of a run, job, state, verdict or reason; Esc clears"),
    ("<  >  o", "sort by the previous or the next column; reverse the order"),
    ("space", "mark the run for a comparison, or remove the mark"),
    ("d", "compare the marked runs, or this run with the marked run: vjob compare"),
    ("c", "cancel the run under the cursor, after confirmation"),
    ("mouse", "click: sort by a column, choose a run; twice: open it"),
)
ASKS = "filter runs: a part of run, job, state, verdict or reason; Enter keeps, Esc clears"


class RunPane(TablePane[RunRow]):
    """List of runs, initially newest first."""

    columns = RUN_COLUMNS

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self.marked: list[str] = []
        """Folders of runs marked for comparison, in the order of marking."""

    def name_row(self, row: RunRow) -> str:
        return row.target

    def render_words(self, row: RunRow) -> str:
        words = (row.run, row.name, *row.jobs, row.state, row.health, row.message)
        return " ".join(words).lower()

    def flag_row(self, row: RunRow) -> Flag:
        return ("*" if row.target in self.marked else " "), theme.WARM

    def make_heading(self) -> Text:
        title = self.begin_title("runs").append(f"  {len(self.all_rows):,}", theme.PLAIN)
        if self.marked:
            title.append(f"  {len(self.marked)} marked", theme.WARM)
        return title

    def mark(self) -> None:
        row = self.row_here
        if row is None:
            return
        if row.target in self.marked:
            self.marked.remove(row.target)
        else:
            self.marked.append(row.target)
        self.show()


@dataclass
class ListPlace:
    """The user's place in the list, kept while another screen is shown."""

    chosen: str | None = None
    sorted_by: str = RUN_COLUMNS[0].title
    is_down: bool = True
    filter: str = ""
    marked: list[str] = field(default_factory=list)


class Listed(Message):
    """Message: all runs were read."""

    def __init__(self, rows: tuple[RunRow, ...], problem: str, at: float) -> None:
        super().__init__()
        self.rows, self.problem, self.at = rows, problem, at


class RunListScreen(KeyScreen):
    """Screen of all runs, with details of the selected one.

    All heights are fixed: changing one redraws the whole screen, which takes seconds on a slow
    line.
    """

    CSS = f"""
    RunListScreen #heading {{ height: 1; }}
    RunListScreen #detail {{ height: {DETAIL}; }}
    """
    HINTS = (
        ("?", "help"), ("q", "quit"), ("Enter", "open"), ("f", "filter"), ("< >", "sort"),
        ("space", "mark"), ("d", "compare"), ("c", "cancel"),
    )  # fmt: skip
    KEYS = LIST_KEYS
    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("q", "leave_list", "quit"),
        ("question_mark", "help", "help"),
        ("f", "ask", "filter"),
        ("less_than_sign", "sort_next(-1)", "sort by the previous column"),
        ("greater_than_sign", "sort_next(1)", "sort by the next column"),
        ("o", "turn", "other way round"),
        ("space", "mark", "mark"),
        ("d", "compare", "compare"),
        ("c", "cancel", "cancel"),
        ("escape", "clear", "back"),
    ]

    def __init__(self, marks: Marks, actions: ListActions, place: ListPlace) -> None:
        super().__init__(marks)
        self.actions, self.place = actions, place
        self.runs = RunPane(marks, id="runs")
        self.detail = TextLines(marks, id="detail")
        self.runs.chosen, self.runs.is_moved = place.chosen, place.chosen is not None
        self.runs.sorted_by, self.runs.is_down = place.sorted_by, place.is_down
        self.runs.filter, self.runs.marked = place.filter, place.marked

    def compose(self) -> ComposeResult:
        yield from (self.heading, self.runs, self.detail, self.hint, self.prompt)

    def on_mount(self) -> None:
        self.set_interval(2.0, self.place_panes)
        self.runs.focus()

    @property
    def table(self) -> RunPane:
        return self.runs

    def on_listed(self, message: Listed) -> None:
        self.looked_at, self.problem = message.at, message.problem
        self.runs.take_rows(message.rows)
        self.place_panes()

    def on_table_pane_chosen(self, message: RunPane.Chosen) -> None:
        self.place_panes()
        if message.is_meant:
            self._leave(message.name)

    def place_panes(self) -> None:
        """Draw the head, the details and the hint; the table gets the remaining lines."""
        width, height = self.size.width, self.size.height
        self.detail.display = height >= LOW
        self.heading.take([self._render_head(width)])
        self.detail.take(self._render_detail(width)[:DETAIL])
        self.hint.take([self.render_hint(width)])

    def _render_head(self, width: int) -> Text:
        line = Text(style=theme.PLAIN).append(" your runs ", theme.TITLE)
        age_s = self.age_s
        if self.problem or (self.looked_at and age_s > LATE_S):
            age = f"this is {format_coarse_duration(age_s)} old" if age_s > LATE_S else ""
            said = ": ".join(filter(None, (age, self.problem)))
            return line.append(self.marks.fit(self.marks.plain(f" {said}"), width - 12), theme.WARM)
        if self.looked_at is None:
            return line.append(" reading ...", theme.DIM)
        counts = Counter(row.health for row in self.runs.all_rows)
        for word, count in counts.most_common():
            if len(line) + len(word) + 8 > width:
                line.append(f"  {self.marks.cut}", theme.DIM)
                break
            line.append(f"  {count} {word}", theme.DIM)
        if not counts:
            line.append(" none yet: vjob submit conf.yaml makes one", theme.DIM)
        return line

    def _render_detail(self, width: int) -> list[Text]:
        row = self.runs.row_here
        if row is None:
            return []
        plain = self.marks.plain
        lines = [Text(style=theme.PLAIN)]
        if row.verdict is not None:
            lines[0].append(f" {row.health} ", theme.badge(row.verdict.health)).append(" ")
        lines[0].append(plain(row.message or row.state), theme.STRONG)
        if row.verdict is not None and row.verdict.advice:
            advice = f"{self.marks.advice} {plain(row.verdict.advice)}"
            lines.append(Text(advice, style=theme.WARM))
        jobs = f"job {' '.join(row.jobs)}  " if row.jobs else ""
        lines.append(Text(plain(f"{jobs}{row.state}  {row.folder}"), style=theme.DIM))
        return [part for line in lines for part in line.wrap(self.app.console, max(width, 10))]

    def action_ask(self) -> None:
        self.open_prompt(FILTER, ASKS, self.runs.filter)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._leave_prompt()

    def _leave_prompt(self) -> None:
        self.close_prompt()
        self.runs.focus(scroll_visible=False)

    def action_clear(self) -> None:
        """Undo one thing: the prompt and its filter, or the marks."""
        if self.asked or self.runs.filter:
            self._leave_prompt()
            self.runs.set_filter("")
        else:
            self.runs.marked.clear()
            self.runs.show()
        self.place_panes()

    def action_mark(self) -> None:
        self.runs.mark()

    def action_compare(self) -> None:
        here = self.runs.row_here
        wanted = list(self.runs.marked)
        if len(wanted) == 1 and here is not None and here.folder not in wanted:
            wanted.append(here.folder)
        if len(wanted) < 2:
            self.say("mark two runs with space, then press d to compare them")
            return
        width = self.size.width
        self.start("compare", "comparing ...", lambda: self.actions.compare(wanted, width))

    def action_cancel(self) -> None:
        row = self.runs.row_here
        if row is None or row.is_over:
            self.say("there is nothing to cancel: the run is over" if row else "there is no run")
            return
        folder, ids = row.target, " and ".join(row.jobs) or row.run
        says = (
            f"vjob cancel {row.run}: ranks that can are asked to checkpoint and exit; then "
            f"{ids} ends, whatever it is doing."
        )

        def cancel(is_wanted: bool | None) -> None:
            if is_wanted:
                self.start("cancel", "cancelling ...", lambda: self.actions.cancel(folder))

        self.app.push_screen(Confirmation(self.marks, "Cancel the run?", says), cancel)

    def action_leave_list(self) -> None:
        self._leave(None)

    def _leave(self, folder: str | None) -> None:
        runs = self.runs
        self.place.chosen, self.place.filter = runs.chosen, runs.filter
        self.place.sorted_by, self.place.is_down = runs.sorted_by, runs.is_down
        self.app.exit(folder)


class RunListApp(KeyApp[str | None]):
    """Runs the list; ends with the folder of a run to open, or None."""

    def __init__(
        self,
        table: RunTable,
        actions: ListActions,
        place: ListPlace,
        *,
        interval_s: float,
        marks: Marks | None = None,
    ) -> None:
        super().__init__(marks)
        self.runs = table
        self.list_screen = RunListScreen(self.marks, actions, place)
        self._looks = Repeat(self._read, interval_s)

    @property
    def shown(self) -> RunListScreen:
        return self.list_screen

    @property
    def repeats(self) -> Sequence[Repeat]:
        return (self._looks,)

    def after_work(self) -> None:
        self._looks.poke()

    def _read(self) -> None:
        try:
            rows = tuple(self.runs.read())
            self.post(Listed(rows, self.runs.problem, time.monotonic()))
        except Exception as error:  # whatever it is: said on the screen, and tried again
            self.post(Failed(str(error) or type(error).__name__))


def run_list(
    table: RunTable, actions: ListActions, place: ListPlace, *, interval_s: float
) -> str | None:
    """Show the list until the user leaves it; return the folder of a run to open, or None."""
    return RunListApp(table, actions, place, interval_s=interval_s).run()
