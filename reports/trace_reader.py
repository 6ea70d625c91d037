"""Traces of all ranks to tables, in two passes: memory is bounded by what is drawn.

first pass    every line is read; kept are headers, clock offsets, a row a rank and step, and where
              in its file each step's events lie
second pass   the events of the steps that are asked for

Times come out as seconds since the first step of any rank, on rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from reports.blocks import BlockReader, read_span
from reports.clocks import put_right
from reports.rank_trace import RankTrace
from reports.trace_lines import Column, Events, parse_lines
from varuna_core.records.trace import COMMUNICATION, COMPUTE, FORMAT, OTHERS

SPAN_BYTES = 1 << 20
KINDS = (*COMPUTE, *COMMUNICATION, *OTHERS)
NO_HEADER = "no header: it may be no trace"
MOST_EVENTS = 2_000_000
_MOST_KINDS = 64
_MANY_ROWS = 20_000
_LARGEST = 2**61  # more than now in ns since 1970; sums of three fit in 64 bits


@dataclass(kw_only=True)
class Traces:
    """All ranks of a run."""

    ranks: list[RankTrace]
    steps: pd.DataFrame
    """A row a rank and step: attempt, rank, stage, replica, step, begin_s, took_s, first_s, last_s,
    wait_s, work_s (both of the actions), and `<kind>_s` (work) of every kind."""
    zero_ns: int
    """Nanoseconds since 1970 where the tables' seconds begin."""

    @property
    def detailed_steps(self) -> list[tuple[str, int]]:
        """(attempt, step) of which events may be there, in order."""
        found = {
            (trace.attempt, step)
            for trace in self.ranks
            for steps, _, _ in trace.spans
            for step in steps.tolist()
        }
        known = set(zip(self.steps["attempt"], self.steps["step"], strict=True))
        order = {trace.attempt: at for at, trace in enumerate(self.ranks)}
        return sorted(found & known, key=lambda pair: (order[pair[0]], pair[1]))


def read_traces(paths: Iterable[tuple[str, Path]]) -> Traces:
    """The first pass over (attempt, file)."""
    found = [pair for attempt, path in paths for pair in _read_rank(attempt, path)]
    ranks = [trace for trace, _ in found]
    for trace, own in found:
        if not trace.has_header:  # nobody knows when its times are
            trace.skipped += sum(map(len, own.frames)) + len(own.rows) + trace.num_events
            trace.num_events = 0
            trace.spans.clear()
    known = [(trace, own.build_frame()) for trace, own in found if trace.has_header]
    known = [(trace, frame) for trace, frame in known if len(frame)]
    put_right(known)
    if not known:
        names = ["attempt", "rank", "stage", "replica", "step"]
        times = ["begin_s", "took_s", "first_s", "last_s", "wait_s", "work_s"]
        return Traces(ranks=ranks, steps=pd.DataFrame(columns=names + times), zero_ns=0)
    for trace, own_frame in known:
        own_frame["begin_ns"] = trace.align(own_frame["begin_ns"].to_numpy())
        own_frame["attempt"], own_frame["rank"] = trace.attempt, trace.rank
        own_frame["stage"], own_frame["replica"] = trace.stages[0], trace.replica
    frame = pd.concat([own_frame for _, own_frame in known], ignore_index=True)
    known.clear()
    zero = int(frame["begin_ns"].min())
    frame["begin_s"] = (frame.pop("begin_ns") - zero) / 1e9
    for name in ("first_s", "last_s"):
        frame[name] += frame["begin_s"]
    sums = [name for name in frame.columns if name.startswith("sum ")]
    frame[sums] = frame[sums].fillna(0.0)
    frame = frame.rename(columns={name: name[4:] + "_s" for name in sums})
    # A step that ran again after a restart within the attempt counts as it ran last.
    frame = frame.drop_duplicates(["attempt", "rank", "step"], keep="last")
    return Traces(ranks=ranks, steps=frame.reset_index(drop=True), zero_ns=zero)


class _Rows:
    """Rows of a rank's steps; tables hold them in a sixth of the room of dicts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.frames: list[pd.DataFrame] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if len(self.rows) >= _MANY_ROWS:
            self._pack()

    def build_frame(self) -> pd.DataFrame:
        """All rows; to be called once."""
        self._pack()
        frames, self.frames = self.frames, []
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def _pack(self) -> None:
        if self.rows:
            frame = pd.DataFrame(self.rows)
            frame[["first_s", "last_s"]] = frame[["first_s", "last_s"]].astype(float)
            self.frames.append(frame)
            self.rows = []


def _read_rank(attempt: str, path: Path) -> list[tuple[RankTrace, _Rows]]:
    """A trace for each header of the file: a writer that starts again writes another."""
    digits = path.name.partition(".")[0]
    trace = RankTrace(path=path, attempt=attempt, rank=int(digits) if digits.isdigit() else -1)
    trace.trouble = NO_HEADER
    rows = _Rows()
    found = [(trace, rows)]
    blocks = BlockReader(path, SPAN_BYTES)
    for place, data in _cut_at_headers(blocks):
        lines = parse_lines(data)
        trace.skipped += lines.skipped
        for value in lines.objects:
            if "trace" in value:
                if not trace.is_blank:
                    trace, rows = RankTrace(path=path, attempt=attempt, rank=trace.rank), _Rows()
                    found.append((trace, rows))
                trace.trouble = _take_header(trace, value)
                trace.has_header = not trace.trouble
            elif not _take_record(trace, value, rows):
                trace.skipped += 1
        if lines.events is not None and len(lines.events):
            trace.spans.append((np.unique(lines.events.columns["step"]), place, len(data)))
            trace.num_events += len(lines.events)
    trace.skipped += blocks.skipped
    trace.trouble = blocks.trouble or trace.trouble
    return found


def _cut_at_headers(blocks: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Pieces in which a header is the first line, if there is one."""
    for place, data in blocks:
        start = 0
        while (cut := data.find(b'\n{"trace":', start) + 1) > 0:
            yield place + start, data[start:cut]
            start = cut
        yield place + start, data[start:]


def _take_header(trace: RankTrace, value: dict[str, Any]) -> str:
    """What is wrong with the header, if anything."""
    if value["trace"] != FORMAT:
        return f"format {str(value['trace'])[:20]}, this vjob reads {FORMAT}"
    numbers = [value.get(name) for name in ("rank", "replica", "origin")]
    stages = value.get("stages")
    if not isinstance(stages, list) or not stages or not all(map(_is_whole, [*numbers, *stages])):
        return "a broken header"
    trace.rank, trace.replica, trace.origin = (int(number or 0) for number in numbers)
    trace.stages = tuple(stages)
    trace.host, trace.device = str(value.get("host", "")), str(value.get("device", ""))
    trace.partition = str(value.get("partition", ""))
    return ""


def _take_record(trace: RankTrace, value: dict[str, Any], rows: _Rows) -> bool:
    """False where the line is none that the writer writes."""
    if "offset" in value:
        at, offset, residual = (value.get(name) for name in ("at", "offset", "residual"))
        if _is_whole(at) and _is_whole(offset) and _is_whole(residual):
            trace.offsets.append((at, offset, residual))
            return True
        return False
    sums = value.get("sums")
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
        if not isinstance(three, list) or len(three) != 3 or not all(map(_is_whole, three)):
            return False
        row[f"sum {kind if kind in KINDS else 'other'}"] = three[2] / 1e9
        if kind in COMPUTE:
            wait += three[1]
            work += three[2]
    row["wait_s"], row["work_s"] = wait / 1e9, work / 1e9
    rows.add(row)
    return True


def _is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < _LARGEST


# The second pass.


def read_events(traces: Traces, wanted: Iterable[tuple[str, int]]) -> pd.DataFrame:
    """Events of the (attempt, step)s: attempt, rank, replica, kind, step, stage, microbatch,
    begin_s, ready_s, end_s, bytes, what; at most MOST_EVENTS."""
    steps: dict[str, list[int]] = {}
    for attempt, step in wanted:
        steps.setdefault(attempt, []).append(step)
    frames, count = [], 0
    for trace in traces.ranks:
        if trace.attempt not in steps or count > MOST_EVENTS:
            continue
        for frame in _read_spans(trace, steps[trace.attempt], traces.zero_ns):
            frames.append(frame)
            count += len(frame)
    return pd.concat(frames, ignore_index=True) if frames else _build_frame_of_none()


def stream_events(traces: Traces) -> Iterator[pd.DataFrame]:
    """All events, a piece at a time."""
    for trace in traces.ranks:
        yield from _read_spans(trace, None, traces.zero_ns)


def _read_spans(
    trace: RankTrace, steps: Sequence[int] | None, zero_ns: int
) -> Iterator[pd.DataFrame]:
    for held, place, length in trace.spans:
        if steps is not None and not np.isin(held, steps).any():
            continue
        events = parse_lines(read_span(trace.path, place, length)).events
        if events is None:
            continue
        keep = None if steps is None else np.isin(events.columns["step"], steps)
        if keep is None or keep.any():
            yield build_frame(trace, events, zero_ns, keep)


def build_frame(
    trace: RankTrace, events: Events, zero_ns: int, keep: Column | None = None
) -> pd.DataFrame:
    """Events of one rank as a table."""
    columns = events.columns
    kinds, whats = events.kinds, events.whats
    if keep is not None:
        columns = {name: values[keep] for name, values in columns.items()}
        kinds, whats = kinds[keep], whats[keep]
    begin = trace.align(columns["begin"]) - zero_ns
    ready = begin + columns["wait"]
    return pd.DataFrame(
        {
            "attempt": trace.attempt,
            "rank": trace.rank,
            "replica": trace.replica,
            "kind": np.array(events.kind_names, dtype=object)[kinds],
            "step": columns["step"],
            "stage": columns["stage"],
            "microbatch": columns["microbatch"],
            "begin_s": begin / 1e9,
            "ready_s": ready / 1e9,
            "end_s": (ready + columns["work"]) / 1e9,
            "bytes": columns["bytes"],
            "what": np.array(events.what_names, dtype=object)[whats],
        }
    )


def _build_frame_of_none() -> pd.DataFrame:
    names = ["attempt", "rank", "replica", "kind", "step", "stage", "microbatch"]
    return pd.DataFrame(columns=[*names, "begin_s", "ready_s", "end_s", "bytes", "what"])
