"""Reader of the logs of one node: last lines, progress, settings, known lines.

The last parts of a thousand nodes' logs are megabytes, so blocks are searched as bytes, and lines
that differ only by numbers are classified once.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from re import Pattern
from typing import Protocol

from varuna_core.facts.catalogue.patterns import MOST_CHARS
from varuna_core.facts.catalogue.rank_output import PYTHON_EXCEPTION
from varuna_core.records.logs.learner import Doubt
from varuna_core.records.logs.literals import find_marks
from varuna_core.records.logs.progress import NO_STEP, parse_time, split_tag
from varuna_core.records.logs.steps import BAR, LINE, StepReader, StepReading
from varuna_core.records.logs.times import BAR_SLACK_S, MARK_S, LineTimes
from varuna_core.records.logs.training_log import (
    ITERATION_MARK,
    PHASE_MARKS,
    SCALE_STEPS,
    TIMERS_MARK,
    Iteration,
    parse_job_info,
    parse_mark,
)
from vjob.jobs.monitor.log_lines.errors import (
    DIGITS,
    INFO_MARK,
    STEP_MARKS,
    Classifier,
    is_end,
)
from vjob.jobs.monitor.log_lines.raised import RaisedLines
from vjob.jobs.monitor.log_lines.tails import TAIL_BYTES, Added, Budget, Tail, show
from vjob.jobs.monitor.model.snapshot import Line, Phase, Point

NUM_POINTS = 300
NUM_SHOWN = 50
"""Most last lines that are kept of each file."""
NUM_KNOWN = 200
"""Most distinct lines of a known kind that are kept of each file: the first ones."""
NUM_FIRST = 8
"""Number of lines about steps that the first poll parses at once: the last ones."""
NUM_OLDEST = 4
"""Number of first lines that are parsed if a list of lines is shortened, since times are measured
from them."""
WENT_ON, LEAST_REST = 4, 4096
"""A file went on without a step if more bytes follow the last line about a step than this many of
the longest of the last distances between such lines, and than this many bytes."""
HEAD_BYTES = 16 * 1024
"""Bytes at the beginning of a file in which the settings are searched."""

_STATE = r"\b(?:models?|weights?|checkpoints?|ckpt|snapshot|adapter|state)\b"
_SAVED = re.compile(
    rf"{_STATE}.{{0,40}}\bsaved\b"
    rf"|\bsaved\b.{{0,80}}(?:{_STATE}|\.(?:pth?|ckpt|safetensors|keras|h5|npz|pkl)\b)"
    rf"|\bsaving\b.{{0,40}}{_STATE}",
    re.IGNORECASE,
)
_NOT_SAVED = re.compile(
    r"\b(?:not|never|no|fail(?:ed|s|ure)?|cannot|unable|will|to be|every|skip(?:ped|ping)?"
    r"|disabled?|errors? (?:while |when |on |in )?saving|(?:load|resum|restor)(?:ed|es?|ing))\b"
    r"|error:|n't ",
    re.IGNORECASE,
)
MOST_SAVES = 20
"""Most lines with the word `saved` or `saving` that are tried for each part of a file that is
read."""
_DAYS_30 = 30 * 86400.0
_LATE_S = 1800.0
"""Seconds by which a line's time may be later than its file's; a later time is in another time
zone."""


def take_last(lines: list[bytes], count: int) -> list[bytes]:
    """Return the last lines that are not blank."""
    start = len(lines)
    found = 0
    while start > 0 and found < count:
        start -= 1
        found += not lines[start].isspace() and lines[start] != b""
    return [line for line in lines[start:] if line and not line.isspace()]


_Placed = tuple[int, bytes]
"""Offset of a line in its file, and the line."""


def _place(lines: list[bytes], indices: list[int], start: int) -> list[_Placed]:
    if not indices:
        return []
    places = list(accumulate((len(line) + 1 for line in lines), initial=start))
    return [(places[at], lines[at]) for at in indices]


def _decode(line: bytes) -> str:
    """Decode a line; of a progress bar, return the last state."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class Times(Protocol):
    """Source of the times at which lines of a node's logs were written."""

    def read(self) -> tuple[LineTimes, LineTimes]:
        """Read and return the times of lines in .out and in .err."""


class LogFile:
    """Incremental reader of one .out or .err file."""

    def __init__(
        self,
        path: Path | str,
        node: str,
        name: str,
        classifier: Classifier,
        tail_bytes: int = TAIL_BYTES,
        num_lines: int = NUM_SHOWN,
        begin: bytes | None = None,
        times: Times | None = None,
        pattern: Pattern[str] | None = None,
        is_err: bool = False,
    ) -> None:
        """`begin`: known lines before the last line with this text belong to an earlier start and
        are dropped.

        `times`: when lines were written. `pattern`: the user's own regular expression of lines
        about steps.
        """
        # Settings are printed, not complained of.
        head_bytes = 0 if is_err else HEAD_BYTES
        self.tail = Tail(path, tail_bytes=tail_bytes, head_bytes=head_bytes)
        self.name = name
        self._known: list[Line] = []
        self._places: list[int] = []
        """The offset of the last occurrence of each known line."""
        self._raised = RaisedLines()
        self.writers: list[set[int | None]] = []
        """The ranks that wrote each known line."""
        self.points: deque[Point] = deque(maxlen=NUM_POINTS)
        self.num_steps: int | None = None
        self.unit = "step"
        """Unit that the file's lines count: `step`, `epoch` or `sample`."""
        self.is_least = False
        """True where the first epoch was not read, which may be number 0 or 1."""
        self.first_step: int | None = None
        self.point_at: float | None = None
        self.phase: Phase | None = None
        self.phase_ended_at: float | None = None
        self.phases_s: dict[str, float] = {}
        self.info: dict[str, Line] = {}
        self.node_ranks: set[str] = set()
        """The node ranks in the file's blocks of settings, since several nodes may print into one
        file."""
        self.loss: Point | None = None
        """Last loss of a line without a step; its step is NO_STEP."""
        self.norms: deque[Point] = deque(maxlen=SCALE_STEPS)
        """Values of the last lines with a gradient norm and without a step."""
        self.shares: deque[tuple[float, Point]] = deque(maxlen=NUM_POINTS)
        """Epochs done and values, from lines that have an epoch but no step."""
        self.step_order = -1
        """Offset of the last line about a step."""
        self._step_places: deque[int] = deque(maxlen=NUM_FIRST)
        """Offsets of the last lines about steps, in the order in which they were read."""
        self._first_end = 0
        """Size of the file at the first poll."""
        self.saved: Line | None = None
        """The last line that was read in which the program says that it saved its state."""
        self._fatal: Line | None = None
        self._fatal_place = 0
        self.changed = 0
        """Counter that grows with each poll that found a change."""
        self.is_apart = is_err
        """True if the file has only one of the node's streams."""
        self._node, self._classifier = node, classifier
        self._begin = begin
        self._shown: deque[bytes] = deque(maxlen=max(1, num_lines))
        self._keys: dict[tuple[str, bytes], int] = {}
        self._times, self._pattern = times, pattern
        self._is_err = is_err
        self._steps = StepReader(pattern)
        self._trains = False
        self._marks: LineTimes | None = None
        """Write times of lines, as of this poll."""
        self._written: LineTimes | None = None
        """Write times used for known lines in this poll."""
        self._unread: list[_Placed] = []
        """Older lines about steps of the first poll, parsed only on demand (`catch_up`)."""
        self._gaps: deque[int] = deque(maxlen=8)
        """Offsets of lines before which lines were skipped."""
        self._since: list[_Placed] = []
        """Later lines about steps, kept until the older lines are parsed."""
        self.is_sought = False
        """True if the skipped part is being searched for lines about steps."""
        self._has_timers = False
        """True if the file has Megatron's timers, which may take megabytes between two steps."""

    @property
    def steps(self) -> StepReader:
        """The parser of the file's lines about steps."""
        return self._steps

    @property
    def strength(self) -> int:
        """How reliable the step lines of this log are (records/logs/steps.py)."""
        return self._steps.strength

    @property
    def doubt(self) -> Doubt | None:
        """Why the steps in the file's lines are not known; None if there is no such doubt."""
        return Doubt.FAR if self.is_unsearched and not self.points else self._steps.doubt

    @property
    def trains(self) -> bool:
        """True if a line in this file or one beside it has a word that training programs print."""
        return self._trains or self._steps.trains

    @trains.setter
    def trains(self, value: bool) -> None:
        self._trains = self._steps.trains = value

    def find_step_time(self) -> tuple[float | None, bool]:
        """Return the time of the last line about a step, and whether it is only an upper bound.

        A line that is read in a later poll has a close bound. For one that is read in the first
        poll, the bound is the time of the file's last change. It is not close if much more text
        follows the line than usually stands between two lines about steps.
        """
        place, places = self.step_order, sorted(set(self._step_places))
        usual = max((b - a for a, b in pairwise(places)), default=0)
        if self._first_end - place <= max(WENT_ON * usual, LEAST_REST):
            return self.point_at, False
        at = None if self._times is None else self._times.read()[self._is_err].find(place)
        return (self.point_at, True) if at is None else (at, False)

    @property
    def is_behind(self) -> bool:
        """True if lines about steps wait for `catch_up`."""
        return bool(self._since)

    @property
    def is_unsearched(self) -> bool:
        """True if the last line about a step may be in the skipped part."""
        skipped = self.tail.skipped
        if skipped is None or (self._has_timers and self.strength < LINE):
            return skipped is not None
        return self.step_order < skipped[1]

    def search_back(self, budget: Budget) -> None:
        """Search the skipped part for lines about steps, from its end, up to a number of lines."""
        if self._pattern is not None:
            marks = find_marks(self._pattern.pattern) or STEP_MARKS
        else:
            marks = (ITERATION_MARK,) if self._has_timers else STEP_MARKS
        found: list[_Placed] = []
        for place, line in self.tail.search_back(marks, budget):
            reading = StepReader(self._pattern).read(_decode(line[:MOST_CHARS]))
            is_step = reading is not None and reading.line.step != NO_STEP
            if is_step and reading is not None and reading.strength >= BAR:
                found.append((place, line))
            if len(found) >= 2 * NUM_POINTS:
                self.tail.skipped = None
                break
        if not found:
            return
        found.reverse()
        kept = (self.phase, self.phase_ended_at)
        if self.strength < LINE:
            self._read_anew([*found, *self._unread, *self._since])
            self._unread, self._since = [], []
        else:
            self._steps.skip()
            for place, line in found:
                self._read_line(_decode(line), place)
        self.phase, self.phase_ended_at = kept

    def poll(self) -> bool:
        """Read the lines that were added to the file; return True if anything changed."""
        problem, was_missing = self.tail.problem, self.tail.is_missing
        added = self.tail.poll()
        if added is None:
            is_other = (problem, was_missing) != (self.tail.problem, self.tail.is_missing)
            self.changed += is_other
            return is_other
        self.changed += 1
        if added.is_anew:
            self._shown.clear()
            self._read_info(self.tail.head)
            self._first_end = added.start + len(added.data)
            self._step_places.clear()
        self._read(added)
        return True

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the last `count` lines of the log that are not blank, made safe for terminals. A
        line that has no end yet is one of them."""
        if count <= 0:
            return ()
        held = list(self._shown)[-count:]
        if self.tail.rest.strip():
            held.append(self.tail.rest)
        return tuple(show(line) for line in held[-count:])

    def _read(self, added: Added) -> None:
        data, start = added.data, added.start
        lines = data.split(b"\n")
        lines.pop()
        if self._begin is not None and self._begin in data:
            self._known, self._places, self.writers, self._keys = [], [], [], {}
            self.saved = None
            self._raised = RaisedLines()
            after = data.rfind(self._begin)
            start += data.rfind(b"\n", 0, after) + 1
            data = data[data.rfind(b"\n", 0, after) + 1 :]
            lines = data.split(b"\n")[:-1]
        self._shown.extend(take_last(lines, self._shown.maxlen or 1))
        sifted = self._classifier.sift(data, lines)
        self._written = None
        self._has_timers = self._has_timers or TIMERS_MARK in data or b" time lst:" in data
        known = self._add_raised(lines, sifted.known, start, data)
        for at, kind in known:
            self._add_known(lines, at, kind, start)
        self._note_fatal(lines, known, start)
        self._note_saved(data, start)
        if any(INFO_MARK in lines[at] for at in sifted.telling):
            self._read_info(data)
        if added.num_skipped and not added.is_anew:
            self._gaps.append(start)
        self._read_progress(_place(lines, sifted.telling, start), start, data, added.is_anew)

    def catch_up(self) -> None:
        """Parse the older lines about steps that the first poll left."""
        unread, self._unread = [*self._unread, *self._since], []
        if not self._since:
            return
        self._since = []
        kept = (self.point_at, self.phase, self.phase_ended_at)
        self._read_anew(unread)
        self.point_at, self.phase, self.phase_ended_at = kept

    def _read_anew(self, lines: list[_Placed]) -> None:
        """Replace all points by those of these lines."""
        self.points.clear()
        self.first_step = None
        self._steps = StepReader(self._pattern)
        self._steps.trains = self._trains
        self._read_head()
        for place, line in lines:
            text = _decode(line)
            self._read_line(text, place)
            if any(mark in line for mark in PHASE_MARKS) and parse_mark(text) is not None:
                self._steps.pause()

    def _read_progress(self, found: list[_Placed], start: int, data: bytes, is_first: bool) -> None:
        self._marks = None
        rest = self.tail.rest
        if b"%|" in rest or b"/step" in rest:
            # A bar counts by its last state; other unfinished lines may be cut off.
            found = [*found, (start + len(data), rest)]
        most = 2 * NUM_POINTS
        if len(found) > most:
            found = [*found[:NUM_OLDEST], *found[NUM_OLDEST - most :]]
            self._gaps.append(found[NUM_OLDEST][0])
        if is_first and len(found) > NUM_FIRST:
            self._unread, found = found[:-NUM_FIRST], found[-NUM_FIRST:]
            self._since = []
        if self._unread:
            self._since = [*self._since, *found]
            if len(self._since) > most:
                self._since = self._since[-most:]
                self._gaps.append(self._since[0][0])
        for place, line in found:
            text = _decode(line)
            self._read_line(text, place)
            if any(mark in line for mark in PHASE_MARKS):
                found_mark = parse_mark(text)
                if found_mark is not None:
                    self._steps.pause()
                    self._mark(*found_mark, text)

    def _read_head(self) -> None:
        """Read the file's first lines, if polls have read only its end: they have the first step
        and epoch, and perhaps the number of steps."""
        lines = self.tail.read_head(HEAD_BYTES).split(b"\n")[:-1]
        if not lines:
            return
        for line in lines:
            reading = self._steps.read(_decode(line))
            if reading is not None and reading.line.step != NO_STEP:
                first = min(one.line.step for one in (*reading.earlier, reading))
                self.first_step = first if self.first_step is None else self.first_step
        self._steps.skip()

    def _read_line(self, text: str, place: int) -> None:
        if place in self._gaps:
            self._steps.skip()
        at, slack_s = self._find_time(text, place)
        reading = self._steps.read(text, at, slack_s)
        if self.points and self._steps.strength < 0:  # they turned out to be of something else
            self.points.clear()
        if reading is not None:
            self.step_order = max(place, self.step_order)
            self._step_places.append(place)
            for one in (*reading.earlier, reading):
                self._add_point(one)

    def _find_time(self, text: str, place: int) -> tuple[float | None, float]:
        """Return the earliest time at which a line may have been written, and by how much that may
        be too early."""
        # Where a thousand nodes print steps, the points of only one are asked for; it catches up.
        if self._times is not None and not self._unread:
            if self._marks is None:
                self._marks = self._times.read()[self._is_err]
            at, slack_s = self._marks.find_exact(place)
            if at is not None:
                return at, max(slack_s, BAR_SLACK_S) if "%|" in text else slack_s
        at = parse_time(split_tag(text)[1], time.gmtime(self.tail.mtime).tm_year)
        return (at if at is not None and self.tail.mtime - _DAYS_30 < at else None), MARK_S

    def _add_point(self, reading: StepReading) -> None:
        point = _make_point(reading.line)
        if point.step < 0:  # a bar may tell its step
            self.loss = replace(point, at=self.tail.mtime)
            if point.grad_norm is not None:
                self.norms.append(self.loss)
            if "epoch" in reading.line.others:
                share = reading.line.others["epoch"]
                self.shares.append((share, replace(point, at=reading.at)))
            return
        if reading.is_anew:  # another start, in the same file, or lines that tell more than bars
            self.points.clear()
        last, at = self.points[-1] if self.points else None, reading.at
        if last is not None and point.step == last.step:
            if reading.line.is_bar:
                return
            point, at = (
                _join(last, point),
                last.at or at,
            )  # the time of the first rank that printed it
            self.points.pop()
        self.points.append(replace(point, at=at or point.at or None))
        self.num_steps, self.unit = self._steps.num_steps, reading.line.unit
        self.is_least = reading.line.is_least
        self.first_step = point.step if self.first_step is None else self.first_step
        if last is None or point.step != last.step:
            self.point_at = self.tail.mtime
            if self.phase is not None:
                self.phase, self.phase_ended_at = None, self.tail.mtime

    def _mark(self, name: str, begins: bool, text: str) -> None:
        if begins:
            if self.phase is None or self.phase.name != name:
                self.phase = Phase(name=name, since=self.tail.mtime, line=self._line(text, 0, ""))
            return
        self.phase_ended_at = self.tail.mtime
        if self.phase is not None and self.phase.name == name:
            if self.phase.since is not None:
                took = max(0.0, self.tail.mtime - self.phase.since)
                self.phases_s[name] = max(took, self.phases_s.get(name, 0.0))
            self.phase = None

    def _read_info(self, data: bytes) -> None:
        if INFO_MARK not in data:
            return
        for line in data.split(b"\n"):
            if b": " not in line[:40]:
                continue
            text = show(line)
            reading = parse_job_info(text)
            if reading is not None:
                self.info[reading[0]] = self._line(text, 0, "")
                self.node_ranks |= {reading[1]} if reading[0] == "NODE_RANK" else set()

    def _add_known(self, lines: list[bytes], at: int, kind: str, start: int) -> None:
        key = (kind, lines[at].translate(None, DIGITS))
        seen = self._keys.get(key)
        order = start + sum(map(len, lines[:at])) + at
        if seen is not None:
            last_at = self._find_written(order) or self._known[seen].last_at
            num_same = self._known[seen].num_same + 1
            self._known[seen] = replace(self._known[seen], num_same=num_same, last_at=last_at)
            self._places[seen] = order
            self.writers[seen].add(split_tag(show(lines[at][:20]))[0])
        elif len(self._known) < NUM_KNOWN:
            self._keys[key] = len(self._known)
            self._known.append(self._line(show(lines[at]), order, kind))
            self._places.append(order)
            self.writers.append({self._known[-1].rank})

    @property
    def known(self) -> list[Line]:
        """The kept lines of a known kind: the first of each kind and text."""
        return list(map(self._complete, self._known, self._places))

    @property
    def fatal(self) -> Line | None:
        """Last line of this log that reports the end of a process, such as an uncaught exception;
        None without one."""
        return None if self._fatal is None else self._complete(self._fatal, self._fatal_place)

    def _complete(self, line: Line, place: int) -> Line:
        """Return the line with facts that depend on later lines of the file."""
        raised, is_before = self._raised.name(line, place), place < self.step_order
        stream = self._name_stream()
        if (line.raised, line.is_before_steps, line.stream) == (raised, is_before, stream):
            return line
        return replace(line, raised=raised, stream=stream, is_before_steps=is_before)

    def _add_raised(
        self, lines: list[bytes], known: list[tuple[int, str]], start: int, data: bytes
    ) -> list[tuple[int, str]]:
        """Add the lines of exceptions of any name that have a traceback to the known lines."""
        if self._raised.may_skip(data):
            return known
        kinds = dict(known)
        place = start
        for at, line in enumerate(lines):
            rank, text = split_tag(show(line[:MOST_CHARS]))
            if self._raised.feed(rank, text, place):
                kinds.setdefault(at, PYTHON_EXCEPTION)
            place += len(line) + 1
        return sorted(kinds.items())

    def _find_written(self, order: int) -> float | None:
        """Return when the line at this offset was written; None if no agent recorded times."""
        if self._times is None:
            return None
        if self._written is None:
            self._written = self._times.read()[self._is_err]
        return self._written.find(order)

    def _note_fatal(self, lines: list[bytes], known: list[tuple[int, str]], start: int) -> None:
        at, kind = next(((x, name) for x, name in reversed(known) if is_end(name)), (0, ""))
        if kind:
            order = start + sum(map(len, lines[:at])) + at
            self._fatal, self._fatal_place = self._line(show(lines[at]), order, kind), order

    def _note_saved(self, data: bytes, start: int) -> None:
        end = len(data)
        for _ in range(MOST_SAVES):
            at = max(data.rfind(b"aved", 0, end), data.rfind(b"aving", 0, end))
            if at < 0:
                return
            end = data.rfind(b"\n", 0, at) + 1
            text = show(data[end : data.find(b"\n", at)][:MOST_CHARS])
            if is_saved(text):
                self.saved = self._line(text, start + end, "")
                return

    def _name_stream(self) -> str:
        """Return the file's stream; empty if the file may have both streams."""
        if not self.is_apart:
            return ""
        return "stderr" if self._is_err else "stdout"

    def _line(self, text: str, order: int, kind: str) -> Line:
        rank, plain = split_tag(text)
        mtime = self.tail.mtime
        at = parse_time(plain, time.gmtime(mtime).tm_year)
        if at is not None and not mtime - _DAYS_30 < at < mtime + _LATE_S:
            at = None
        written = self._find_written(order) if kind else None
        return Line(
            text=plain,
            node=self._node,
            rank=rank,
            file=self.name,
            kind=kind,
            at=at,
            order=order,
            written_by=mtime,
            last_at=written,
            stream=self._name_stream() if kind else "",
        )


def is_saved(text: str) -> bool:
    """Return True for a line of a program's output that reports a completed save of its model or
    state; False for one that reports a failed or a future save."""
    return _SAVED.search(text) is not None and _NOT_SAVED.search(text) is None


def _make_point(line: Iteration) -> Point:
    return Point(
        step=line.step,
        step_s=None if line.time_ms is None else line.time_ms / 1000,
        loss=line.loss,
        grad_norm=line.grad_norm,
        loss_scale=line.loss_scale,
        skipped=line.skipped or 0,
        nan=line.nan or 0,
    )


def _join(first: Point, second: Point) -> Point:
    """Merge the values of two lines about the same step."""
    named = ("step_s", "loss", "grad_norm", "loss_scale", "at")
    more = {
        name: getattr(second, name) if getattr(second, name) is not None else getattr(first, name)
        for name in named
    }
    return replace(second, **more, skipped=max(first.skipped, second.skipped),
                   nan=max(first.nan, second.nan))  # fmt: skip
