"""Incremental reader of the end of a growing file: what was added since the last poll, bounded.

    first look     the last bytes, from the first line that begins in them
    later looks    what was appended; where that is more than a look may read, its last part
    renamed away, shrunk, written anew     the file under this name, as at a first look
    gone, stale, forbidden                 nothing new; `problem` says why
    asked for what was skipped             its lines with one of some words, the last ones first

Unlike `records.logs.tail.Follower`, which owes its caller every line, this may skip, and
says so. Lines stay bytes: most are only searched, and `show` is for those that people see.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records.files import open_file, open_to_read
from varuna_core.records.logs.tail import clean

TAIL_BYTES = 64 * 1024
"""Of a file that is seen for the first time."""
LOOK_BYTES = 4 * 1024 * 1024
"""Of what was appended between two polls."""
LONGEST = 16 * 1024
"""Of a line without an end so far; its beginning is kept."""
SHOWN_CHARS = 2000
SEARCH_BYTES = 512 * 1024 * 1024
"""Bytes of the skipped parts of all files that are searched between two polls, at most."""
SEARCH_S = 0.5
SEARCHED_BYTES = 1024 * 1024
"""At a time."""


class Budget:
    """Bytes and seconds that searches may still take."""

    def __init__(
        self,
        num_bytes: int = SEARCH_BYTES,
        seconds: float = SEARCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left, self._clock = num_bytes, clock
        self._until = clock() + seconds

    def take(self, num_bytes: int) -> bool:
        """False once the bytes or the seconds are used up."""
        if self._left <= 0 or self._clock() > self._until:
            return False
        self._left -= num_bytes
        return True


@dataclass(frozen=True, kw_only=True)
class Added:
    """Whole lines that are new."""

    data: bytes
    """Each line with its end."""
    start: int
    """Where in the file they begin."""
    num_skipped: int
    """Bytes before them that no look has read."""
    is_anew: bool
    """This is the first poll, or the file is another than at the last one."""


class Tail:
    """The end of one file."""

    def __init__(
        self, path: Path | str, *, tail_bytes: int = TAIL_BYTES, head_bytes: int = 0
    ) -> None:
        self.path = str(path)
        self.size = 0
        self.mtime = 0.0
        self.problem = ""
        """Why the last poll failed; empty too where there is no such file."""
        self.rest = b""
        """The line that has no end yet: of a progress bar its last state."""
        self.is_missing = True
        self.head = b""
        """The file's first bytes, where `head_bytes` asks for them and the first look left them."""
        self._tail_bytes, self._head_bytes = tail_bytes, head_bytes
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and mtime of the last look."""
        self._offset = 0
        self._inode = -1
        self._first = 0
        """Offset at which the first look began to read."""
        self._is_within = False
        """What comes next belongs to a line that is not kept whole."""
        self._is_beginning_known = False
        self.skipped: tuple[int, int] | None = None
        """Begin and end of what a look skipped and no search has read; of several looks the last
        one's."""

    def search_back(self, marks: Collection[bytes], budget: Budget) -> Iterator[tuple[int, bytes]]:
        """Place and text of the lines with a mark in what was skipped, the last line first.

        A search that the budget ends goes on at the next call; `skipped` says where.
        """
        if self.skipped is None:
            return
        low, end = self.skipped
        rest = b""
        """Bytes of a line that begins before the part that is read."""
        try:
            with open_file(Path(self.path)) as handle:
                while end > low:
                    begin = max(low, end - SEARCHED_BYTES)
                    if not budget.take(end - begin):
                        return
                    data = _read_at(handle.fileno(), begin, end - begin) + rest
                    cut = data.find(b"\n") + 1 if begin > low else 0
                    is_whole = begin == low or cut > 0
                    rest = data[:cut] if is_whole else data[:LONGEST]
                    end = begin
                    if is_whole:
                        self.skipped = (low, begin + len(rest))
                        yield from _find_marked(data, cut, begin, marks)
        except OSError:
            return
        self.skipped = None

    def read_head(self, num_bytes: int) -> bytes:
        """The first bytes of the file that the first look did not read, up to a bound."""
        if self.head or not self._first:
            return self.head
        try:
            with open_file(Path(self.path)) as handle:
                return handle.read(min(self._first, num_bytes))
        except OSError:
            return b""

    def poll(self) -> Added | None:
        """Read what is new; None where nothing is, which costs one stat."""
        try:
            if self._seen is not None:
                found = os.stat(self.path)
                if (found.st_ino, found.st_size, found.st_mtime_ns) == self._seen:
                    return None
            return self._read()
        except FileNotFoundError:
            self.is_missing, self.problem, self._seen = True, "", None
            self._inode = -1
        except OSError as error:
            self.problem, self._seen = error.strerror or str(error), None
        return None

    def _read(self) -> Added | None:
        fd = open_to_read(Path(self.path))
        try:
            found = os.fstat(fd)  # of what is open: the name may be another file's by now
            is_anew = self._is_anew(found)
            if is_anew:
                self._offset, self.rest, self._is_within = 0, b"", False
            start = self._offset
            bound = self._tail_bytes if is_anew else LOOK_BYTES
            first = max(start, found.st_size - bound)
            data = _read_at(fd, first, found.st_size - first)
            if is_anew:
                self._first = first
            if is_anew and self._head_bytes:
                self.head = os.pread(fd, min(first, self._head_bytes), 0) if first else b""
        finally:
            os.close(fd)
        self._seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        self._inode = found.st_ino
        self.size, self.mtime = found.st_size, found.st_mtime
        self.is_missing, self.problem = False, ""
        self._offset = first + len(data)
        if first > start:
            self.rest, self._is_within, self._is_beginning_known = b"", True, False
        added = self._take(data, first, first - start, is_anew)
        if is_anew:
            self.skipped = None
        if first > start:
            self.skipped = (start, first if added is None else max(first, added.start))
        return added

    def _is_anew(self, found: os.stat_result) -> bool:
        """Being out of reach for a while is no reason to read again: only another file is."""
        return found.st_ino != self._inode or found.st_size < self._offset

    def _take(self, data: bytes, first: int, skipped: int, is_anew: bool) -> Added | None:
        """Keep what has no end yet; the rest are whole lines."""
        begin = 0
        lines = b""
        if self._is_within:
            begin = data.find(b"\n") + 1
            part = data[:begin] if begin else data
            if self._is_beginning_known:
                lines = self.rest + b"\n" if begin else b""
            else:
                skipped += begin
            if not begin:
                if not self._is_beginning_known:
                    self.rest = _last_state(self.rest + part)[-LONGEST:]
                return self._make_added(b"", first, skipped, is_anew)
            self.rest, self._is_within = b"", False
        start = first + begin - len(lines) - len(self.rest)
        end = max(begin, data.rfind(b"\n") + 1)
        if end > begin:
            lines += self.rest + data[begin:end]
            self.rest = b""
        self._hold(data[end:])
        return self._make_added(lines, max(0, start), skipped, is_anew)

    def _make_added(self, lines: bytes, start: int, skipped: int, is_anew: bool) -> Added | None:
        if not lines and not is_anew and not skipped and not self.rest:
            return None
        return Added(data=lines, start=start, num_skipped=skipped, is_anew=is_anew)

    def _hold(self, data: bytes) -> None:
        """Keep the last state of a progress bar, the beginning of an endless line."""
        self.rest = _last_state(self.rest + data)
        if len(self.rest) > LONGEST:
            self.rest = self.rest[:LONGEST]
            self._is_within = self._is_beginning_known = True


def _read_at(fd: int, first: int, size: int) -> bytes:
    data = os.pread(fd, size, first)
    while len(data) < size:
        more = os.pread(fd, size - len(data), first + len(data))
        if not more:
            break
        data += more
    return data


def _find_marked(
    data: bytes, first: int, place: int, marks: Collection[bytes]
) -> Iterator[tuple[int, bytes]]:
    """The lines of `data` from `first` on with a mark, the last one first."""
    found: set[int] = set()
    for mark in marks:
        at = data.find(mark, first)
        while at >= 0:
            found.add(max(first, data.rfind(b"\n", first, at) + 1))
            end = data.find(b"\n", at)
            at = -1 if end < 0 else data.find(mark, end)
    for begin in sorted(found, reverse=True):
        end = data.find(b"\n", begin)
        yield place + begin, data[begin : len(data) if end < 0 else end]


def _last_state(line: bytes) -> bytes:
    """Without what a carriage return overwrote; a last one may be half of a line's end."""
    return line[line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1 :]


def show(line: bytes) -> str:
    """A line as a terminal may get it: of a progress bar the last state, escapes made visible."""
    text = line.rstrip(b"\r\n")
    text = text[text.rfind(b"\r") + 1 :]
    shown = text[: 4 * SHOWN_CHARS].decode(errors="replace")
    if not shown.isprintable():
        shown = clean(shown)
    return shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + " ..."
