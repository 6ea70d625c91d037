"""Signals of the agent: noted by handlers, acted on by whoever waits in the main thread."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Handlers, and a wait that any signal or any thread's `wake` ends early."""

    def __init__(self) -> None:
        self.ending: str | None = None
        """Name of the first signal that asked the agent to end."""
        self._forward: list[int] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in ENDING:
            signal.signal(number, self._on_ending)
        for number in FORWARDED:
            signal.signal(number, self._on_forwarded)
        # A handler that does nothing, for without one a child's end does not wake the wait.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, seconds: float) -> None:
        """Return at a signal, at a `wake`, or after `seconds`."""
        select.select([self._reader], [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def wake(self) -> None:
        """End the wait, from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def forward(self, number: int) -> None:
        """A signal for the ranks that came another way; from any thread."""
        self._forward.append(number)
        self.wake()

    def take_forwarded(self) -> list[int]:
        """Signals for the ranks since the last call."""
        taken, self._forward = self._forward, []
        return taken

    def _on_ending(self, number: int, frame: Any) -> None:
        self.ending = self.ending or signal.Signals(number).name

    def _on_forwarded(self, number: int, frame: Any) -> None:
        self._forward.append(number)
