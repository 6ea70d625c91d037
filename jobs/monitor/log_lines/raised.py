"""Distinguish exceptions in a log that ended their process from those that were caught and
printed."""

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
"""Exit codes above this number stand for an end by a signal, as in a shell: 128 + signal."""


class RaisedLines:
    """The exceptions with a traceback in one log file."""

    def __init__(self) -> None:
        self._readers: dict[int | None, TracebackReader] = {}
        """Readers of tracebacks, keyed by rank."""
        self._found: dict[int, Raised] = {}
        """Exceptions, keyed by the place of their line."""

    def may_skip(self, data: bytes) -> bool:
        """Return True if no traceback begins or continues in these lines."""
        is_idle = all(one.is_idle for one in self._readers.values())
        return is_idle and b"Traceback (" not in data and b'  File "' not in data

    def feed(self, rank: int | None, text: str, place: int) -> bool:
        """Read a line with its indentation; return True if it is the exception's line after a
        traceback."""
        found = self._readers.setdefault(rank, TracebackReader()).feed(text, place)
        if found is not None:
            self._found[place] = found
        return found is not None

    def name(self, line: Line, place: int) -> str:
        """Return the value of `Line.raised` for the line at `place`, as far as the log has been
        read."""
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
    """Return False if the line reports an exception that did not end its process.

    `own` is the exit of the line's rank; `code` is the job's exit code if the ranks left no exits.
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
