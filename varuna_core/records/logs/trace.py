"""trace/node-<index>.jsonl: what the ranks of a node did and when, one JSON line for each entry.

{"rank": 3}                                                       a batch of rank 3 begins
{"trace": 1, "rank": 3, "stages": [1], ..., "columns": [...]}     first, and after a restart again
["F", 20, 1, 4, 81200345, 1200, 903411, 65536, ""]                an event; COLUMNS names its places
{"step": 20, "begin": ..., "took": ..., "sums": {"F": [8, wait, work]}, ...}      after every step
{"offset": ..., "residual": ..., "at": ...}                       the clock against rank 0's
{"after": ..., "sums": {...}}                     last: what came after the last step, as a save

Each rank appends a batch in one write, so that batches of several ranks of one node never mix. A
file of one rank (trace/<rank>.jsonl, in older folders) has no line `{"rank": 3}`.

Times are whole nanoseconds of a monotonic clock, counted from the header's `origin` (the wall clock
when the file was opened). Events are arrays because most entries are events: arrays have a third of
the size of objects and can be split at commas, which makes the reader fast. docs/report.md has the
schema.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import re
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
)

from varuna_core.records.files import PRIVATE_FILE
from varuna_core.records.logs.times import Exchange, choose_offset

log = logging.getLogger(__name__)

FORMAT = 1
COLUMNS = ("kind", "step", "stage", "microbatch", "begin", "wait", "work", "bytes", "what")
"""`begin`, then `wait` ns for its message, then `work` ns. Text at both ends, numbers between; -1
where there is no stage or micro-batch."""

ACTIONS = ("F", "f", "R", "B", "I", "W", "O", "L")
"""Kinds that are actions of a schedule (varuna_core/schedule/actions.py)."""
COMPUTE = (*ACTIONS, "compute")
COMMUNICATION = ("send", "all-reduce", "communication")
OTHERS = ("optimizer", "checkpoint", "data", "evaluate")
"""Further kinds of events."""
OTHER = "other"
"""Kind of a script's spans with names of its own (varuna_core/trace); `what` has the name."""
DETAIL = "detail"
"""Kind of such spans inside a span whose time is already counted: they are not added to sums."""
CONTINUED = "goes on"
"""Value of `what` for the later pieces of an interrupted action."""
ActionTrace = Callable[[str, float, float, float], None]
"""Called after an action: its spelling, then when it began, had its message, and ended (seconds
of `time.perf_counter`)."""

SHARED = "node-"
"""Beginning of the name of a file that several ranks write."""
FLUSH_BYTES = 64 * 1024
FLUSH_S = 5.0
"""Seconds between writes: a killed rank loses at most this much of its trace."""
MOST_EVENTS = 20_000
"""Maximum events of one step written by `add`; further events only enter the sums."""
DETAIL_BYTES = 1 << 27
"""After this many bytes of details, details are written half as often."""

_ACTION = re.compile(r"(\d+)([A-Za-z]+)(\d+)")
_FOREIGN = re.compile(r"[^A-Za-z0-9 ._:/+-]")
_Event = Tuple[str, int, int, float, float, float, int, str]


class Clock(Protocol):
    """Clock of a device, which executes the host's calls later (varuna_core/trace/device.py)."""

    def mark(self, at: float) -> None:
        """Mark this moment, a `perf_counter`: `find` will tell when the device had done all calls
        before it."""

    def settle(self) -> None:
        """Update the times from the events that the device has completed since the last call."""

    def is_settled(self, at: float) -> bool: ...

    def find(self, at: float) -> float:
        """Return the time at which the device had done all calls made before `at`."""

    def forget(self, before: float) -> None: ...

    def close(self) -> None:
        """Wait briefly for the device; every time counts as settled afterwards."""


class _Ended(NamedTuple):
    """A step or other span whose events are complete; it is written once their times are known."""

    step: Optional[int]
    """Number of the step; None for events after the last step."""
    begun: float
    until: float
    is_whole: bool
    wants_details: bool
    events: List[_Event]
    aside: List[_Event]
    sums: Dict[str, List[float]]
    ends: List[float]


def choose_trace_file(environ: Mapping[str, str]) -> Path:
    """Return the file in which a rank writes its trace. An older agent sets only VJOB_TRACE, a file
    for one rank, and an older varuna_core in the ranks' Python knows only that variable."""
    return Path(environ.get("VJOB_NODE_TRACE") or environ["VJOB_TRACE"])


class _Names(Dict[str, str]):
    """Names as they are written, without characters that JSON or the reader could not handle."""

    def __missing__(self, name: str) -> str:
        self[name] = _FOREIGN.sub("_", str(name))
        return self[name]


def _read_both_clocks() -> Tuple[float, int]:
    """Read `perf_counter` and the wall clock at one moment: the tightest of a few tries.

    A process that is preempted between the two reads would be milliseconds off the others of its
    node.
    """
    tries = []
    for _ in range(16):
        before, wall, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        tries.append((after - before, before + (after - before) / 2, wall))
    _, middle, wall = min(tries)
    return middle, wall


class TraceWriter:
    """Writes one rank's trace; given as `trace=` to Varuna it takes the engine's actions.

    No method raises an error into the training: a failure stops the trace with one warning. Events
    may come from any thread; steps begin and end in one thread.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        *,
        stages: Sequence[int] = (0,),
        replica: int = 0,
        log_every: int = 10,
        num_first: int = 0,
        facts: Optional[Dict[str, Any]] = None,
        find_clock: Callable[[], Optional[Clock]] = lambda: None,
    ) -> None:
        """Details are written of every step that `log_every` divides, 1 for all, and of the first
        `num_first` steps.

        `facts` join the header; the report knows `device` (the GPU's name) and `partition`.
        `find_clock` is asked when a step begins, until it has one: then times are the device's.
        """
        self.path, self.log_every = Path(path), max(1, log_every)
        # The blank line ends what another rank may have left torn on a full disk.
        is_shared = self.path.name.startswith(SHARED)
        self._mark = b'\n{"rank":%d}\n' % rank if is_shared else b""
        self.is_stopped = False
        self._stage = stages[0] if stages else -1
        self._events: List[_Event] = []
        self._find_clock = find_clock
        self._clock: Optional[Clock] = None
        self.threads: Set[int] = set()
        """Threads that submit work to the device; events of other threads use the host's clock."""
        self._aside: List[_Event] = []
        """Events of other threads."""
        self._waiting: Deque[_Ended] = deque()
        self._num_first = num_first
        self._step: Optional[int] = None
        self._begun = 0.0
        self._sums: Dict[str, List[float]] = {}
        self._ends: List[float] = []
        self._is_full = False
        self._detail_bytes = 0
        self._lines: List[str] = []
        self._size = 0
        self._actions: Dict[str, Tuple[str, int, int]] = {}
        self._names = _Names()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fd: Optional[int] = None
        self._origin_s, self._origin_ns = _read_both_clocks()
        self._flushed = self._origin_s
        self._add_line(
            {
                "trace": FORMAT,
                "rank": rank,
                "stages": list(stages),
                "replica": replica,
                "host": platform.node(),
                "origin": self._origin_ns,
                "log_every": self.log_every,
                "columns": COLUMNS,
                **(facts or {}),
            }
        )
        self.flush()
        atexit.register(self.close)

    # What happens.

    def now(self) -> float:
        """Return `perf_counter`. With a device, also mark the work submitted so far."""
        now = time.perf_counter()
        if self._clock is not None:
            self._mark_time(now)
        return now

    def _mark_time(self, now: float) -> None:
        if self._clock is not None and threading.get_ident() in self.threads:
            self._clock.mark(now)

    def __call__(self, action: str, begin: float, ready: float, end: float) -> None:
        """Record an action of the engine that has just ended; times are `time.perf_counter`'s."""
        if self._clock is not None:
            self._mark_time(end)
        found = self._actions.get(action)
        if found is None:
            match = _ACTION.fullmatch(action)
            stage, kind, microbatch = match.groups() if match else (-1, action, -1)
            found = self._actions[action] = kind, int(stage), int(microbatch)
        self._events.append((*found, begin, ready, end, 0, ""))

    def add(
        self,
        kind: str,
        begin: float,
        end: float,
        *,
        ready: Optional[float] = None,
        stage: Optional[int] = None,
        microbatch: int = -1,
        num_bytes: int = 0,
        what: str = "",
    ) -> None:
        """Record any other event, of COMMUNICATION or OTHERS; `what` names it further
        (`gradients`)."""
        ready = begin if ready is None else ready
        self.put(kind, stage, microbatch, begin, ready, end, num_bytes, what)

    def put(
        self, kind: str, stage: Optional[int], microbatch: int,
        begin: float, ready: float, end: float, num_bytes: int, what: str,
    ) -> None:  # fmt: skip
        """Record an event of which all is given; without a stage it is the rank's first."""
        stage = self._stage if stage is None else stage
        event = (kind, stage, microbatch, begin, ready, end, num_bytes, what)
        if self._clock is not None and threading.get_ident() not in self.threads:
            if len(self._aside) < MOST_EVENTS:
                self._aside.append(event)
            else:
                self._add_up([event], self._sums, self._ends)
            return
        self._events.append(event)
        if len(self._events) >= MOST_EVENTS:
            self._make_room()

    @contextmanager
    def span(self, kind: str, **facts: Any) -> Iterator[None]:
        """Measure how long the body of a `with` statement takes, and record that with `add`."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(kind, begin, self.now(), **facts)

    def begin_step(self, step: int, at: Optional[float] = None) -> None:
        """Begin a step now, or at an earlier `perf_counter`. Time since the last step's end (data,
        a checkpoint) counts to this step."""
        if self._clock is None:
            self._clock = self._find_clock()
            self.threads = {threading.get_ident()}
        now = self.now() if at is None else at
        self._finish(now)
        self._step, self._begun = step, now

    def end_step(self, at: Optional[float] = None) -> None:
        """End the step now or at an earlier `perf_counter`; else it lasts until the next begins."""
        self._finish(self.now() if at is None else at)

    def drop_step(self) -> None:
        """End a step that was cut short: it keeps its events, but has no sums."""
        if self._step is not None:
            self._end(self.now(), is_whole=False)

    @property
    def is_in_step(self) -> bool:
        return self._step is not None

    # The clock.

    def read_clock(self) -> int:
        """Return nanoseconds since 1970 by this file's clock, for `Exchange`."""
        return self._origin_ns + self._count_ns(time.perf_counter())

    def add_exchanges(self, exchanges: Iterable[Exchange]) -> None:
        """Record the offset to rank 0's clock, at the start and every few minutes."""
        found = choose_offset(exchanges)
        if found is not None:
            at = self._count_ns(time.perf_counter())
            fields = {"offset": found.offset_ns, "residual": found.residual_ns, "at": at}
            self._add_line(fields)

    # The file.

    def flush(self) -> None:
        """Write buffered entries, as whole lines in one write."""
        with self._lock:
            lines, self._lines, self._size = self._lines, [], 0
            self._flushed = time.perf_counter()
            if lines and not self.is_stopped:
                try:
                    self._write("".join(lines).encode())
                except OSError as error:
                    self._stop(error.strerror or str(error))

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked data loader's exit
            return
        atexit.unregister(self.close)
        self._end(self.now(), is_whole=not self.is_in_step)
        if self._clock is not None:
            self._clock.close()
            self._settle(self._clock)
        self.flush()
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            self.is_stopped = True

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, PRIVATE_FILE)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                data = b"\n" + data  # an older writer's last line is torn
        data = self._mark + data
        written = os.write(self._fd, data)
        if written < len(data):
            self._stop("no space left")

    def _stop(self, reason: str) -> None:
        self.is_stopped = True
        self._events.clear()
        self._waiting.clear()
        log.warning("%s is no longer written, but the training continues: %s", self.path, reason)

    def _count_ns(self, seconds: float) -> int:
        return round((seconds - self._origin_s) * 1e9)

    def _take(self) -> List[_Event]:
        events, self._events = self._events, []
        return events

    def _finish(self, now: float) -> None:
        if self._step is not None:
            self._end(now, is_whole=True)
        elif self.is_stopped:
            self._events.clear()
        if self._clock is not None:
            self._settle(self._clock)
        if self._size > FLUSH_BYTES or now - self._flushed > FLUSH_S:
            self.flush()

    def _end(self, now: float, *, is_whole: bool) -> None:
        """End the open step; between two steps, end the span since the last step."""
        step, self._step = self._step, None
        aside, self._aside = self._aside, []
        wants_details = step is not None and (
            not is_whole or (self._wants_details(step) and not self._is_full)
        )
        ended = _Ended(
            step, self._begun, now, is_whole, wants_details,
            self._take(), aside, self._sums, self._ends,
        )  # fmt: skip
        self._sums, self._ends, self._is_full = {}, [], False
        if step is not None and is_whole:
            self._num_first = max(0, self._num_first - 1)
        if self._clock is None:
            self._write_ended(ended)
            return
        self._waiting.append(ended)

    def _settle(self, clock: Clock) -> None:
        """Write the entries whose work the device has completed."""
        clock.settle()
        while self._waiting and clock.is_settled(self._waiting[0].until):
            ended = self._waiting.popleft()
            events = self._translate(clock, ended.events)
            begun, until = clock.find(ended.begun), clock.find(ended.until)
            self._write_ended(ended._replace(events=events, begun=begun, until=until))
            clock.forget(ended.begun)

    def _translate(self, clock: Clock, events: List[_Event]) -> List[_Event]:
        """Replace the times of events by those of the device."""
        find = clock.find
        return [
            (kind, stage, micro, find(begin), find(ready), find(end), size, what)
            for kind, stage, micro, begin, ready, end, size, what in events
        ]

    def _write_ended(self, ended: _Ended) -> None:
        if self.is_stopped:
            return
        step, events = ended.step, ended.events + ended.aside
        try:
            if step is not None and ended.wants_details:
                self._add_details(step, events)
            if not ended.is_whole or (step is None and not events):
                return
            self._add_up(events, ended.sums, ended.ends)
            fields = self._format_sums(ended.sums, ended.ends)
            if step is None:
                self._add_line({"after": self._count_ns(ended.until), "sums": fields["sums"]})
                return
            begin = self._count_ns(ended.begun)
            took = self._count_ns(ended.until) - begin
            self._add_line({"step": step, "begin": begin, "took": took, **fields})
        except (TypeError, ValueError) as error:  # what a caller gave is no number
            self._stop(str(error))

    def _wants_details(self, step: int) -> bool:
        return step % self.log_every == 0 or self._num_first > 0

    def _make_room(self) -> None:
        """Free the memory of a step with too many events: write the details of the first events,
        and add all of them to the sums."""
        with self._lock:
            events = self._take()
        if self._clock is not None:  # as far as the device is
            self._clock.settle()
            events = self._translate(self._clock, events)
        step = self._step
        try:
            if step is not None and self._wants_details(step) and not self._is_full:
                log.warning(
                    "%s: step %d has too many spans; only the sum of the later ones is kept",
                    self.path,
                    step,
                )
                self._add_details(step, events)
            self._is_full = True
            self._add_up(events, self._sums, self._ends)
        except (TypeError, ValueError) as error:
            self._stop(str(error))

    def _add_up(
        self, events: List[_Event], sums: Dict[str, List[float]], ends: List[float]
    ) -> None:
        """Add events to the sums, [count, wait, work] of each kind, and update the begin and end of
        the actions."""
        for kind, _, _, begin, ready, end, _, what in events:
            if kind == DETAIL:
                continue
            found = sums.get(kind)
            if found is None:
                found = sums[kind] = [0, 0.0, 0.0]
            found[0] += what != CONTINUED
            found[1] += ready - begin
            found[2] += end - ready
            if kind in COMPUTE:
                if not ends:
                    ends += [begin, end]
                elif begin < ends[0]:
                    ends[0] = begin
                if end > ends[1]:
                    ends[1] = end

    def _format_sums(self, sums: Dict[str, List[float]], ends: List[float]) -> Dict[str, Any]:
        fields: Dict[str, Any] = {
            "sums": {
                kind: [count, round(wait * 1e9), round(work * 1e9)]
                for kind, (count, wait, work) in sums.items()
            }
        }
        if ends:
            fields["first"], fields["last"] = map(self._count_ns, ends)
        return fields

    def _add_details(self, step: int, events: List[_Event]) -> None:
        """Write a step's details. Doubling `log_every` keeps some of the detailed steps common to
        all ranks."""
        self._detail_bytes += self._add_events(step, events)
        if self._detail_bytes > DETAIL_BYTES:
            self._detail_bytes = 0
            self.log_every *= 2

    def _add_events(self, step: int, events: List[_Event]) -> int:
        """Write events and return the number of bytes."""
        origin, names = self._origin_s, self._names
        lines = []
        for kind, stage, microbatch, begin, ready, end, num_bytes, what in events:
            start, done = round((begin - origin) * 1e9), round((end - origin) * 1e9)
            middle = round((ready - origin) * 1e9)
            lines.append(
                f'["{names[kind]}",{step:d},{stage:d},{microbatch:d},{start},{middle - start},'
                f'{done - middle},{num_bytes:d},"{names[what]}"]\n'
            )
        self._extend(lines)
        return sum(map(len, lines))

    def _add_line(self, fields: Dict[str, Any]) -> None:
        self._extend([json.dumps(fields, separators=(",", ":")) + "\n"])

    def _extend(self, lines: List[str]) -> None:
        with self._lock:
            self._lines += lines
            self._size += sum(map(len, lines))
