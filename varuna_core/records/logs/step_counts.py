"""ranks/<rank>.steps: the number of optimizer steps of a rank, and their times; small, with a fixed
size.

    head, 84 bytes    count, time of the first and the last step; written every tenth of a second
    body, 8 kB        written once a second and at the end
      durations       number and seconds of steps by duration, four classes a doubling
      longest         the 32 longest ones, each with its step
      points          (count, time) once a second for the last two minutes; of earlier seconds,
                      up to 256 evenly chosen ones, including the first

Each part ends with its checksum: of a file that is truncated, or read while it is written, only
complete parts are used. Nothing is written for a program without steps. The counter itself is
trace/counter.py; it loads only this file into the ranks' own Python, so this file imports nothing
of ours.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import deque
from dataclasses import dataclass
from heapq import heappush, heapreplace
from math import frexp
from typing import Deque, List, Optional, Tuple

MAGIC = b"VJS1"
HEAD_S = 0.1
"""Seconds between two writes of the head."""
POINT_S = 1.0
"""Seconds, at the beginning, between two points and between two writes of the body."""
MOST_POINTS = 256
NUM_RECENT = 128
NUM_LONGEST = 32
LEAST_BIT = -13
"""Durations below 2**-14 s are one class."""
NUM_CLASSES = 4 * 32
CAPTURED = 1
"""Flag: a step was captured in a CUDA graph, whose replays are not counted."""
SLOW = 2.5
"""A step that takes longer than this multiple of the median contains a pause."""
EMPTY_S = 10.0
"""Age up to which a file without a head belongs to a process that is about to write it."""

_HEAD = struct.Struct("<4sIIIQQQQdddQ")
"""Magic, flags, processes that wrote it one after the other, their pid, PID namespace and start
time, steps, steps of the processes before; times of the beginning, the first and the last step; and
steps that the body has."""
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
_CLASSES = struct.Struct(f"<{NUM_CLASSES}I{NUM_CLASSES}d")
_LONG = struct.Struct("<Qdd")
_LONGEST = struct.Struct("<" + "Qdd" * NUM_LONGEST)
_NUM = struct.Struct("<I")
_POINTS = struct.Struct("<I" + "Qd" * (MOST_POINTS + NUM_RECENT))
_POINT = struct.Struct("<Qd")
BODY_BYTES = _CLASSES.size + _LONGEST.size + _POINTS.size + _CRC.size
FILE_BYTES = HEAD_BYTES + BODY_BYTES


@dataclass(frozen=True)
class LongStep:
    """One of the longest steps, measured from the end of the previous step to its own end."""

    step: int
    """Number of the step in this count, from 2."""
    end_at: float
    seconds: float


@dataclass(frozen=True)
class StepCounts:
    """How many optimizer steps one rank made in one attempt, when, and how long they took. Times
    are those of the rank's wall clock."""

    count: int
    opened_at: float
    """Time at which the rank finished importing torch's optimizers."""
    first_at: float
    """End of the first step."""
    last_at: float
    """End of the last step."""
    starts: int = 1
    """Number of processes of this rank that made steps in this attempt; the figures are those of
    the last one."""
    earlier: int = 0
    """Number of steps made by this rank's earlier processes."""
    is_captured: bool = False
    """True if steps run in a CUDA graph: `count` is then a lower bound."""
    pid: int = 0
    """The process that did the last steps, in its own PID namespace."""
    points: Tuple[Tuple[int, float], ...] = ()
    """(count, time): the first step, evenly some, and those of the last `NUM_RECENT` seconds."""
    durations: Tuple[Tuple[int, float], ...] = ()
    """(number, total seconds) for each class of steps with similar durations, shortest first."""
    longest: Tuple[LongStep, ...] = ()
    """The longest steps, in order of time."""

    @property
    def is_of_all(self) -> bool:
        """True if one process made all steps of the rank and counted each of them."""
        return self.starts == 1 and not self.is_captured

    @property
    def num_timed(self) -> int:
        """Number of steps with a known duration: all but the first, and but those of the last
        second if the rank was killed."""
        return sum(number for number, _ in self.durations)

    @property
    def median_s(self) -> Optional[float]:
        """Median time of a step, by its place in a class of durations; None before the second step.

        A class is taken to be spread evenly about its mean, so the error is below one eighth."""
        left = self.num_timed / 2
        for number, seconds in self.durations:
            if number >= left:
                mean = seconds / number
                part, bit = frexp(mean)
                eighths = 8 * part
                width = min(eighths % 1, 1 - eighths % 1) * 2.0**bit / 8
                return mean + (2 * left / number - 1) * width
            left -= number
        return None

    @property
    def pauses_s(self) -> Optional[float]:
        """Pauses between the first and the last step: the time by which steps longer than `SLOW`
        times the median exceed the median."""
        usual = self.median_s
        if usual is None:
            return None
        slow = [(n, s) for n, s in self.durations if s > SLOW * usual * n]
        return sum(seconds - number * usual for number, seconds in slow)

    @property
    def steps_s(self) -> Optional[float]:
        """Time of all steps without pauses. The begin of the first step is not known, so it counts
        as long as the median one."""
        usual, pauses = self.median_s, self.pauses_s
        if usual is None or pauses is None:
            return None
        return max(0.0, self.last_at - self.first_at - pauses) + usual

    def count_at(self, at: float) -> float:
        """Return the number of steps done at a time, interpolated between two points."""
        if at < self.first_at:
            return 0.0
        before = self.points[0] if self.points else (self.count, self.last_at)
        for count, time_ in self.points:
            if time_ > at:
                share = (at - before[1]) / (time_ - before[1])
                return before[0] + share * (count - before[0])
            before = count, time_
        return float(self.count)


class Tally:
    """The optimizer steps that this process has made, timed by a clock that never jumps."""

    __slots__ = (
        "count", "first", "flags", "interval_s", "last", "longest", "nums", "opened", "points",
        "recent", "seconds", "wall",
    )  # fmt: skip

    def __init__(self, opened: float, wall: float) -> None:
        """`opened` and `wall` are the present time, by the monotonic clock and since 1970."""
        self.opened, self.wall = opened, wall
        self.count = self.flags = 0
        self.first = self.last = opened
        self.nums = [0] * NUM_CLASSES
        self.seconds = [0.0] * NUM_CLASSES
        self.longest: List[Tuple[float, int, float]] = []
        """Seconds, step number and end of the longest steps, as a heap."""
        self.points: List[Tuple[int, float]] = []
        self.recent: Deque[Tuple[int, float]] = deque(maxlen=NUM_RECENT)
        self.interval_s = POINT_S

    def add(self, now: float, num: int = 1) -> None:
        """Count a step that has just ended; `num` steps if they are noticed together."""
        if self.count:
            took = (now - self.last) / num
            part, bit = frexp(took)
            at = 4 * (bit - LEAST_BIT) + int(8 * part) - 4 if took > 0 else 0
            at = 0 if at < 0 else at if at < NUM_CLASSES else NUM_CLASSES - 1
            self.nums[at] += num
            self.seconds[at] += now - self.last
            if len(self.longest) < NUM_LONGEST:
                heappush(self.longest, (took, self.count + num, now))
            elif took > self.longest[0][0]:
                heapreplace(self.longest, (took, self.count + num, now))
        else:
            self.first = now
            self.points.append((num, now))
        self.count += num
        self.last = now

    def note(self) -> None:
        """Keep the last step as a point, and half of the points when there are too many."""
        if self.recent and self.last - self.recent[-1][1] < POINT_S:
            return
        self.recent.append((self.count, self.last))
        if self.points and self.last - self.points[-1][1] < self.interval_s:
            return
        self.points.append((self.count, self.last))
        if len(self.points) == MOST_POINTS:
            del self.points[1::2]
            self.interval_s *= 2

    def pack_body(self) -> bytes:
        """Encode the body of the file; `pack_head` stores the number of steps that it covers."""
        at = self._at
        ordered = sorted(self.longest, key=lambda item: item[1])
        longest = [value for took, step, end in ordered for value in (step, at(end), took)]
        longest += [0, 0.0, 0.0] * (NUM_LONGEST - len(ordered))
        kept = sorted({*self.points, *self.recent})
        points = [value for count, end in kept for value in (count, at(end))]
        points += [0, 0.0] * (MOST_POINTS + NUM_RECENT - len(kept))
        data = _CLASSES.pack(*self.nums, *self.seconds) + _LONGEST.pack(*longest)
        data += _POINTS.pack(len(kept), *points)
        return data + _CRC.pack(zlib.crc32(data))

    def pack_head(self, owner: Tuple[int, int, int, int, int], in_body: int) -> bytes:
        """Encode the head. `owner`: number of processes so far, pid, PID namespace, start time, and
        steps of earlier processes."""
        starts, pid, space, began, earlier = owner
        data = _HEAD.pack(
            MAGIC, self.flags, starts, pid, space, began, self.count, earlier,
            self.wall, self._at(self.first), self._at(self.last), in_body,
        )  # fmt: skip
        return data + _CRC.pack(zlib.crc32(data))

    def _at(self, clock: float) -> float:
        return self.wall + (clock - self.opened)


class StepFile:
    """An open file `ranks/<rank>.steps`. Only the process that claimed it (`claim_file`) writes."""

    def __init__(self, fd: int, owner: Tuple[int, int, int, int, int]) -> None:
        self._fd, self._owner = fd, owner
        self._in_body = 0

    def write(self, tally: Tally, *, whole: bool) -> None:
        """Write the head, or the whole file. Raises OSError if the disk is full."""
        if whole:
            os.pwrite(self._fd, tally.pack_body(), HEAD_BYTES)
            self._in_body = tally.count
        os.pwrite(self._fd, tally.pack_head(self._owner, self._in_body), 0)


def claim_file(path: str) -> Optional[StepFile]:
    """Open the rank's file for this process; return None while another living process counts there.

    That is the case for children of the process that trains. A process that is started again takes
    over from a dead one.
    """
    me = os.getpid(), *_identify("self")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return StepFile(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), (1, *me, 0))
    except FileExistsError:
        fd = os.open(path, flags)
    head = _parse_head(os.pread(fd, HEAD_BYTES, 0))
    if head is None:
        is_free, starts, earlier = time.time() - os.fstat(fd).st_mtime > EMPTY_S, 1, 0
    else:
        _, starts, pid, space, began, count, before, *_ = head
        is_free = (pid, space, began) == me or (
            space == me[1] and _identify(str(pid)) != (space, began)
        )
        starts, earlier = starts + 1, before + count
    if is_free:
        return StepFile(fd, (starts, *me, earlier))
    os.close(fd)
    return None


def _identify(pid: str) -> Tuple[int, int]:
    """Return a process's PID namespace and starting tick, which identify it uniquely."""
    try:
        space = os.stat(f"/proc/{pid}/ns/pid").st_ino
        with open(f"/proc/{pid}/stat", "rb") as handle:
            return space, int(handle.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0, 0


def parse_counts(data: bytes) -> Optional[StepCounts]:
    """Parse a file, which may be incomplete; return None without a whole head."""
    head = _parse_head(data)
    if head is None:
        return None
    flags, starts, pid, _, _, count, earlier, opened_at, first_at, last_at, in_body = head
    body = data[HEAD_BYTES:FILE_BYTES]
    is_whole = len(body) == BODY_BYTES and in_body > 0
    if is_whole:
        is_whole = zlib.crc32(body[: -_CRC.size]) == _CRC.unpack(body[-_CRC.size :])[0]
    points: List[Tuple[int, float]] = [(1, first_at)] if count else []
    durations: List[Tuple[int, float]] = []
    longest: List[LongStep] = []
    if is_whole:
        classes = _CLASSES.unpack_from(body)
        numbers, seconds = classes[:NUM_CLASSES], classes[NUM_CLASSES:]
        durations = [(n, seconds[at]) for at, n in enumerate(numbers) if n]
        begin = _CLASSES.size + _LONGEST.size
        longest = [
            LongStep(*row) for row in _LONG.iter_unpack(body[_CLASSES.size : begin]) if row[0]
        ]
        (num,) = _NUM.unpack_from(body, begin)
        begin += _NUM.size
        points = list(_POINT.iter_unpack(body[begin : begin + num * _POINT.size]))
    if count and points[-1][0] < count:
        points.append((count, last_at))
    return StepCounts(
        pid=pid,
        count=count,
        opened_at=opened_at,
        first_at=first_at,
        last_at=last_at,
        starts=starts,
        earlier=earlier,
        is_captured=bool(flags & CAPTURED),
        points=tuple(points),
        durations=tuple(durations),
        longest=tuple(longest),
    )


def _parse_head(data: bytes) -> Optional[Tuple[int, ...]]:
    """Parse the head of a steps file, without the magic; None if it is incomplete or damaged."""
    if len(data) < HEAD_BYTES or data[:4] != MAGIC:
        return None
    if zlib.crc32(data[: _HEAD.size]) != _CRC.unpack_from(data, _HEAD.size)[0]:
        return None
    return _HEAD.unpack_from(data)[1:]
