"""`LastWords`: the last line of a rank on stderr, and the exception that may have ended it."""

from __future__ import annotations

import re

from varuna_core.facts.sentences import is_warning
from varuna_core.records.logs.traceback import TracebackReader

LAST_ERROR_CHARS = 500
WENT_ON_S = 5.0
"""An error did not end a rank that wrote to stdout more than this number of seconds after it."""
_WORD = re.compile(rb"\w")
_HEADER = re.compile(r":\d+: \w*Warning: ")
"""Pattern of a warning that Python prints; the line below it shows the source, indented."""


class LastWords:
    """Reads the output of one rank as it is written."""

    def __init__(self) -> None:
        self._last = self._named = b""
        """The last line of stderr that is neither empty nor a warning, and the last one that names
        an exception."""
        self._follows_warning = False
        self._tracebacks = TracebackReader()
        self._out_at = self._err_at = self._said_at = self._raised_at = float("-inf")

    def note_out(self, now: float) -> None:
        """Note that the rank has written to stdout."""
        self._out_at = now

    def note_err(self, lines: list[bytes], now: float) -> None:
        """Read new lines of the rank's stderr."""
        for line in lines:
            if not line.strip():
                continue
            self._err_at = now
            text = line[:LAST_ERROR_CHARS].decode("utf-8", "replace")
            is_source = self._follows_warning and text.startswith("  ")
            self._follows_warning = _HEADER.search(text) is not None
            if not is_warning(text) and not is_source:
                self._last, self._said_at = line, now
                if b"Error: " in line or b"Exception: " in line:
                    self._named = line
            found = self._tracebacks.feed(text, 0)
            if found is not None and not found.is_aside:
                self._raised_at = now

    @property
    def last_at(self) -> float:
        """Time of the last line on either stream."""
        return max(self._out_at, self._err_at)

    @property
    def error(self) -> str:
        """The last line on stderr that is no warning; empty if the rank has written to stdout well
        after that line."""
        if self._out_at > self._said_at + WENT_ON_S:
            return ""
        # torchrun ends what it says of a rank that failed with a line of ====.
        last = self._last if _WORD.search(self._last) else self._named or self._last
        return last.decode("utf-8", "replace").strip()[:LAST_ERROR_CHARS]

    @property
    def exception(self) -> str:
        """The exception of the last traceback; empty if the rank has written to stdout well after
        that exception."""
        found = self._tracebacks.get_end()
        if found is None or self._out_at > self._raised_at + WENT_ON_S:
            return ""
        return found.text[:LAST_ERROR_CHARS]
