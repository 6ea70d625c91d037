"""Read the traces of all ranks into tables in two passes, so that memory is bounded by what is
drawn.

first pass    every line is read; kept are headers, clock offsets, a row a rank and step, and where
              in its file each step's events lie
second pass   the events of the steps that are asked for

Times come out as seconds since the first step of any rank, on rank 0's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vjob.reports.load.blocks import read_spans
from vjob.reports.load.trace_file import Ends, File, RankTrace, StepRows, cut_at_headers, put_right
from vjob.reports.load.trace_lines import NUMBERS, Column, Events, parse_pieces

MOST_EVENTS = 2_000_000
MOST_SKIPPED = 100_000
"""Maximum lines of a file that are not lines of a trace; after them the file is not read
further."""
STEP_COLUMNS = [
    "attempt", "rank", "stage", "replica", "step",
    "begin_s", "took_s", "first_s", "last_s", "wait_s", "work_s",
]  # fmt: skip
"""The columns of `Traces.steps`; needed for a table without rows."""
_MANY_ROWS = 20_000


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Logged steps that are ignored because some rank lacks calls."""

    attempt: str
    file: str
    first: int
    last: int
    num_whole: int
    """The number of ranks whose calls are complete in these steps."""
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class ClockConflict:
    """Steps whose times contradict each other whatever the offsets of the nodes' clocks."""

    attempt: str
    first: int
    last: int
    seconds: float
    """The smallest number of seconds by which the times contradict each other."""


@dataclass(kw_only=True)
class Traces:
    """The traces of all ranks of a run."""

    ranks: list[RankTrace]
    steps: pd.DataFrame
    """A row for each rank and step: attempt, rank, stage, replica, step, begin_s, took_s, first_s,
    last_s, wait_s and work_s (of the actions), and `<kind>_s` (work) for every kind."""
    zero_ns: int
    """Nanoseconds since 1970 from which the tables' seconds are counted."""
    is_log: bool = False
    """True for traces made from calls of Megatron's timers (reports/load/logged_calls.py), which
    record only a few of the steps."""
    works: pd.DataFrame = field(default_factory=pd.DataFrame)
    """attempt, rank, stage, step and work_s of further steps, for which only sums were printed."""
    left_out: tuple[LeftOut, ...] = ()
    conflicts: tuple[ClockConflict, ...] = ()

    @property
    def detailed_steps(self) -> list[tuple[str, int]]:
        """(attempt, step) of the steps that may have events, in order."""
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
    """Read the traces at (attempt, file) once, keeping steps but not events."""
    files = [File(attempt, path) for attempt, path in paths]
    rows = StepRows()

    def list_pieces() -> Iterator[tuple[tuple[File, int, int], bytes]]:
        for file in files:
            for place, data in cut_at_headers(file.blocks):
                if sum(trace.skipped for trace in file.traces) > MOST_SKIPPED:
                    file.blocks.trouble = f"more than {MOST_SKIPPED:,} lines that are not a trace's"
                    break
                yield (file, place, len(data)), data

    for (file, place, length), lines in parse_pieces(list_pieces()):
        file.take(place, length, lines, rows)
    ranks = [trace for file in files for trace in file.list_traces()]
    return _build_traces(ranks, rows.build_frame(ranks) if ranks else pd.DataFrame())


def _build_traces(ranks: list[RankTrace], frame: pd.DataFrame) -> Traces:
    known = [trace for trace in ranks if trace.has_header and trace.num_rows]
    if known:
        of_known = np.repeat([trace.has_header for trace in ranks], [t.num_rows for t in ranks])
        frame = frame if of_known.all() else frame[of_known].reset_index(drop=True)
    for trace in ranks:
        if not trace.has_header:  # nobody knows when its times are
            trace.skipped += trace.num_rows + trace.num_events
            trace.num_events = trace.num_rows = 0
            trace.spans.clear()
    if not known:
        return Traces(ranks=ranks, steps=pd.DataFrame(columns=STEP_COLUMNS), zero_ns=0)
    frame = _add_ranks(frame, known)
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


def _add_ranks(frame: pd.DataFrame, known: list[RankTrace]) -> pd.DataFrame:
    """Add attempt, rank, stage and replica to rows, and convert their times to one clock."""
    counts = [trace.num_rows for trace in known]
    steps, begins, took = (frame[name].to_numpy() for name in ("step", "begin_ns", "took_s"))
    owned = [slice(end - count, end) for end, count in zip(np.cumsum(counts), counts, strict=True)]
    put_right(
        [(t, Ends(steps[own], begins[own], took[own])) for t, own in zip(known, owned, strict=True)]
    )
    aligned = [trace.align(begins[own]) for trace, own in zip(known, owned, strict=True)]
    frame["begin_ns"] = np.concatenate(aligned)
    frame["attempt"] = np.repeat(np.array([t.attempt for t in known], dtype=object), counts)
    frame["rank"] = np.repeat([trace.rank for trace in known], counts)
    frame["stage"] = np.repeat([trace.stages[0] for trace in known], counts)
    frame["replica"] = np.repeat([trace.replica for trace in known], counts)
    sums = [name for name in frame.columns if name.startswith("sum ")]
    late = [name for name in sums if frame[name].iloc[: counts[0]].isna().all()]
    used = [name for name in late if frame[name].notna().any()]
    return frame[[name for name in frame.columns if name not in late] + used]


# The second pass.


def read_events(traces: Traces, wanted: Iterable[tuple[str, int]]) -> pd.DataFrame:
    """Read the events of the wanted (attempt, step) pairs: attempt, rank, replica, kind, step,
    stage, microbatch, begin_s, ready_s, end_s, bytes, what; at most MOST_EVENTS."""
    steps = _group_steps(wanted)
    own = [trace for trace in traces.ranks if trace.attempt in steps]
    found = _stop_at_most(_read_spans(own, steps))
    frames = list(_build_frames(found, traces.zero_ns))
    return pd.concat(frames, ignore_index=True) if frames else _build_frame_of_none()


def _group_steps(wanted: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Group step numbers by attempt."""
    steps: dict[str, list[int]] = {}
    for attempt, step in wanted:
        steps.setdefault(attempt, []).append(step)
    return steps


def stream_events(traces: Traces) -> Iterator[pd.DataFrame]:
    """Yield all events, a block at a time."""
    return _build_frames(_read_spans(traces.ranks, None), traces.zero_ns)


def _stop_at_most(
    found: Iterable[tuple[RankTrace, Events]],
) -> Iterator[tuple[RankTrace, Events]]:
    """Yield events until MOST_EVENTS is exceeded; the last rank's are yielded whole."""
    count, last = 0, None
    for trace, events in found:
        if count > MOST_EVENTS and trace is not last:
            return
        yield trace, events
        count += len(events)
        last = trace


def _build_frames(
    found: Iterable[tuple[RankTrace, Events]], zero_ns: int
) -> Iterator[pd.DataFrame]:
    held: list[tuple[RankTrace, Events]] = []
    count = 0
    for trace, events in found:
        held.append((trace, events))
        count += len(events)
        if count >= _MANY_ROWS:
            yield _build_frame(held, zero_ns)
            held, count = [], 0
    if held:
        yield _build_frame(held, zero_ns)


def _read_spans(
    ranks: Iterable[RankTrace], steps: dict[str, list[int]] | None
) -> Iterator[tuple[RankTrace, Events]]:
    def list_pieces() -> Iterator[tuple[RankTrace, bytes]]:
        for trace in ranks:
            spans = [
                (place, length)
                for held, place, length in trace.spans
                if steps is None or _holds(held, steps[trace.attempt]).any()
            ]
            for data in read_spans(trace.path, spans):
                yield trace, data

    for trace, lines in parse_pieces(list_pieces()):
        events = lines.events
        if events is not None and steps is not None:
            keep = _holds(events.columns["step"], steps[trace.attempt])
            events = events.select(keep) if keep.any() else None
        if events is not None:
            yield trace, events


def _holds(held: Column, steps: Sequence[int]) -> Column:
    """Return a mask of the available steps that are requested."""
    found: Column = np.isin(held, steps)
    return found


def _build_frame(found: Sequence[tuple[RankTrace, Events]], zero_ns: int) -> pd.DataFrame:
    """Build a table of the events of several ranks."""
    counts = [len(events) for _, events in found]
    columns = {
        name: np.concatenate([events.columns[name] for _, events in found]) for name in NUMBERS
    }
    begin = np.concatenate([trace.align(events.columns["begin"]) for trace, events in found])
    begin -= zero_ns
    ready = begin + columns["wait"]

    def repeat(values: Any) -> Column:
        return np.repeat(values, counts)

    return pd.DataFrame(
        {
            "attempt": repeat(np.array([trace.attempt for trace, _ in found], dtype=object)),
            "rank": repeat([trace.rank for trace, _ in found]),
            "replica": repeat([trace.replica for trace, _ in found]),
            "kind": _spell([(events.kind_names, events.kinds) for _, events in found]),
            "step": columns["step"],
            "stage": columns["stage"],
            "microbatch": columns["microbatch"],
            "begin_s": begin / 1e9,
            "ready_s": ready / 1e9,
            "end_s": (ready + columns["work"]) / 1e9,
            "bytes": columns["bytes"],
            "what": _spell([(events.what_names, events.whats) for _, events in found]),
        }
    )


def _spell(coded: Sequence[tuple[list[str], Column]]) -> Column:
    return np.concatenate([np.array(names, dtype=object)[codes] for names, codes in coded])


def _build_frame_of_none() -> pd.DataFrame:
    names = ["attempt", "rank", "replica", "kind", "step", "stage", "microbatch"]
    return pd.DataFrame(columns=[*names, "begin_s", "ready_s", "end_s", "bytes", "what"])
