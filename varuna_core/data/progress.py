"""Show progress as one line; silent unless the stream is a terminal.

The line is written at most once a second, in plain ASCII and under 80 columns, so that a slow ssh
connection keeps up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

EVERY_S = 1.0
BAR = 24


class ProgressLine:
    """Progress line on a terminal, counting bytes; prints nothing elsewhere."""

    def __init__(
        self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = max(total, 1)
        self._stream = stream
        self._clock = clock
        self._is_shown = stream.isatty()
        self._begin = self._last = clock()
        self._first_done: int | None = None

    def show(self, done: int, note: str = "") -> None:
        """Show `done` bytes of the total; `note` is short, such as a number of tokens."""
        now = self._clock()
        if self._first_done is None:
            self._first_done = done
        if not self._is_shown or now - self._last < EVERY_S:
            return
        self._last = now
        line = self._render(done, now - self._begin, note)
        self._stream.write(f"\r{line[:79]:<79}")
        self._stream.flush()

    def _render(self, done: int, elapsed_s: float, note: str) -> str:
        share = min(done / self._total, 1.0)
        rate = (done - (self._first_done or 0)) / max(elapsed_s, 1e-9)
        left = f"{(self._total - done) / rate:,.0f} s left" if rate > 0 else ""
        bar = ("#" * round(share * BAR)).ljust(BAR, ".")
        return f"[{bar}] {share:4.0%}  {rate / 1e6:.1f} MB/s  {left}  {note}"

    def close(self) -> None:
        if self._is_shown:
            self._stream.write("\r" + " " * 79 + "\r")
            self._stream.flush()
