"""Reader of the logs of one node: last lines, progress, settings, known lines.

A job of a thousand nodes has megabytes of ends to look through, so blocks are searched as bytes,
and each distinct line is judged once, whatever its numbers are.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from pathlib import Path

from varuna_core.records.logs.progress import parse_progress, parse_time, split_tag
from varuna_core.records.logs.training_log import (
    PHASE_MARKS,
    Iteration,
    parse_job_info,
    parse_mark,
)
from vjob.jobs.monitor.log_lines.errors import DIGITS, INFO_MARK, Classifier
from vjob.jobs.monitor.log_lines.tails import TAIL_BYTES, Added, Tail, show
from vjob.jobs.monitor.model.snapshot import Line, Phase, Point

NUM_POINTS = 300
NUM_SHOWN = 50
"""Last lines that are kept of each file, at most."""
NUM_KNOWN = 200
"""Distinct lines of a known kind that are kept of each file: the first ones."""
NUM_FIRST = 8
"""Lines with points that a first look reads at once."""
HEAD_BYTES = 16 * 1024
"""Where the settings stand: near the beginning."""

_DAYS_30 = 30 * 86400.0
_LATE_S = 1800.0
"""A line that says to be later than its file by so much was written in another zone."""


def take_last(lines: list[bytes], count: int) -> list[bytes]:
    """The last lines with something in them."""
    start = len(lines)
    found = 0
    while start > 0 and found < count:
        start -= 1
        found += not lines[start].isspace() and lines[start] != b""
    return [line for line in lines[start:] if line and not line.isspace()]


class LogFile:
    """One .out or .err."""

    def __init__(
        self,
        path: Path | str,
        node: str,
        name: str,
        classifier: Classifier,
        tail_bytes: int = TAIL_BYTES,
        num_lines: int = NUM_SHOWN,
        begin: bytes | None = None,
    ) -> None:
        """With `begin` known lines before the last line that has it are of an older start."""
        # Settings are printed, not complained of.
        head_bytes = 0 if name.endswith(".err") else HEAD_BYTES
        self.tail = Tail(path, tail_bytes=tail_bytes, head_bytes=head_bytes)
        self.name = name
        self.known: list[Line] = []
        self.writers: list[set[int | None]] = []
        """The ranks that wrote each of these."""
        self.points: deque[Point] = deque(maxlen=NUM_POINTS)
        self.num_steps: int | None = None
        self.first_step: int | None = None
        self.point_at: float | None = None
        self.phase: Phase | None = None
        self.phase_ended_at: float | None = None
        self.phases_s: dict[str, float] = {}
        self.info: dict[str, Line] = {}
        self.loss: Point | None = None
        """The last that told no step of its own, with how many came so far as its step."""
        self.changed = 0
        """Grows with each look that saw something."""
        self._node, self._classifier = node, classifier
        self._begin = begin
        self._shown: deque[bytes] = deque(maxlen=max(1, num_lines))
        self._keys: dict[tuple[str, bytes], int] = {}
        self._is_bar = False
        self._unread: list[bytes] = []
        """Lines with older points, of the first look: most logs' are never asked for."""

    def poll(self) -> bool:
        """Read what is new; whether anything is."""
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
        self._read(added)
        return True

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Made harmless, the open one too; empty ones are left out."""
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
            self.known, self.writers, self._keys = [], [], {}
            after = data.rfind(self._begin)
            start += data.rfind(b"\n", 0, after) + 1
            data = data[data.rfind(b"\n", 0, after) + 1 :]
            lines = data.split(b"\n")[:-1]
        self._shown.extend(take_last(lines, self._shown.maxlen or 1))
        sifted = self._classifier.sift(data, lines)
        for at, kind in sifted.known:
            self._add_known(lines, at, kind, start)
        if any(INFO_MARK in line for line in sifted.telling):
            self._read_info(data)
        self._read_progress(sifted.telling, added.is_anew)

    def catch_up(self) -> None:
        """Read the points before those that the first look read."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        kept = (self.num_steps, self.point_at, self.phase, self.phase_ended_at)
        newer = list(self.points)
        self.points.clear()
        self.first_step = None
        for line in unread:
            text = line.decode(errors="replace").rpartition("\r")[2]
            told = parse_progress(text)
            if told is not None and not told.is_bar:
                self._add_point(told, text)
        if self.points and newer and self.points[-1].step >= newer[0].step:
            self.points.clear()
        self.points.extend(newer)
        self.num_steps, self.point_at, self.phase, self.phase_ended_at = kept
        self.first_step = min((point.step for point in self.points), default=None)

    def _read_progress(self, found: list[bytes], is_first: bool) -> None:
        rest = self.tail.rest
        if b"%|" in rest:  # a bar is told by its last state; other open lines may be torn
            found = [*found, rest]
        found = found[-2 * NUM_POINTS :]
        if is_first and len(found) > NUM_FIRST:
            self._unread, found = found[:-NUM_FIRST], found[-NUM_FIRST:]
        for line in found:
            text = line.decode(errors="replace").rpartition("\r")[2]
            told = parse_progress(text)
            if told is not None:
                self._add_point(told, text)
            if any(mark in line for mark in PHASE_MARKS):
                found_mark = parse_mark(text)
                if found_mark is not None:
                    self._mark(*found_mark, text)

    def _add_point(self, told: Iteration, text: str) -> None:
        point = _make_point(told)
        if point.step < 0:  # a bar, or else the count, tells its step
            step = 1 + (self.loss.step if self.loss else 0)
            self.loss = replace(point, step=step, at=self.tail.mtime)
            return
        last = self.points[-1] if self.points else None
        if told.is_bar:
            # The small bar of an evaluation runs while the training's stands still.
            if (
                self.num_steps
                and told.num_steps
                and told.num_steps < self.num_steps
                and (last is None or last.step < self.num_steps)
            ):
                return
            if last is not None and self._is_bar and last.step == point.step:
                return
        elif self._is_bar:  # lines tell more than bars do
            self.points.clear()
            last = None
        self._is_bar = told.is_bar
        at = parse_time(split_tag(text)[1], time.gmtime(self.tail.mtime).tm_year)
        at = at if at is not None and self.tail.mtime - _DAYS_30 < at else None
        if last is not None and point.step < last.step:  # another start, in the same file
            self.points.clear()
            last = None
        if last is not None and point.step == last.step:
            point = _join(last, point)
            self.points.pop()
        elif point.step_s is None and last is not None and at and last.at:
            point = replace(point, step_s=max(0.0, (at - last.at) / (point.step - last.step)))
        self.points.append(replace(point, at=at or point.at or None))
        self.num_steps = told.num_steps or self.num_steps
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
            told = parse_job_info(text)
            if told is not None:
                self.info[told[0]] = self._line(text, 0, "")

    def _add_known(self, lines: list[bytes], at: int, kind: str, start: int) -> None:
        key = (kind, lines[at].translate(None, DIGITS))
        seen = self._keys.get(key)
        if seen is not None:
            self.known[seen] = replace(self.known[seen], num_same=self.known[seen].num_same + 1)
            self.writers[seen].add(split_tag(show(lines[at][:20]))[0])
        elif len(self.known) < NUM_KNOWN:
            self._keys[key] = len(self.known)
            order = start + sum(map(len, lines[:at])) + at
            self.known.append(self._line(show(lines[at]), order, kind))
            self.writers.append({self.known[-1].rank})

    def _line(self, text: str, order: int, kind: str) -> Line:
        rank, plain = split_tag(text)
        mtime = self.tail.mtime
        at = parse_time(plain, time.gmtime(mtime).tm_year)
        if at is not None and not mtime - _DAYS_30 < at < mtime + _LATE_S:
            at = None
        return Line(
            text=plain,
            node=self._node,
            rank=rank,
            file=self.name,
            kind=kind,
            at=at,
            order=order,
            written_by=mtime,
        )


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
    """Two lines of one step: each tells what it tells."""
    named = ("step_s", "loss", "grad_norm", "loss_scale", "at")
    more = {
        name: getattr(second, name) if getattr(second, name) is not None else getattr(first, name)
        for name in named
    }
    return replace(second, **more, skipped=max(first.skipped, second.skipped),
                   nan=max(first.nan, second.nan))  # fmt: skip
