"""Signals of the agent: noted by handlers, acted on by whoever waits in the main thread.

An agent that was started over ssh also learns from its standard input, the tether, that it must
end. The run's master holds the other end and writes a byte now and then. The end of the input means
that the master or the ssh between them was killed; silence means that the master's machine or the
network is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Any, Sequence

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
GONE = "the run's master or the connection to it ended"
SILENT = "no sign of life from the run's master"


class Signals:
    """Handlers, and a wait that any signal or any thread's `wake` ends early."""

    def __init__(self) -> None:
        self.ending: str | None = None
        """What first asked the agent to end: the name of a signal, GONE or SILENT."""
        self._forward: list[int] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._tether: int | None = None
        self._silence_s = 0.0
        self._heard = 0.0
        for number in ENDING:
            # Who started us with nohup wants us to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_ending)
        for number in FORWARDED:
            signal.signal(number, self._on_forwarded)
        # A handler that does nothing, for without one a child's end does not wake the wait.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def hold(self, tether: int, silence_s: float) -> None:
        """Ask the agent to end when the file descriptor `tether` reaches its end, or brings nothing
        for `silence_s` seconds."""
        os.set_blocking(tether, False)
        self._tether, self._silence_s, self._heard = tether, silence_s, time.monotonic()

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Return at a signal, at a `wake`, when one of `also` can be read, or after `seconds`."""
        inputs = [self._reader, *also] + ([] if self._tether is None else [self._tether])
        select.select(inputs, [], [], max(seconds, 0))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass
        if self._tether is not None:
            self._feel(self._tether)

    def _feel(self, tether: int) -> None:
        gone = None
        try:
            while os.read(tether, 4096):
                self._heard = time.monotonic()
            gone = GONE
        except BlockingIOError:
            if time.monotonic() - self._heard > self._silence_s:
                gone = SILENT
        except OSError:
            gone = GONE
        if gone is not None:
            self.ending = self.ending or gone
            self._tether = None

    def wake(self) -> None:
        """End the wait, from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def forward(self, number: int) -> None:
        """Record a signal for the ranks that this process did not get as a signal; may be called
        from any thread."""
        self._forward.append(number)
        self.wake()

    def take_forwarded(self) -> list[int]:
        """Return the signals for the ranks that were received since the last call."""
        taken, self._forward = self._forward, []
        return taken

    def _on_ending(self, number: int, frame: Any) -> None:
        self.ending = self.ending or signal.Signals(number).name

    def _on_forwarded(self, number: int, frame: Any) -> None:
        self._forward.append(number)
