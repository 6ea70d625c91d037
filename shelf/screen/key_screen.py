"""Base of both screens of `vjob status`, the live one and the list: a line of key hints, work of
keys in threads beside the screen, and data read repeatedly by a thread.

    a key ──► KeyScreen.start ── WorkWanted ──► KeyApp, a thread ── Done ──► hint's line, or page
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from rich.segment import Segment
from rich.text import Text
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from vjob.shelf.screen import theme
from vjob.shelf.screen.pages import TextPage, render_keys
from vjob.shelf.screen.pane import TextLines
from vjob.shelf.screen.table_pane import TablePane
from vjob.shelf.screen.theme import Marks, choose_marks

MESSAGE_S = 20.0
FILTER = "filter"
"""Purpose of the prompt that filters the table."""
MOST_SHARE = 0.5
"""Greatest share of time spent reading: after a read of a minute follows a pause of a minute."""
STYLE = f"""
Screen {{ background: {theme.BACKGROUND}; layout: vertical; overflow: hidden; }}
Pane {{ width: 100%; height: 1fr; background: {theme.BACKGROUND}; }}
#heading, #hint, #detail {{ background: {theme.PANEL}; }}
#hint {{ height: 1; }}
#prompt {{ height: 1; border: none; padding: 0; background: {theme.PANEL}; display: none; }}
"""
Result = TypeVar("Result")


class Failed(Message):
    """Message: the data of the screen could not be read."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.problem = problem


class Done(Message):
    """Message: the work of a key is done, or has failed."""

    def __init__(self, what: str, text: str, is_good: bool) -> None:
        super().__init__()
        self.what = what
        self.text = text
        self.is_good = is_good


class WorkWanted(Message):
    """Message: a key asks for work that takes time; Done reports its end."""

    def __init__(self, what: str, work: Callable[[], str]) -> None:
        super().__init__()
        self.what = what
        self.work = work


class KeyScreen(Screen[None]):
    """Screen whose last line shows the keys or, for a while, the result of one."""

    HINTS: ClassVar[Sequence[tuple[str, str]]] = ()
    KEYS: ClassVar[Sequence[tuple[str, str]]] = ()
    """All keys, with their descriptions."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks
        self.heading = TextLines(marks, id="heading")
        self.hint = TextLines(marks, id="hint")
        self.prompt = Input(id="prompt", compact=True)
        self.prompt.cursor_blink = False
        self.asked = ""
        """Purpose of the prompt."""
        self.problem = ""
        """Why the last read failed."""
        self.looked_at: float | None = None
        self._begun = time.monotonic()
        self.message = ""
        """Message shown instead of the hints for a while."""
        self._num_said = 0

    def place_panes(self) -> None:
        """Lay out and draw all parts."""
        raise NotImplementedError

    @property
    def table(self) -> TablePane[Any]:
        """The table that keys sort and filter."""
        raise NotImplementedError

    @property
    def age_s(self) -> float:
        """Seconds since the data was read, or since the first read began."""
        return time.monotonic() - (self.looked_at or self._begun)

    def on_resize(self) -> None:
        self.place_panes()

    def on_failed(self, message: Failed) -> None:
        self.problem = message.problem
        self.place_panes()

    def action_help(self) -> None:
        self.app.push_screen(TextPage(self.marks, "keys", render_keys(self.KEYS)))

    def action_sort_next(self, direction: int) -> None:
        self.table.sort_next(direction)

    def action_turn(self) -> None:
        self.table.sort(self.table.sorted_by)

    def open_prompt(self, asked: str, placeholder: str, value: str = "") -> None:
        self.asked = asked
        self.prompt.placeholder, self.prompt.value = placeholder, value
        self.prompt.display, self.hint.display = True, False
        self.prompt.focus(scroll_visible=False)

    def close_prompt(self) -> str:
        """Close the prompt; return the purpose for which it was opened."""
        asked, self.asked = self.asked, ""
        self.prompt.display, self.hint.display = False, True
        return asked

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.asked == FILTER:
            self.table.set_filter(event.value)
            self.place_panes()

    def say(self, message: str) -> None:
        """Show a message instead of the hints for a while."""
        self.message = message
        self.place_panes()
        if message:
            self._num_said += 1
            number = self._num_said
            self.set_timer(MESSAGE_S, lambda: self._unsay(number))

    def _unsay(self, number: int) -> None:
        if number == self._num_said:
            self.say("")

    def render_hint(self, width: int) -> Text:
        if self.message:
            return Text(self.marks.plain(self.message), style=theme.WARM)
        line = Text(style=theme.PLAIN)
        for key, does in self.HINTS:
            if len(line) + len(key) + len(does) + 3 > width:
                break
            line.append(f"{key} ", theme.KEY).append(f"{does}  ", theme.DIM)
        return line

    def start(self, what: str, says: str, work: Callable[[], str]) -> None:
        """Start a key's work that takes time, and show a message."""
        self.say(says)
        self.post_message(WorkWanted(what, work))

    def on_done(self, message: Done) -> None:
        """Show a result of one line in the place of the hints, else as a page."""
        text = message.text.strip()
        if message.is_good and "\n" not in text and len(text) < self.size.width:
            self.say(f"{message.what}: {text}")
            return
        title = message.what if message.is_good else f"{message.what} did not work"
        lines = [Text(self.marks.plain(line), style=theme.PLAIN) for line in text.split("\n")]
        self.say("")
        self.app.push_screen(TextPage(self.marks, title, lines))


class Repeat:
    """Repeats work in a thread, which nobody waits for if it hangs.

    Between two calls it waits for the interval, or for as long as the work took.
    """

    def __init__(self, work: Callable[[], object], interval_s: float) -> None:
        self.interval_s = interval_s
        self._work = work
        self._wake = threading.Event()
        self._over = False
        # A daemon: Textual's own workers are waited for at exit, and a dead mount never answers.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Work at once, or again as soon as the present work is done."""
        self._wake.set()

    def stop(self) -> None:
        """Stop after the present work, without waiting for it."""
        self._over = True
        self._wake.set()

    def _run(self) -> None:
        while not self._over:
            begun = time.monotonic()
            self._work()
            took = time.monotonic() - begun
            self._wake.wait(max(self.interval_s, took / MOST_SHARE - took))
            self._wake.clear()


class LightFilter(LineFilter):
    """Filter that draws in the colours for a light background."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, None if style is None else theme.lighten(style), control)
            for text, style, control in segments
        ]


LIGHT = LightFilter()


class KeyApp(App[Result]):
    """Application that shows one screen, passes it the data that a thread reads repeatedly, and
    does the work of its keys."""

    TITLE = "vjob status"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [("ctrl+c,ctrl+q", "quit", "quit"), ("ctrl+z", "suspend_process", "suspend")]  # noqa: RUF012 - Textual's own way
    CSS = STYLE

    def __init__(self, marks: Marks | None) -> None:
        super().__init__()
        self.animation_level = "none"
        self._signal: int | None = None
        self.marks = marks or choose_marks(os.environ)
        self.is_light = theme.is_light(os.environ) and not self.no_color
        if self.is_light:
            self.theme = "textual-light"  # of what the user types

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return [*filters, LIGHT] if self.is_light else filters

    @property
    def shown(self) -> Screen[None]:
        raise NotImplementedError

    @property
    def repeats(self) -> Sequence[Repeat]:
        raise NotImplementedError

    def run(self, **options: Any) -> Result | None:
        """Show the screen until the user leaves it; a signal ends the process afterwards."""
        result = super().run(**options)
        if self._signal is not None:
            signal.raise_signal(self._signal)
        return result

    def _leave_on(self, number: int) -> None:
        self._signal = number
        self.exit()

    async def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                asyncio.get_running_loop().add_signal_handler(number, self._leave_on, number)
        await self.push_screen(self.shown)
        for repeat in self.repeats:
            repeat.start()

    def on_unmount(self) -> None:
        for repeat in self.repeats:
            repeat.stop()

    def on_work_wanted(self, message: WorkWanted) -> None:
        """Do the work in a thread of its own."""

        def run() -> None:
            try:
                text, is_good = message.work(), True
            except Exception as error:  # shown to the user; whatever it is, the screen goes on
                text, is_good = str(error) or type(error).__name__, False
            self.post(Done(message.what, text, is_good))
            self.after_work()

        threading.Thread(target=run, daemon=True).start()

    def after_work(self) -> None:
        """Hook called in the thread after a key's work."""

    def post(self, message: Message) -> None:
        """Send a message to the screen, from any thread."""
        try:
            self.shown.post_message(message)
        except RuntimeError:  # the screen was closed meanwhile
            self.on_unmount()
