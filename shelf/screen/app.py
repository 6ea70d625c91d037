"""Textual application of the live screen, with the threads that read for it.

Reading in threads keeps the screen responsive if a file server or a scheduler hangs; it then shows
the age of its data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vjob.jobs.monitor.model.snapshot import ENDED, EXIT_CODES, Health, Verdict
from vjob.jobs.monitor.readers.job_reader import JudgedReader
from vjob.shelf.screen.actions import JobActions
from vjob.shelf.screen.key_screen import Failed, KeyApp, Repeat
from vjob.shelf.screen.live import LiveScreen, Looked, Read
from vjob.shelf.screen.theme import Marks
from vjob.shelf.view.job import View

INTERVAL_S = 2.0
ENDED_S = 30.0
"""Seconds between reads of a job that is over."""


class StatusApp(KeyApp[None]):
    """Application of the live screen; keeps what is needed after the screen has closed, such as the
    last verdict."""

    def __init__(
        self,
        reader: JudgedReader,
        actions: JobActions,
        *,
        interval_s: float,
        marks: Marks | None = None,
    ) -> None:
        super().__init__(marks)
        self.reader = reader
        self.actions = actions
        self.interval_s = interval_s
        self.verdict: Verdict | None = None
        """The last verdict; None before the first read."""
        self.live = LiveScreen(self.marks, actions, interval_s)
        self._looks = Repeat(self._read_job, interval_s)
        self._reads = Repeat(self._read_lines, interval_s)

    @property
    def shown(self) -> LiveScreen:
        return self.live

    @property
    def repeats(self) -> Sequence[Repeat]:
        return (self._looks, self._reads)

    def on_lines_wanted(self) -> None:
        self._reads.poke()

    @property
    def exit_code(self) -> int:
        """Exit code of the last verdict."""
        return self.verdict.exit_code if self.verdict else EXIT_CODES[Health.UNKNOWN]

    def _read_job(self) -> None:
        try:
            snapshot, verdict = self.reader.read()
            self.verdict = verdict
            next_s = ENDED_S if verdict.health in ENDED else self.interval_s
            self.post(Looked(View.make(snapshot, verdict), time.monotonic(), next_s))
            self._looks.interval_s = next_s
        except Exception as error:  # whatever it is: said on the screen, and tried again
            self.post(Failed(str(error) or type(error).__name__))

    def _read_lines(self) -> None:
        node = self.live.wanted_node
        try:
            self.post(Read(node, self.actions.lines.read_new(node)))
        except Exception as error:  # as above
            self.post(Read(node, [], problem=str(error) or type(error).__name__))


def run_screen(reader: JudgedReader, actions: JobActions, *, interval_s: float = INTERVAL_S) -> int:
    """Show the screen until the user leaves it; return the exit code of the last verdict."""
    app = StatusApp(reader, actions, interval_s=interval_s)
    app.run()
    return app.exit_code
