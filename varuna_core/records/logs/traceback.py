"""`TracebackReader`: exceptions that a Python process reports with a traceback, from its lines.

Python writes a traceback of the exception that ends the process, and a program that catches an
exception may write one, too. The last traceback of the main thread may be that of the end, if the
exit code is also 1; tracebacks of other threads, destructors or child processes and earlier ones
are not.

    Traceback (most recent call last):           ─┐
      File "t.py", line 3, in load                │ a chain: one exception, raised from another
    KeyError: 'path'                              │
                                                  │
    During handling of the above exception, ...   │
                                                  │
    Traceback (most recent call last):            │
      File "t.py", line 9, in <module>            │
    ValueError: no data                          ─┘ its last line is what ended the process
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from varuna_core.facts.deciding import FALLOUT

MARK = "Traceback (most recent call last)"
PREFIX = re.compile(r"\[rank\d+\]: ?")
"""Prefix of each line of a traceback that torch's hook writes."""
_FRAME = re.compile(r'  File ".*", line \d+')
_NAME = re.compile(r"[A-Za-z_][\w.]*(:|$)")
"""Beginning of an exception's line: the name of its class."""
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_ASIDE = re.compile(
    r"Exception (ignored|in)\b|Error in |Process \S+:$|Task exception was never|--- Logging error"
    r"|Original Traceback|Unhandled exception in|\bin thread\b"
)
"""Matches the line before a traceback that did not end the main thread."""
SUMMARIES = re.compile(r"(\w+\.)*(ChildFailedError|CalledProcessError|ProcessExitedException)\b")
"""Exceptions with which a launcher reports that a child process failed; the child's own exception
counts instead."""


@dataclass(frozen=True)
class Raised:
    """One exception with a traceback."""

    text: str
    """Class of the exception and the first line of its message."""
    place: int
    """Position of that line, as counted by the caller."""
    first: int
    """Position of the first line of its chain."""
    is_aside: bool = False
    """True if it was reported outside of the main thread: by another thread, a destructor or a
    child process."""


class TracebackReader:
    """The lines of one process, in order, without tags of ranks."""

    def __init__(self) -> None:
        self.last: Optional[Raised] = None
        """The last exception of the main thread that is not a launcher's summary."""
        self._own: Optional[Raised] = None
        """The last of these exceptions that does not report the end of another process."""
        self._summary: Optional[Raised] = None
        self._is_open = self._has_mark = self._is_linked = self._is_aside = False
        self._before = ""
        self._first = 0

    @property
    def is_idle(self) -> bool:
        """True if a line without a mark of a traceback changes nothing."""
        return not self._is_open and not self._is_linked

    def get_end(self) -> Optional[Raised]:
        """Return the exception that ended the process, if one did; below a launcher, whose
        processes share this output, the one that is not a consequence of another's."""
        return (self._own if self._summary is not None else None) or self.last or self._summary

    def feed(self, line: str, place: int) -> Optional[Raised]:
        """Read one line; return the exception that the line reports, if any."""
        line = PREFIX.sub("", line, count=1).rstrip()
        if not line:
            return None
        before, self._before = self._before, line
        if MARK in line:
            self._begin(place, is_aside=bool(_ASIDE.search(before)), has_mark=True)
        elif self._is_open:
            if not line[0].isspace():
                return self._close(line, place)
        elif _FRAME.match(line):
            self._begin(place, is_aside=bool(_ASIDE.search(before)), has_mark=False)
        elif line.startswith(_LINKS):
            self._is_linked = True
        elif self._is_linked:
            self._is_linked = False
        return None

    def _begin(self, place: int, *, is_aside: bool, has_mark: bool) -> None:
        if self._is_open and not has_mark:
            return
        if not self._is_linked:
            self._first, self._is_aside = place, is_aside
        self._is_open, self._has_mark, self._is_linked = True, has_mark, False

    def _close(self, line: str, place: int) -> Optional[Raised]:
        self._is_open = False
        if not _NAME.match(line):
            return None
        found = Raised(line, place, self._first, self._is_aside)
        if SUMMARIES.match(line):
            self._summary = found
        elif not self._is_aside:
            self.last = found
            self._own = self._own if FALLOUT.search(line) else found
        return found


def quotes_exception(text: str) -> bool:
    """Return True for a line that contains an exception somewhere, as in a program's log."""
    return re.search(r"\b[A-Z]\w*(Error|Exception): ", text) is not None


def looks_raised(text: str) -> bool:
    """Return True for a line that looks like an exception's, with or without a traceback."""
    return re.match(r"(\w+\.)*[A-Z]\w*(Error|Exception|Interrupt|Exit|Warning)\b", text) is not None
