"""Work that is done again and again beside the screen, and may hang without anybody waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MOST_SHARE = 0.5
"""Of the time that looking may take: a look of a minute is followed by a pause of one."""


class Repeat:
    """Calls `work`, then waits: the interval, or as long as the work took."""

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
