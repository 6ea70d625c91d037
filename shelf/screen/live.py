"""The live screen: head, node table, GPUs, log, hints, and the actions of its keys.

Its data and the actions of keys come from threads, never from the screen's own, since they may wait
for a file server; the threads answer with the messages below.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult
from textual.message import Message
from textual.widgets import Input

from varuna_core.records import record as records
from vjob.jobs.monitor.model.snapshot import Line
from vjob.shelf.screen import theme
from vjob.shelf.screen.actions import JobActions
from vjob.shelf.screen.gpu_pane import GpuPane
from vjob.shelf.screen.heading import render_heading
from vjob.shelf.screen.key_screen import FILTER, KeyScreen
from vjob.shelf.screen.log_pane import LogPane
from vjob.shelf.screen.pages import KEYS, Confirmation, TextPage, render_verdict
from vjob.shelf.screen.table_pane import Flag, TablePane
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.formats import format_coarse_duration
from vjob.shelf.view.job import NODE_COLUMNS, NodeRow, View

HINT = 1
ONE_PANE = 9
"""Number of lines below which only the active pane is shown."""
GPU_PANE = 20
"""Number of lines below which GPUs are shown only if their pane is active."""
PANES = ("nodes", "gpus", "log")


@dataclass(frozen=True, kw_only=True)
class Heights:
    """Lines of each pane; 0 hides a pane."""

    nodes: int
    gpus: int
    log: int


def count_most_heading(height: int) -> int:
    """Return how many lines the heading above the panes may have on a screen of `height` lines."""
    return max(2, min(12, height // 3))


def arrange_panes(
    lines: int, *, active: str, is_zoomed: bool, num_nodes: int, num_gpus: int
) -> Heights:
    """Divide the lines between the heading and the key hints among the panes."""
    lines = max(0, lines)
    if is_zoomed or lines < ONE_PANE:
        return Heights(**{name: lines if name == active else 0 for name in PANES})
    gpus = 1 + min(num_gpus, 8 if lines >= 32 else 4)
    if lines < GPU_PANE:
        gpus = min(gpus, 4) if active == "gpus" else 0
    least = 2 + max(1, num_nodes)
    nodes = min(least, max(4, (lines - gpus) // 2))
    return Heights(nodes=nodes, gpus=gpus, log=lines - gpus - nodes)


class NodePane(TablePane[NodeRow]):
    """Node table whose cursor starts on the node at fault, until the user moves it."""

    columns = NODE_COLUMNS

    def __init__(self, marks: Marks, *, id: str) -> None:
        super().__init__(marks, id=id)
        self._num_planned: int | None = None

    def name_row(self, row: NodeRow) -> str:
        return row.node.name

    def render_words(self, row: NodeRow) -> str:
        return row.words

    def flag_row(self, row: NodeRow) -> Flag:
        return (self.marks.culprit, theme.BAD) if row.is_culprit else (" ", theme.BAD)

    def take(self, rows: tuple[NodeRow, ...], num_planned: int | None) -> None:
        """Show the rows of a new snapshot."""
        self._num_planned = num_planned
        culprit = next((row.node.name for row in rows if row.is_culprit), None)
        self.take_rows(rows, culprit)

    def make_heading(self) -> Text:
        title = self.begin_title("nodes")
        planned, have = self._num_planned, len(self.all_rows)
        missing = f"{have:,} of {planned:,}" if planned and planned != have else f"{have:,}"
        return title.append(f"  {missing}", theme.PLAIN)


class Looked(Message):
    """Message: the job was read."""

    def __init__(self, view: View, at: float, next_s: float) -> None:
        super().__init__()
        self.view = view
        self.at = at
        """Time of the read, by the monotonic clock."""
        self.next_s = next_s
        """Seconds until the next read begins."""


class Read(Message):
    """Message: new lines of a node, or of all nodes if None, were read."""

    def __init__(self, node: str | None, lines: list[Line], problem: str = "") -> None:
        super().__init__()
        self.node = node
        self.lines = lines
        self.problem = problem


class LinesWanted(Message):
    """Message: the log pane shows another node, whose lines must be read at once."""


LATE_LOOKS = 3
"""Intervals without new data after which the screen shows the age of its data."""
LEAST_LATE_S = 8.0
OVER = (records.ENDED, records.REFUSED)
PROMPTS = {
    "filter": "filter nodes: a part of name, group, state, GPU or error; Enter keeps, Esc clears",
    "search": "search the log: text, Enter",
}


class LiveScreen(KeyScreen):
    HINTS = (
        ("?", "help"), ("q", "quit"), ("Tab", "pane"), ("/", "search"), ("e", "error"),
        ("f", "filter"), ("a", "all logs"), ("v", "verdict"), ("s", "stacks"), ("r", "report"),
        ("c", "cancel"), ("z", "zoom"),
    )  # fmt: skip
    KEYS = KEYS
    BINDINGS = [  # noqa: RUF012 - Textual's own way
        ("q", "app.quit", "quit"),
        ("question_mark", "help", "help"),
        ("v", "verdict", "verdict"),
        ("tab", "next_pane(1)", "next pane"),
        ("shift+tab", "next_pane(-1)", "pane before"),
        ("z", "zoom", "zoom"),
        ("f", "ask('filter')", "filter"),
        ("less_than_sign", "sort_next(-1)", "sort by the previous column"),
        ("greater_than_sign", "sort_next(1)", "sort by the next column"),
        ("o", "turn", "other way round"),
        ("a", "all_logs", "all logs"),
        ("space", "follow", "follow"),
        ("slash", "ask('search')", "search"),
        ("n", "go_on(-1)", "older"),
        ("N", "go_on(1)", "newer"),
        ("e", "go_to_known(1)", "next error"),
        ("E", "go_to_known(-1)", "error before"),
        ("s", "stacks", "stacks"),
        ("r", "report", "report"),
        ("c", "cancel", "cancel"),
        ("escape", "leave", "back"),
    ]

    def __init__(self, marks: Marks, actions: JobActions, interval_s: float) -> None:
        super().__init__(marks)
        self.actions = actions
        self.interval_s = interval_s
        self.view: View | None = None
        self.wanted_node: str | None = None
        """Node whose lines the log shows; read by the thread that fetches them."""
        self.active = PANES[0]
        self.is_zoomed = False
        self.nodes = NodePane(marks, id="nodes")
        self.gpus = GpuPane(marks, id="gpus")
        self.log_pane = LogPane(marks, id="log")
        self._next_s = interval_s
        self._notice = ""
        self._shows_all = False
        self._heights: tuple[Heights, int] | None = None

    def compose(self) -> ComposeResult:
        yield from (self.heading, self.nodes, self.gpus, self.log_pane, self.hint, self.prompt)

    def on_mount(self) -> None:
        self.set_interval(self.interval_s, self.poll_age)
        self.nodes.focus()

    @property
    def table(self) -> NodePane:
        return self.nodes

    @property
    def panes(self) -> dict[str, NodePane | GpuPane | LogPane]:
        return {"nodes": self.nodes, "gpus": self.gpus, "log": self.log_pane}

    def on_looked(self, message: Looked) -> None:
        self.view, self.looked_at, self.problem = message.view, message.at, ""
        self._next_s = message.next_s
        self.nodes.take(message.view.rows, message.view.snapshot.num_nodes)
        self._show_gpus()
        self.place_panes()

    def on_read(self, message: Read) -> None:
        self.log_pane.take(message.node, message.lines, message.problem)

    def on_table_pane_chosen(self, message: NodePane.Chosen) -> None:
        if message.is_meant:
            self._shows_all = False
            self.activate("log")
        self._show_gpus()
        self._show_log()

    def on_descendant_focus(self) -> None:
        """Make a pane active when it is clicked."""
        name = self.focused.id if self.focused else None
        if name in PANES and name != self.active:
            self.active = name
            self.place_panes()

    def poll_age(self) -> None:
        """Show a notice if nothing new has come for long."""
        if self._notice != self._choose_notice():
            self.place_panes()

    def _choose_notice(self) -> str:
        is_late = self.age_s > max(LEAST_LATE_S, LATE_LOOKS * self._next_s)
        if not self.problem and not is_late:
            return ""
        age = format_coarse_duration(self.age_s)
        shown = f"everything shown is {age} old: " if self.looked_at else ""
        return shown + (self.problem or "the file system or the scheduler does not answer")

    def place_panes(self) -> None:
        """Give every pane its lines, and the head its text."""
        height, width = self.size.height, self.size.width
        self._notice = self._choose_notice()
        head = self._render_head(width, count_most_heading(height))
        heights = arrange_panes(
            height - len(head) - HINT,
            active=self.active,
            is_zoomed=self.is_zoomed,
            num_nodes=len(self.nodes.rows),
            num_gpus=self.gpus.num_rows,
        )
        if (heights, len(head)) != self._heights:
            self._heights = (heights, len(head))
            self.heading.styles.height = len(head)
            for name, pane in self.panes.items():
                lines = getattr(heights, name)
                pane.display = lines > 0
                pane.styles.height = lines
        self.heading.take(head)
        self.hint.take([self.render_hint(width)])
        pane = self.panes[self.active]
        if not self.asked and self.focused is not pane and pane.display:
            pane.focus(scroll_visible=False)

    def _render_head(self, width: int, most: int) -> list[Text]:
        if self.view is None:
            words = self._notice or "reading ..."
            return [Text(self.marks.plain(words), style=theme.WARM if self._notice else theme.DIM)]
        view = self.view
        return render_heading(view.snapshot, view.verdict, self.marks, width, most, self._notice)

    def _show_gpus(self) -> None:
        if self.view is not None:
            row = self.view.find_row(self.nodes.chosen)
            snapshot = self.view.snapshot
            self.gpus.take(row, snapshot.now, snapshot.num_gpus)

    def _show_log(self) -> None:
        self.wanted_node = None if self._shows_all else self.nodes.chosen
        if self.wanted_node != self.log_pane.node:
            self.log_pane.show_node(self.wanted_node)
            self.post_message(LinesWanted())

    def activate(self, name: str) -> None:
        self.active = name
        self.place_panes()
        self.panes[name].focus(scroll_visible=False)

    def action_next_pane(self, direction: int) -> None:
        self.activate(PANES[(PANES.index(self.active) + direction) % len(PANES)])

    def action_zoom(self) -> None:
        self.is_zoomed = not self.is_zoomed
        self.place_panes()

    def action_all_logs(self) -> None:
        self._shows_all = not self._shows_all
        self._show_log()

    def action_follow(self) -> None:
        self.log_pane.toggle_follow()

    def action_go_on(self, direction: int) -> None:
        self.log_pane.go_on(direction)

    def action_go_to_known(self, direction: int) -> None:
        self.log_pane.go_to_known(direction)

    def action_ask(self, what: str) -> None:
        """Open the prompt for the filter or a search."""
        self.open_prompt(what, PROMPTS[what], self.nodes.filter if what == FILTER else "")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        asked = self.close_prompt()
        if asked == "search":
            self.log_pane.search(event.value)
            self.activate("log")
        else:
            self.activate("nodes")

    def action_leave(self) -> None:
        """Undo one thing: the prompt, the zoom, the search, the filter."""
        if self.asked:
            if self.close_prompt() == FILTER:
                self.nodes.set_filter("")
            self.activate(self.active)
        elif self.is_zoomed:
            self.action_zoom()
        elif self.log_pane.searched or self.log_pane.found is not None:
            self.log_pane.search("")
        elif self.nodes.filter:
            self.nodes.set_filter("")

    def action_verdict(self) -> None:
        if self.view is not None:
            lines = render_verdict(self.view.snapshot, self.view.verdict, self.marks)
            self.app.push_screen(TextPage(self.marks, "verdict", lines))

    def action_stacks(self) -> None:
        self.start("stacks", "asking every rank for its stack ...", self.actions.stacks)

    def action_report(self) -> None:
        self.start("report", "writing the report ...", self.actions.report)

    def action_cancel(self) -> None:
        says = self.actions.cancel_text
        if not says:
            self.say("there is no job to cancel: these are only logs")
        elif self.view is not None and self.view.snapshot.record_state in OVER:
            self.say("there is nothing to cancel: the job is over")
        else:
            self.app.push_screen(Confirmation(self.marks, "Cancel the job?", says), self._cancel)

    def _cancel(self, is_wanted: bool | None) -> None:
        if is_wanted:
            self.start("cancel", "cancelling ...", self.actions.cancel)
