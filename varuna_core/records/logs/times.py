"""Read the times at which the lines of a log were written, and compute the offset of two clocks.

With <node>.times, logs of several nodes are merged by time, while a log holds only what the ranks
printed:

    1700000000.512 0 0          what follows byte 0 of .out and byte 0 of .err came then or later
    1700000001.730 8123 410

There are at most four marks per second; if a log is cut in its middle, they move with its lines.
Offsets between clocks are computed from messages in both directions, as in NTP; the runtime sends
the messages:

own clock        asked ──┐                   ┌─► answered
rank 0's clock           └─► heard ─ replied ┘
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, List, Optional, Tuple

from varuna_core.records.files import open_file

MARK_S = 0.25
BAR_SLACK_S = 0.5
"""Seconds by which the recorded time of a progress bar may be late, since its state is written once
it has not changed for a while."""


@dataclass(frozen=True)
class LineTimes:
    """The marks of one log: offsets and times, both increasing."""

    offsets: Tuple[int, ...]
    times: Tuple[float, ...]

    def find(self, offset: int) -> Optional[float]:
        """Return the time at which the line at `offset` was written, or a slightly earlier time."""
        at = bisect_right(self.offsets, offset) - 1
        return self.times[at] if at >= 0 else None

    def find_exact(self, offset: int) -> Tuple[Optional[float], float]:
        """Return the last mark's time, and how much later the line may be (0 if it has a mark)."""
        at = bisect_right(self.offsets, offset) - 1
        if at < 0:
            return None, 0.0
        return self.times[at], 0.0 if self.offsets[at] == offset else MARK_S


CUT_NOTE = b"vjob: %15d bytes are left out here (cluster.log_limit_mb)\n"
_CUT_NOTE = re.compile(rb"^vjob: +(\d{1,15}) bytes are left out here \(", re.MULTILINE)


@dataclass(frozen=True)
class Cut:
    """A cut: bytes that were removed from the middle of a log at some moment."""

    place: int
    """Offset of the line that reports the cut."""
    begin: int
    """Offset, before the cut, of the text that follows the removed bytes."""
    end: int
    """Offset of the same text after the cut."""
    num_bytes: int
    """Total number of bytes removed so far."""

    def move(self, place: int) -> int:
        """Return the present offset of a line, given its offset before the cut."""
        if place >= self.begin:
            return place - self.begin + self.end
        return min(place, self.place)


def count_left_out(data: bytes) -> int:
    """Return the number of bytes that a log reports as removed, by its notice in `data`; 0 if there
    is no such notice."""
    found = _CUT_NOTE.search(data) if b"bytes are left out here" in data else None
    return int(found[1]) if found else 0


def format_mark(time: float, out: int, err: int) -> bytes:
    return b"%.3f %d %d\n" % (time, out, err)


def parse_marks(data: bytes) -> Tuple[LineTimes, LineTimes]:
    """Parse the marks of .out and .err, skipping torn lines; a clock set back stands still."""
    out: Dict[int, float] = {}
    err: Dict[int, float] = {}
    latest = float("-inf")
    for line in data.split(b"\n")[:-1]:
        words = line.split()
        try:
            time, places = float(words[0]), (int(words[1]), int(words[2]))
        except (ValueError, IndexError):
            continue
        if not abs(time) < float("inf"):
            continue
        latest = max(latest, time)
        for found, place in ((out, places[0]), (err, places[1])):
            # Where nothing was written since the mark before, the later one is nearer the truth.
            if not found or place >= next(reversed(found)):
                found[place] = latest
    return LineTimes(tuple(out), tuple(out.values())), LineTimes(tuple(err), tuple(err.values()))


def move_marks(data: bytes, column: int, cut: Cut) -> bytes:
    """Return the marks of a log after a cut; `column` is 0 for .out, 1 for .err."""
    found: List[bytes] = []
    for line in data.split(b"\n")[:-1]:
        words = line.split()
        try:
            words[1 + column] = b"%d" % cut.move(int(words[1 + column]))
        except (ValueError, IndexError):
            continue
        if found and found[-1].split()[1:] == words[1:]:
            found.pop()  # of marks at one place the last counts
        found.append(b" ".join(words))
    return b"".join(line + b"\n" for line in found)


PIECE_BYTES = 64 * 1024
MOST_BAD = 10_000
"""Maximum number of invalid lines; the rest of a file with more is not read."""


class MarkReader:
    """Reader of a log's marks for increasing offsets. The file may grow; each byte is read once,
    and only a piece of the file is in memory."""

    def __init__(self, path: Path, *, is_err: bool, state: Any = None) -> None:
        """`state` is the result of another reader's `save`: this reader continues from there."""
        self._path, self._column = path, 2 if is_err else 1
        self._inode, self._place, self._at, self._latest = 0, 0, 0, float("-inf")
        self._ahead: Deque[Tuple[int, float, int]] = deque()
        """Marks that were read and not passed, each with the place of the line after it."""
        self._is_at_end, self._num_bad = False, 0
        if state is not None:
            self._inode, self._place, self._at, latest = state
            self._latest = float("-inf") if latest is None else latest
        self._next_place = self._place

    def save(self) -> List[Any]:
        """Return the position in the file of marks, for the `state` of another MarkReader."""
        is_none = self._latest == float("-inf")
        return [self._inode, self._place, self._at, None if is_none else self._latest]

    def look(self) -> None:
        """Note that the file may have grown or been replaced."""
        self._is_at_end = False
        self._ahead.clear()  # read again: the places of a log that was cut are lower
        self._next_place = self._place

    def find_exact(self, offset: int) -> Tuple[Optional[float], float]:
        """Return the time of the line at `offset`, and how much later it may have been written; an
        offset before that of the last call gets the same answer."""
        while self._ahead or self._read(offset):
            place, time, line_end = self._ahead[0]
            if place > offset:
                break
            self._ahead.popleft()
            self._at, self._latest, self._place = place, time, line_end
        if self._latest == float("-inf"):
            return None, 0.0
        return self._latest, 0.0 if self._at == offset else MARK_S

    def _read(self, offset: int) -> bool:
        """Continue reading the file until a mark is buffered, and skip pieces of the file whose
        marks all lie at or before `offset`. Return False if the file has no more marks."""
        while not self._is_at_end and not self._ahead:
            data = self._read_piece()
            end = data.rfind(b"\n") + 1
            self._is_at_end = end == 0 or self._num_bad > MOST_BAD
            last = self._parse(data[data.rfind(b"\n", 0, max(0, end - 1)) + 1 : end])
            if last is not None and self._at <= last[0] <= offset:  # no mark of it is asked for
                self._at, self._latest = last[0], max(self._latest, last[1])
                self._next_place = self._place = self._next_place + end
                continue
            for line in data[:end].splitlines(keepends=True):
                self._next_place += len(line)
                mark = self._parse(line)
                if mark is None:
                    self._num_bad += 1
                    continue
                at, latest = self._ahead[-1][:2] if self._ahead else (self._at, self._latest)
                if mark[0] >= at:
                    self._ahead.append((mark[0], max(latest, mark[1]), self._next_place))
        return bool(self._ahead)

    def _read_piece(self) -> bytes:
        try:
            with open_file(self._path) as handle:
                found = os.fstat(handle.fileno())
                if found.st_ino != self._inode or found.st_size < self._next_place:
                    # Made again where a log was cut: its marks have moved.
                    self._inode, self._at, self._latest = found.st_ino, 0, float("-inf")
                    self._place = self._next_place = 0
                handle.seek(self._next_place)
                return handle.read(PIECE_BYTES)
        except OSError:
            return b""

    def _parse(self, line: bytes) -> Optional[Tuple[int, float]]:
        """Parse the place and the time of a mark; None for another line."""
        words = line.split()
        try:
            place, time = int(words[self._column]), float(words[0])
        except (ValueError, IndexError):
            return None
        return (place, time) if abs(time) < float("inf") else None


KEPT_BYTES = 256 * 1024
"""Bytes that are read at the end of a growing file of marks: at least an hour of lines."""
MOST_MARKS = 12_000


class TimesTail:
    """The last marks of a growing file; each `read` parses what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: Optional[int] = None
        self._rest = b""
        self._held: List[bytes] = []
        self._parsed: Optional[Tuple[LineTimes, LineTimes]] = None

    def read(self) -> Tuple[LineTimes, LineTimes]:
        """Return the marks of .out and of .err."""
        try:
            with open_file(self._path) as handle:
                size = handle.seek(0, 2)
                if self._place is None or not 0 <= size - self._place <= KEPT_BYTES:
                    self._place, self._rest, self._held = max(0, size - KEPT_BYTES), b"", []
                    self._parsed = None
                    if self._place:  # within a line
                        handle.seek(self._place)
                        self._place += len(handle.readline(KEPT_BYTES))
                handle.seek(self._place)
                data = handle.read(KEPT_BYTES)
        except OSError:
            data = b""
        if data or self._parsed is None:
            self._place = (self._place or 0) + len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._held = [*self._held, *lines][-MOST_MARKS:]
            self._parsed = parse_marks(b"\n".join(self._held) + b"\n")
        return self._parsed


@dataclass(frozen=True)
class Exchange:
    """One question and its answer, in nanoseconds of `TraceWriter.read_clock`."""

    asked: int
    """Own clock when the question was sent."""
    heard: int
    """Rank 0's clock when it received the question."""
    replied: int
    """Rank 0's clock when it sent the answer."""
    answered: int
    """Own clock when the answer was received."""


@dataclass(frozen=True)
class Offset:
    """Seconds to add to the own clock to get rank 0's clock; the error is at most the residual."""

    offset_ns: int
    residual_ns: int


def find_offset(exchange: Exchange) -> Offset:
    """Return the offset of an exchange; the residual is half the time of messages in flight."""
    there = exchange.heard - exchange.asked
    back = exchange.replied - exchange.answered
    return Offset((there + back) // 2, max(0, (there - back + 1) // 2))


def choose_offset(exchanges: Iterable[Exchange]) -> Optional[Offset]:
    """Return the offset of the fastest exchange, which has the smallest error, or None."""
    return min(map(find_offset, exchanges), key=lambda found: found.residual_ns, default=None)
