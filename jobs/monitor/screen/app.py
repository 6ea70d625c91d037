"""Textual application of the live screen, and the threads that read for it.

Reading happens beside it, so that a file server or a scheduler that hangs leaves a screen that
answers and says how old it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from textual.app import App
from textual.message import Message

from vjob.jobs.monitor.model.snapshot import EXIT_CODES, Health, Verdict
from vjob.jobs.monitor.screen import theme
from vjob.jobs.monitor.screen.live import (
    Actions,
    Done,
    Failed,
    LiveScreen,
    Looked,
    Read,
    SnapshotSource,
    WorkWanted,
)
from vjob.jobs.monitor.screen.theme import Marks, choose_marks
from vjob.jobs.monitor.screen.view import View

MOST_SHARE = 0.5
"""Of the time that looking may take: a look of a minute is followed by a pause of one."""


class Repeat:
    """Repeats work in a thread, which may hang without anybody waiting for it.

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
        """Work at once, or again as soon as the work at hand is done."""
        self._wake.set()

    def stop(self) -> None:
        """After the work at hand; does not wait for it."""
        self._over = True
        self._wake.set()

    def _run(self) -> None:
        while not self._over:
            begun = time.monotonic()
            self._work()
            took = time.monotonic() - begun
            self._wake.wait(max(self.interval_s, took / MOST_SHARE - took))
            self._wake.clear()


INTERVAL_S = 2.0
ENDED_S = 30.0
"""Between looks at a job that is over."""
OVER = (Health.DONE, Health.DEAD)


class StatusApp(App[None]):
    """Feeds the live screen; holds what outlives it, such as the last verdict."""

    TITLE = "vjob status"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [("ctrl+c,ctrl+q", "quit", "quit"), ("ctrl+z", "suspend_process", "suspend")]  # noqa: RUF012 - Textual's own way
    CSS = f"""
    Screen {{ background: {theme.BACKGROUND}; layout: vertical; overflow: hidden; }}
    Pane {{ width: 100%; height: 1fr; background: {theme.BACKGROUND}; }}
    #heading, #hint {{ background: {theme.PANEL}; }}
    #hint {{ height: 1; }}
    #prompt {{ height: 1; border: none; padding: 0; background: {theme.PANEL}; display: none; }}
    """

    def __init__(
        self,
        source: SnapshotSource,
        actions: Actions,
        *,
        interval_s: float,
        marks: Marks | None = None,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.source = source
        self.actions = actions
        self.interval_s = interval_s
        self.marks = marks or choose_marks(os.environ)
        self.verdict: Verdict | None = None
        """The last one; None before the first look."""
        self.live = LiveScreen(self.marks, actions, interval_s)
        self._looks = Repeat(self._read_job, interval_s)
        self._reads = Repeat(self._read_lines, interval_s)

    async def on_mount(self) -> None:
        await self.push_screen(self.live)
        self._looks.start()
        self._reads.start()

    def on_unmount(self) -> None:
        self._looks.stop()
        self._reads.stop()

    def on_lines_wanted(self) -> None:
        self._reads.poke()

    def on_work_wanted(self, message: WorkWanted) -> None:
        """Beside the screen, in a thread of its own."""

        def run() -> None:
            try:
                text, is_good = message.work(), True
            except Exception as error:  # shown to the user; whatever it is, the screen goes on
                text, is_good = str(error) or type(error).__name__, False
            self._tell(Done(message.what, text, is_good))

        threading.Thread(target=run, daemon=True).start()

    @property
    def exit_code(self) -> int:
        """Exit code of the last verdict."""
        return self.verdict.exit_code if self.verdict else EXIT_CODES[Health.UNKNOWN]

    def _read_job(self) -> None:
        try:
            snapshot, verdict = self.source.read()
            self.verdict = verdict
            self._tell(Looked(View.make(snapshot, verdict), time.monotonic()))
            self._looks.interval_s = ENDED_S if verdict.health in OVER else self.interval_s
        except Exception as error:  # whatever it is: said on the screen, and tried again
            self._tell(Failed(str(error) or type(error).__name__))

    def _read_lines(self) -> None:
        node = self.live.wanted_node
        try:
            self._tell(Read(node, self.actions.lines.read_new(node)))
        except Exception as error:  # as above
            self._tell(Read(node, [], problem=str(error) or type(error).__name__))

    def _tell(self, message: Message) -> None:
        try:
            self.live.post_message(message)
        except RuntimeError:  # the screen was closed meanwhile
            self._looks.stop()
            self._reads.stop()


def run_screen(source: SnapshotSource, actions: Actions, *, interval_s: float = INTERVAL_S) -> int:
    """Show the screen until it is left; returns the exit code of the last verdict."""
    app = StatusApp(source, actions, interval_s=interval_s)
    app.run()
    return app.exit_code
