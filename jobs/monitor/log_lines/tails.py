"""Incremental reader of a growing file's end: each poll reads what was appended, up to a bound.

    first poll     the last bytes, from the first line that begins in them
    later polls    what was appended; if that is more than a poll may read, its last part
    renamed away, shrunk, rewritten         the file under this name, as at a first poll
    gone, stale, forbidden                 nothing new; `problem` says why
    asked for what was skipped             its lines with one of some words, the last ones first

Unlike `records.logs.tail.Follower`, which returns every line, this reader may skip lines and
reports it. Lines stay bytes, since most are only searched; `show` converts those that are shown.
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
"""Bytes read from the end of a file at its first poll."""
LOOK_BYTES = 4 * 1024 * 1024
"""Most bytes read of what was appended between two polls."""
LONGEST = 16 * 1024
"""Most bytes kept of a line without an end; its beginning is kept."""
SHOWN_CHARS = 2000
SEARCH_BYTES = 512 * 1024 * 1024
"""Most bytes of the skipped parts of all files that are searched between two polls."""
SEARCH_S = 0.5
SEARCHED_BYTES = 1024 * 1024
"""Bytes searched at a time."""


class Budget:
    """The bytes and seconds that searches may still use."""

    def __init__(
        self,
        num_bytes: int = SEARCH_BYTES,
        seconds: float = SEARCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left, self._clock = num_bytes, clock
        self._until = clock() + seconds

    def take(self, num_bytes: int) -> bool:
        """Take bytes from the budget; return False once the bytes or the seconds are used up."""
        if self._left <= 0 or self._clock() > self._until:
            return False
        self._left -= num_bytes
        return True


@dataclass(frozen=True, kw_only=True)
class Added:
    """Complete lines that were added to a log file since the last poll."""

    data: bytes
    """The lines, each with its line end."""
    start: int
    """Offset of the lines in the file."""
    num_skipped: int
    """Bytes before these lines that were skipped."""
    is_anew: bool
    """True at the first poll, and if the file has been replaced or truncated since the last
    poll."""


@dataclass(frozen=True, kw_only=True)
class _Fetched:
    """One reading of a file."""

    found: os.stat_result
    is_anew: bool
    """True if the file is another than that of the last poll, or was truncated."""
    first: int
    """Offset of `data` in the file."""
    data: bytes
    head: bytes


class Tail:
    """Reader of the end of one file."""

    def __init__(
        self, path: Path | str, *, tail_bytes: int = TAIL_BYTES, head_bytes: int = 0
    ) -> None:
        self.path = str(path)
        self.size = 0
        self.mtime = 0.0
        self.problem = ""
        """Why the last poll failed; also empty if the file does not exist."""
        self.rest = b""
        """The last line, if it has no end yet; of a progress bar, its last state."""
        self.is_missing = True
        self.head = b""
        """The file's first bytes, if `head_bytes` asks for them and the first poll skipped them."""
        self._tail_bytes, self._head_bytes = tail_bytes, head_bytes
        self._is_fetched = False
        self._fetched: _Fetched | OSError | None = None
        """What `fetch` has found for the next poll; None for a file that has not changed."""
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and mtime at the last poll."""
        self._offset = 0
        self._inode = -1
        self._first = 0
        """Offset at which the first poll began to read."""
        self._is_within = False
        """True if the next bytes continue a line that is not kept as a whole."""
        self._is_beginning_known = False
        self.skipped: tuple[int, int] | None = None
        """Begin and end of the part that the last skipping poll left out and no search has read
        yet."""

    def search_back(self, marks: Collection[bytes], budget: Budget) -> Iterator[tuple[int, bytes]]:
        """Yield offset and text of the lines with a mark in the skipped part, the last line first.

        A search that runs out of budget continues at the next call, from `skipped`.
        """
        if self.skipped is None:
            return
        low, end = self.skipped
        rest = b""
        """Bytes of a line that begins before the part being read."""
        try:
            with open_file(self.path) as handle:
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
        """Return the beginning of the file, which the first poll skipped, up to `num_bytes`."""
        if self.head or not self._first:
            return self.head
        try:
            with open_file(self.path) as handle:
                return handle.read(min(self._first, num_bytes))
        except OSError:
            return b""

    def fetch(self) -> None:
        """Read what was added to the file, for the next `poll` to split into lines. Several files
        may be fetched at once, each in a thread."""
        self._is_fetched = True
        try:
            self._fetched = self._read() if self._has_changed() else None
        except OSError as error:
            self._fetched = error

    def poll(self) -> Added | None:
        """Return the lines that were added since the last call, reading them unless `fetch` has
        done so. Return None if there are none, which costs one stat."""
        if not self._is_fetched:
            self.fetch()
        fetched, self._fetched, self._is_fetched = self._fetched, None, False
        if isinstance(fetched, _Fetched):
            return self._note(fetched)
        if isinstance(fetched, FileNotFoundError):
            self.is_missing, self.problem, self._seen = True, "", None
            self._inode = -1
        elif fetched is not None:
            self.problem, self._seen = fetched.strerror or str(fetched), None
        return None

    def _has_changed(self) -> bool:
        if self._seen is None:
            return True
        found = os.stat(self.path)
        return (found.st_ino, found.st_size, found.st_mtime_ns) != self._seen

    def _read(self) -> _Fetched:
        fd = open_to_read(self.path)
        try:
            found = os.fstat(fd)  # of what is open: the name may be another file's by now
            # Replaced or truncated: a file that was only out of reach for a while is neither.
            is_anew = found.st_ino != self._inode or found.st_size < self._offset
            start = 0 if is_anew else self._offset
            bound = self._tail_bytes if is_anew else LOOK_BYTES
            first = max(start, found.st_size - bound)
            data = _read_at(fd, first, found.st_size - first)
            has_head = is_anew and self._head_bytes and first
            head = os.pread(fd, min(first, self._head_bytes), 0) if has_head else b""
        finally:
            os.close(fd)
        return _Fetched(found=found, is_anew=is_anew, first=first, data=data, head=head)

    def _note(self, fetched: _Fetched) -> Added | None:
        found, first, is_anew = fetched.found, fetched.first, fetched.is_anew
        if is_anew:
            self._offset, self.rest, self._is_within = 0, b"", False
            self._first = first
            self.head = fetched.head
        start = self._offset
        self._seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        self._inode = found.st_ino
        self.size, self.mtime = found.st_size, found.st_mtime
        self.is_missing, self.problem = False, ""
        self._offset = first + len(fetched.data)
        if first > start:
            self.rest, self._is_within, self._is_beginning_known = b"", True, False
        added = self._take(fetched.data, first, first - start, is_anew)
        if is_anew:
            self.skipped = None
        if first > start:
            self.skipped = (start, first if added is None else max(first, added.start))
        return added

    def _take(self, data: bytes, first: int, skipped: int, is_anew: bool) -> Added | None:
        """Split new bytes into lines: return the complete ones, and keep the rest."""
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
        """Keep the last state of a progress bar, or the beginning of an overlong line."""
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
    """Yield the lines of `data` from `first` on that have a mark, the last line first."""
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
    """Return the text after the last carriage return except a final one (half of a CRLF)."""
    return line[line.rfind(b"\r", 0, max(len(line) - 1, 0)) + 1 :]


def show(line: bytes) -> str:
    """Convert a line to text that is safe for terminals: the last state of a progress bar, with
    escapes made visible."""
    text = line.rstrip(b"\r\n")
    text = text[text.rfind(b"\r") + 1 :]
    shown = text[: 4 * SHOWN_CHARS].decode(errors="replace")
    if not shown.isprintable():
        shown = clean(shown)
    return shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + " ..."
