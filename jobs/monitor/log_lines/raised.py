"""Exceptions in one log: which of them ended their process, and which were caught and printed."""

from __future__ import annotations

from varuna_core.records.exits import BY_EXCEPTION, RankExit
from varuna_core.records.logs.traceback import (
    Raised,
    TracebackReader,
    looks_raised,
    quotes_exception,
)
from vjob.jobs.monitor.log_lines.errors import strip_tags
from vjob.jobs.monitor.model.snapshot import Line

SHELL = 128
"""Exit codes from here on are signals, as a shell says them."""


class RaisedLines:
    """The exceptions of one log file that have a traceback."""

    def __init__(self) -> None:
        self._readers: dict[int | None, TracebackReader] = {}
        """By rank."""
        self._found: dict[int, Raised] = {}
        """By place."""

    def may_skip(self, data: bytes) -> bool:
        """True for lines among which no traceback goes on, or begins."""
        is_idle = all(one.is_idle for one in self._readers.values())
        return is_idle and b"Traceback (" not in data and b'  File "' not in data

    def feed(self, rank: int | None, text: str, place: int) -> bool:
        """Read a line, its indentation kept; True for that of an exception with a traceback."""
        found = self._readers.setdefault(rank, TracebackReader()).feed(text, place)
        if found is not None:
            self._found[place] = found
        return found is not None

    def name(self, line: Line, place: int) -> str:
        """`Line.raised` of the line at `place`, by the part of the log that has been read."""
        found = self._found.get(place)
        if found is None:
            text = strip_tags(line.text)
            is_quoted = quotes_exception(text)
            return "printed" if looks_raised(text) else "quoted" if is_quoted else ""
        last = self._readers[line.rank].get_end()
        if found.is_aside or last is None:
            return "aside"
        return "last" if found.first >= last.first else "earlier"


def may_have_ended(line: Line, own: RankExit | None, code: int | None) -> bool:
    """True unless the line is of an exception that did not end its process.

    `own` is the exit of the line's rank, `code` that of the job where ranks left none.
    """
    if not line.raised:
        return True
    text = strip_tags(line.text)
    has_traceback = line.raised not in ("quoted", "printed")  # sys.exit(text) prints without one
    if own is not None and own.is_uncaught is False and has_traceback:
        return False
    if own is not None and own.exception and line.raised != "last":
        return own.exception in text  # it left it in its error file
    code = own.code if own is not None else code
    if code is not None and code != BY_EXCEPTION and code < SHELL:
        return False
    if line.raised == "quoted":
        return True  # a program may log why it exits 1
    is_last_word = own is not None and own.last_error.startswith(text[:80])
    return line.raised == "last" or (line.raised == "printed" and is_last_word)
