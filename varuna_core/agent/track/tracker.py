"""`agent.pyz track`: the tracker's process.

    main thread    reads what is new in the run's files once a second, and adds the points to one
                   list, from which those go that all tools have seen
    a thread each  hands its tool what is new in the list, says once what went wrong, tries again

The list is short. A tool that falls behind, or that has not received earlier attempts yet, gets a
reader of its own, which reads the files again until the tool has caught up.

The process ends by itself some seconds after the ranks of its node, even if a tool is still busy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional

from varuna_core.agent.setup.site import Refusal, load_plan, open_run
from varuna_core.agent.track.cursor import Cursor, read_cursor, write_cursor
from varuna_core.agent.track.points import AttemptPoints, Point, count_values
from varuna_core.agent.track.tools import (
    Tool,
    Tracked,
    choose_tool,
    list_tools,
    read_settings,
    shorten,
)
from varuna_core.records.exits import RankExit, read_exits
from varuna_core.records.files import as_number, lock_file, read_json
from varuna_core.records.plan import Plan, TrackPlan, read_attempt_plan
from varuna_core.records.record import append_event
from varuna_core.records.runfolder import AttemptFolder, RunFolder

POLL_S = 1.0
LAST_LINES_S = 3.0
"""Seconds to wait for lines in the logs of other nodes after the ranks of this node have ended."""
FLUSH_S = 25.0
"""Seconds in which all tools together may send the remaining points at the end."""
RETRY_S, MOST_RETRY_S = 5.0, 60.0
MOST_VALUES = 50_000
"""Most values that wait in memory for the tools, about 10 MB; a tool that is further behind reads
the files itself."""


@dataclass(frozen=True)
class Batch:
    """Points of one poll, or a part of them."""

    points: List[Point]
    read: Optional[Dict[str, Any]]
    """Position of the reader after the points of this batch; None if more was left to read in the
    files."""

    @property
    def weight(self) -> int:
        return sum(map(count_values, self.points))


class Behind(Exception):
    """Raised if points that a tool asks for have been dropped."""


@dataclass
class Feed:
    """The newest points of the run, for all threads."""

    batches: Deque[Batch] = field(default_factory=deque)
    first: int = 0
    """Number of batches that were dropped from the front so far."""
    most: int = MOST_VALUES
    weight: int = 0
    """Weight of all batches that are held, as counted by `count_values`."""
    places: Dict[str, int] = field(default_factory=dict)
    """Number of batches that each tool has handled, for tools that still receive points."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_over: bool = False
    is_well: bool = False

    @property
    def end(self) -> int:
        return self.first + len(self.batches)

    def add(self, batch: Batch) -> None:
        """Add a batch; the oldest batches are dropped to make room."""
        with self.changed:
            if self.places:
                self.batches.append(batch)
                self.weight += batch.weight
                while self.weight > self.most and len(self.batches) > 1:
                    self._drop(self.first + 1)
            self.changed.notify_all()

    def note(self, name: str, place: int) -> None:
        """Note that a tool has handled the points up to `place`."""
        with self.changed:
            self.places[name] = place
            self._drop(min(self.places.values()))

    def leave(self, name: str) -> None:
        """Note that a tool wants no more points."""
        with self.changed:
            self.places.pop(name, None)
            self._drop(min(self.places.values(), default=self.end))

    def _drop(self, place: int) -> None:
        while self.first < place and self.batches:
            self.weight -= self.batches.popleft().weight
            self.first += 1

    def finish(self, *, is_well: bool) -> None:
        with self.changed:
            self.is_over, self.is_well = True, is_well
            self.changed.notify_all()

    def wait(self, place: int) -> Optional[Batch]:
        """Wait for the batch that follows the first `place` batches, and return it; None once the
        run is over. Raise Behind if that batch was dropped."""
        with self.changed:
            self.changed.wait_for(lambda: self.end > place or self.is_over)
            if place < self.first:
                raise Behind
            return self.batches[place - self.first] if self.end > place else None

    def pause(self, seconds: float) -> None:
        """Wait for so many seconds, or until the run is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over, seconds)


@dataclass(frozen=True)
class Reading:
    """Opens, for each attempt, the reader of the points that the tracker sends."""

    run: RunFolder
    attempt: AttemptFolder
    """The last attempt of the run."""

    def open(self, number: int, read: Mapping[str, Any]) -> Optional[AttemptPoints]:
        """Return a reader that continues where `read` stopped; None if the attempt has no plan."""
        attempt, plan = self.run.attempt(number), read_attempt_plan(self.run, number)
        if plan is None:
            return None
        opened = _read_opened(attempt)
        saved = read.get("state") if self.is_of(read, number, opened) else None
        is_last = number == self.attempt.number
        return AttemptPoints(self.run, plan, attempt, opened, is_last=is_last, saved=saved)

    def is_of(self, read: Mapping[str, Any], number: int, opened: float) -> bool:
        return (read.get("attempt"), read.get("opened")) == (number, opened)

    def save(self, points: AttemptPoints, number: int, opened: float) -> Dict[str, Any]:
        return {"attempt": number, "opened": opened, "state": points.save()}


class ToolThread(threading.Thread):
    """Thread that hands points to one tool."""

    def __init__(
        self, make: Callable[[Cursor], Tool], name: str, path: Path, feed: Feed, reading: Reading
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._make, self._path, self._feed, self._reading = make, path, feed, reading
        self._cursor = read_cursor(path)
        self._said = False
        feed.note(name, 0)
        self.fail: Callable[[str], None] = lambda text: None

    def run(self) -> None:
        try:
            tool = self._make(self._cursor)
            is_all = self._try(tool.open) and self._hand_over(tool)
            if not (is_all or tool.is_gauge):
                self.fail(f"{self.name}: not everything was sent; the next attempt sends the rest")
        except ImportError:
            pass  # said already
        except BaseException as error:  # a tool may raise anything; the others go on
            self._say(error)
        finally:
            self._feed.leave(self.name)

    def _hand_over(self, tool: Tool) -> bool:
        """Send points to the tool until the run is over; return True if none are left."""
        place = 0
        if not (tool.is_gauge or self._catch_up(tool, self._choose_first(), is_now=False)):
            return False
        while True:
            try:
                batch = self._feed.wait(place)
            except Behind:
                place = self._feed.end if not tool.is_gauge else self._feed.first
                self._feed.note(self.name, place)
                number = self._reading.attempt.number
                if not (tool.is_gauge or self._catch_up(tool, number, is_now=True)):
                    return False
                continue
            if batch is None:
                break
            if not self._put(tool, batch):
                return False
            place += 1
            self._feed.note(self.name, place)
        return self._try(lambda: tool.close(is_well=self._feed.is_well))

    def _choose_first(self) -> int:
        """Choose the first attempt that the tool has not received to its end."""
        found = self._cursor.attempt
        read = as_number(self._cursor.read.get("attempt"))
        return max(0, found if read is None else int(read))

    def _catch_up(self, tool: Tool, first: int, *, is_now: bool) -> bool:
        """Send the tool the points in the files of the attempts from `first` on, of this attempt
        too if `is_now`. Return False if the tool did not accept them."""
        last = self._reading.attempt.number
        for number in range(first, last + is_now):
            points = self._reading.open(number, self._cursor.read)
            if points is None:
                continue
            is_all = False
            while not is_all:
                final = number < last or self._feed.is_over
                found, is_all = points.read(final=final)
                read = self._reading.save(points, number, points.opened) if is_all else None
                if not self._put(tool, Batch(found, read)):
                    return False
        return True

    def _put(self, tool: Tool, batch: Batch) -> bool:
        cursor = self._cursor.copy()
        points = batch.points
        taken = points if tool.is_gauge else list(filter(None, map(cursor.take, points)))
        if taken and not self._try(lambda: tool.put(taken)):
            return False
        cursor.own = dict(tool.tracked.own)
        if batch.read is not None:
            cursor.read = batch.read
        is_new = bool(taken) or cursor.read.get("attempt") != self._cursor.read.get("attempt")
        self._cursor = cursor
        if is_new and not tool.is_gauge:
            self._keep()
        return True

    def _keep(self) -> None:
        try:
            write_cursor(self._path, self._cursor)
        except OSError as error:  # the next attempt would show some of it again
            self._say(error)

    def _try(self, work: Callable[[], None]) -> bool:
        """Repeat the work until it succeeds, one last time when the attempt is over; return True if
        it succeeded."""
        wait_s = RETRY_S
        while True:
            is_last = self._feed.is_over
            try:
                work()
                return True
            except ImportError as error:
                self._say(error)
                raise
            except Exception as error:
                self._say(error)
            if is_last:
                return False
            self._feed.pause(wait_s)
            wait_s = min(2 * wait_s, MOST_RETRY_S)

    def _say(self, error: BaseException) -> None:
        if not self._said:
            self._said = True
            self.fail(explain(self.name, error))


def explain(tool: str, error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f"{tool}: {shorten(error)}: install it for {sys.executable}, or remove it from track"
    return f"{tool}: {shorten(error)}"


class Tracker:
    """Main loop of the tracker: reads new points, and waits for the end of the ranks."""

    def __init__(
        self, run: RunFolder, plan: Plan, track: TrackPlan, attempt: AttemptFolder
    ) -> None:
        self._run, self._plan, self._track, self._attempt = run, plan, track, attempt
        self._feed = Feed()
        self._opened = _read_opened(attempt)
        self._reading = Reading(run, attempt)
        self._parent = os.getppid()
        self._threads = [self._make_thread(name) for name in list_tools(track, run)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        points = AttemptPoints(self._run, self._plan, self._attempt, self._opened, is_last=True)
        while not self._is_over():
            self._read(points)
            time.sleep(POLL_S)
        deadline = time.monotonic() + LAST_LINES_S
        while len(self._read_exits()) < self._plan.world and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._read(points, final=True)
        exits = [value for value in self._read_exits().values() if not value.stopped]
        is_well = bool(exits) and all(value.code == 0 for value in exits)
        self._feed.finish(is_well=is_well)
        deadline = time.monotonic() + FLUSH_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            self._say(
                f"{', '.join(late)}: not finished {FLUSH_S:.0f} s after the end of the ranks; "
                "the next attempt sends the rest"
            )

    def _make_thread(self, name: str) -> ToolThread:
        def make(cursor: Cursor) -> Tool:
            number = self._attempt.number
            settings = read_settings(self._run).get(name) or {}
            tracked = Tracked(
                self._run, self._plan, self._track, number, dict(cursor.own), self._say, settings
            )
            return choose_tool(name)(tracked)

        path = self._run.track / f"{name}.json"
        thread = ToolThread(make, name, path, self._feed, self._reading)
        thread.fail = self._say
        return thread

    def _read(self, points: AttemptPoints, *, final: bool = False) -> None:
        """Read everything that exists by now, piece by piece."""
        is_all = False
        while not is_all:
            found, is_all = points.read(final=final)
            if found:
                number = self._attempt.number
                read = self._reading.save(points, number, self._opened) if is_all else None
                self._feed.add(Batch(found, read))

    def _is_over(self) -> bool:
        """Return True once the ranks of this node, or the agent that started them, have ended."""
        is_left = os.getppid() != self._parent
        return is_left or len(self._read_exits(first=True)) >= self._plan.groups[0].ranks

    def _read_exits(self, *, first: bool = False) -> Dict[int, RankExit]:
        found = read_exits(self._attempt, self._plan.world)
        ranks = self._plan.node(0).ranks
        return {rank: value for rank, value in found.items() if not first or rank in ranks}

    def _say(self, text: str) -> None:
        """Report in the job's output and the run's events, in spite of a full disk."""
        with contextlib.suppress(OSError):
            print(f"vjob track: {text}", file=_SAID, flush=True)
        with contextlib.suppress(OSError):
            append_event(self._run.events(), "tracking", attempt=self._attempt.number, said=text)


_SAID = sys.stderr


def _read_opened(attempt: AttemptFolder) -> float:
    value = read_json(attempt.master)
    opened = as_number(value.get("time")) if isinstance(value, dict) else None
    return 0.0 if opened is None else opened


def run_tracker(path: Path, number: int) -> int:
    """Track an attempt until it is over."""
    global _SAID
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # the ranks' end is ours
    run = open_run(path)
    plan = load_plan(run, number)
    if plan.track is None:
        raise Refusal(2, f"{run.plan}: nothing to track")
    # What the tools print is for their log; ours is for the job's.
    _SAID = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(1, 2)
    run.track.mkdir(mode=0o700, exist_ok=True)
    with lock_file(run.track / "lock"):  # the last attempt's may still flush
        Tracker(run, plan, plan.track, run.attempt(number)).run()
    os._exit(0)  # whatever a thread is waiting for
