"""Read one rank's trace (header, clock, a row for each whole step) and correct wrong clocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from varuna_core.records.files import as_whole
from varuna_core.records.logs.trace import COMMUNICATION, COMPUTE, FORMAT, OTHER, OTHERS
from vjob.reports.load.blocks import BlockReader
from vjob.reports.load.trace_lines import Column, TracePiece


@dataclass(kw_only=True)
class RankTrace:
    """The trace of one rank: who wrote it, and where its steps are in the file."""

    path: Path
    attempt: str
    rank: int
    order: int = 0
    """Position among traces by their beginning; a node's file mixes traces of several ranks."""
    stages: tuple[int, ...] = (0,)
    replica: int = 0
    host: str = ""
    device: str = ""
    partition: str = ""
    origin: int = 0
    """Origin of the file's times, in nanoseconds since 1970."""
    offsets: list[tuple[int, int, int]] = field(default_factory=list)
    """(at, offset, residual) of each clock comparison, in the file's order."""
    spans: list[tuple[Column, int, int]] = field(default_factory=list)
    """(steps, offset, length) of every block with events."""
    shifted_ns: int = 0
    """Nanoseconds added to correct a clock that was clearly wrong."""
    after_s: dict[str, float] = field(default_factory=dict)
    """Seconds by kind after the last step, from the trace's last line."""
    has_header: bool = False
    num_events: int = 0
    num_rows: int = 0
    """The number of lines of whole steps."""
    skipped: int = 0
    trouble: str = ""

    @property
    def is_blank(self) -> bool:
        """True until something is read into this trace."""
        return not self.has_header and not self.spans

    @property
    def residual_ns(self) -> int | None:
        """The clock's largest error in ns; None if it was never compared with rank 0's."""
        return max((residual for _, _, residual in self.offsets), default=None)

    def align(self, times: Column) -> Column:
        """Convert times of the file to nanoseconds since 1970 on rank 0's clock."""
        if not self.offsets:
            return times + self.origin
        at, offset, _ = np.array(sorted(self.offsets), dtype=np.int64).T
        drift = np.interp(times, at, (offset - offset[0]).astype(float))
        aligned: Column = times + np.rint(drift).astype(np.int64)
        return aligned + (self.origin + int(offset[0]))


SPAN_BYTES = 1 << 20
KINDS = (*COMPUTE, *COMMUNICATION, *OTHERS)
NO_HEADER = "no header: it may not be a trace"
_MOST_KINDS = 64
_MANY_ROWS = 20_000
_LARGEST = 2**61  # more than now in ns since 1970; sums of three fit in 64 bits


class StepRows:
    """Rows of steps, kept as tables, which take a sixth of the memory of dicts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.frames: list[pd.DataFrame] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if len(self.rows) >= _MANY_ROWS:
            self._pack()

    def build_frame(self, traces: Sequence[RankTrace]) -> pd.DataFrame:
        """Return all rows as one table, those of each trace together, in the order of `traces`."""
        self._pack()
        frames, self.frames = self.frames, []
        if not frames:
            return pd.DataFrame()
        frame = pd.concat(frames, ignore_index=True)
        places = np.zeros(max(trace.order for trace in traces) + 1, dtype=np.int64)
        places[[trace.order for trace in traces]] = np.arange(len(traces))
        owned = pd.Series(places[frame.pop("order").to_numpy()])
        if owned.is_monotonic_increasing:
            return frame
        return frame.iloc[np.argsort(owned.to_numpy(), kind="stable")].reset_index(drop=True)

    def _pack(self) -> None:
        if self.rows:
            frame = pd.DataFrame(self.rows)
            frame[["first_s", "last_s"]] = frame[["first_s", "last_s"]].astype(float)
            self.frames.append(frame)
            self.rows = []


_ORDER = itertools.count()


class File:
    """Reader of one file, with a trace for each header; a restarted writer adds a header."""

    def __init__(self, attempt: str, path: Path) -> None:
        digits = path.name.partition(".")[0]
        rank = as_whole(digits)
        rank = -1 if rank is None else rank
        self.traces = [self._begin(attempt, path, rank, NO_HEADER)]
        self._now = self.traces[0]
        self._last: dict[int, RankTrace] = {}
        """The last trace of each rank that a line named."""
        self.blocks = BlockReader(path, SPAN_BYTES)

    def take(self, place: int, length: int, lines: TracePiece, rows: StepRows) -> None:
        """Add the events of a piece of the file, starting at byte `place`, to the trace."""
        trace = self._now
        for value in lines.objects:
            if value.keys() == {"rank"}:
                trace = self._turn_to(value["rank"])
            elif "trace" in value:
                if not trace.is_blank:
                    trace = self._begin(trace.attempt, trace.path, trace.rank)
                    self.traces.append(trace)
                    if self._last:
                        self._last[trace.rank] = trace
                trace.trouble = _take_header(trace, value)
                trace.has_header = not trace.trouble
            elif not _take_record(trace, value, rows):
                trace.skipped += 1
        trace.skipped += lines.skipped
        if lines.events is not None and len(lines.events):
            trace.spans.append((_list_unique(lines.events.columns["step"]), place, length))
            trace.num_events += len(lines.events)
        self._now = trace

    def list_traces(self) -> list[RankTrace]:
        """Return the traces sorted by rank. Call this once, after the whole file was read."""
        last = self.traces[-1]
        last.skipped += self.blocks.skipped
        last.trouble = self.blocks.trouble or last.trouble
        return sorted(self.traces, key=lambda t: (t.rank, t.order)) if self._last else self.traces

    def _turn_to(self, rank: Any) -> RankTrace:
        """Return the trace of the rank whose batch of lines begins here."""
        rank = rank if _is_whole(rank) else -1
        found = self._last.get(rank)
        if found is None:
            first = self.traces[0]
            if not self._last and first.is_blank and first.rank < 0:
                first.rank = rank
                found = first
            else:
                found = self._begin(first.attempt, first.path, rank, NO_HEADER)
                self.traces.append(found)
            self._last[rank] = found
        return found

    def _begin(self, attempt: str, path: Path, rank: int, trouble: str = "") -> RankTrace:
        order = next(_ORDER)
        return RankTrace(path=path, attempt=attempt, rank=rank, trouble=trouble, order=order)


def _take_header(trace: RankTrace, value: dict[str, Any]) -> str:
    """Copy the values of a trace file's header into `trace`; return why the header is refused, or
    an empty text."""
    if value["trace"] != FORMAT:
        return f"trace format {str(value['trace'])[:20]}, but this vjob reads {FORMAT}"
    numbers = [value.get(name) for name in ("rank", "replica", "origin")]
    stages = value.get("stages")
    if not isinstance(stages, list) or not stages or not all(map(_is_whole, [*numbers, *stages])):
        return "a broken header"
    trace.rank, trace.replica, trace.origin = (int(number or 0) for number in numbers)
    trace.stages = tuple(stages)
    trace.host, trace.device = str(value.get("host", "")), str(value.get("device", ""))
    trace.partition = str(value.get("partition", ""))
    return ""


def _take_record(trace: RankTrace, value: dict[str, Any], rows: StepRows) -> bool:
    """Store a line of the trace; return False if its form is not one that the writer uses."""
    if "offset" in value:
        at, offset, residual = (value.get(name) for name in ("at", "offset", "residual"))
        if _is_whole(at) and _is_whole(offset) and _is_whole(residual):
            trace.offsets.append((at, offset, residual))
            return True
        return False
    sums = value.get("sums")
    if "after" in value:
        if not isinstance(sums, dict) or len(sums) > _MOST_KINDS:
            return False
        for kind, three in sums.items():
            if not _is_triple(three):
                return False
            name = kind if kind in KINDS else OTHER
            trace.after_s[name] = trace.after_s.get(name, 0.0) + (three[1] + three[2]) / 1e9
        return True
    step, begin, took = (value.get(name) for name in ("step", "begin", "took"))
    if not isinstance(sums, dict) or len(sums) > _MOST_KINDS:
        return False
    if not (_is_whole(step) and _is_whole(begin) and _is_whole(took)):
        return False
    wait = work = 0
    row: dict[str, Any] = {"step": step, "begin_ns": begin, "took_s": took / 1e9}
    for name in ("first", "last"):
        time = value.get(name)
        if time is None:
            row[name + "_s"] = None
        elif _is_whole(time):
            row[name + "_s"] = (time - begin) / 1e9
        else:
            return False
    for kind, three in sums.items():
        if not _is_triple(three):
            return False
        column = f"sum {kind if kind in KINDS else OTHER}"
        row[column] = row.get(column, 0.0) + three[2] / 1e9
        if kind in COMPUTE:
            wait += three[1]
            work += three[2]
    row["wait_s"], row["work_s"] = wait / 1e9, work / 1e9
    trace.num_rows += 1
    rows.add({**row, "order": trace.order})
    return True


def _is_triple(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 3 and all(map(_is_whole, value))


def _is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < _LARGEST


def _list_unique(steps: Column) -> Column:
    """Return the distinct steps of a block, which often has just one."""
    if (steps == steps[0]).all():
        alone: Column = steps[:1].copy()
        return alone
    found: Column = np.unique(steps)
    return found


def cut_at_headers(blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Cut blocks so that each header, and each line that begins a rank's batch, is the first line
    of its block."""
    for place, data in blocks:
        start = 0
        for cut in sorted({*_find_all(data, b'\n{"trace":'), *_find_all(data, b'\n{"rank":')}):
            yield place + start, data[start : cut + 1]
            start = cut + 1
        yield place + start, data[start:]


def _find_all(data: bytes, word: bytes) -> Iterator[int]:
    at = data.find(word)
    while at >= 0:
        yield at
        at = data.find(word, at + 1)


WRONG = 0.5
"""A clock counts as wrong if its error exceeds this fraction of a median step."""
STEADY = 0.25
"""Spread of the shift, as a fraction of it. A wrong clock is off by the same amount at every step:
if the middle half of the steps' ends spreads further, the ranks do not wait for each other."""


@dataclass(frozen=True)
class Ends:
    """Number, begin and duration of each whole step of a trace, as columns."""

    step: Column
    begin_ns: Column
    took_s: Column

    def list_by_step(self, trace: RankTrace) -> dict[int, int]:
        """Return the time at which each step ended, the last time for a repeated step."""
        ends = trace.align(self.begin_ns) + (self.took_s * 1e9).astype(np.int64)
        return dict(zip(self.step.tolist(), ends.tolist(), strict=True))


def put_right(found: Iterable[tuple[RankTrace, Ends]]) -> None:
    """Shift the origins of wrong clocks and record the shift in `shifted_ns`.

    Ranks on one machine share a clock; if their times differ, it is because they do not wait for
    each other.
    """
    attempts: dict[str, list[tuple[RankTrace, Ends]]] = {}
    for trace, ends in found:
        attempts.setdefault(trace.attempt, []).append((trace, ends))
    for own in attempts.values():
        own.sort(key=lambda pair: (not pair[0].offsets, pair[0].rank))
        (first, ends), *others = own
        doubtful = [
            (trace, ends)
            for trace, ends in others
            if not trace.offsets and (not trace.host or trace.host != first.host)
        ]
        if not doubtful:
            continue
        reference = ends.list_by_step(first)
        typical_ns = float(np.median(ends.took_s)) * 1e9
        for trace, own_ends in doubtful:
            by_step = own_ends.list_by_step(trace)
            apart = sorted(
                reference[step] - by_step[step] for step in by_step.keys() & reference.keys()
            )
            shift = apart[len(apart) // 2] if apart else 0
            spread = apart[len(apart) * 3 // 4] - apart[len(apart) // 4] if apart else 0
            if abs(shift) > WRONG * typical_ns and spread <= STEADY * abs(shift):
                trace.origin += shift
                trace.shifted_ns = shift
