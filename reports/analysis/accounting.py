"""Account for every second of every rank, from the submit to the end of the last attempt, by class
of time.

Pure: tables in, a table out. Each class is measured separately; time that was not measured is
`unknown`, and time that two classes claim is `overlap_s`, which indicates an error of the traces or
of the clocks.

    submitted   started      first step's begin      last step's end    attempt's end
        │ queue    │   start        │ steps, one after another │    end       │ lost │ start │ ...
                                    └ compute, bubble, communication, data, checkpoint, ...

The time since the end of the previous attempt belongs to an attempt's ranks: it is `queue` after a
requeue, and otherwise `lost`. Steps that a later attempt repeated are `lost`, too, and so is the
time after the last step of an attempt that did not end well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.records.formatting import format_duration, format_share
from varuna_core.records.logs.trace import COMMUNICATION, COMPUTE
from vjob.reports.analysis.readings import LEAST_COVERED, Readings
from vjob.reports.analysis.step_times import count_repeated

CLASSES: dict[str, str] = {
    "compute": "computing",
    "steps": "steps, not taken apart",
    "bubble": "waiting for other ranks' work",
    "communication": "communication that no computation hides",
    "data": "waiting for data",
    "checkpoint": "checkpoints",
    "evaluate": "evaluation",
    "other": "spans that the script named itself",
    "start": "checks, imports, communicators, loading",
    "queue": "between the submit, or a requeue, and the start",
    "hung": "no rank made a step, until vjob or somebody ended it",
    "lost": "lost to faults, changes of nodes, and steps done again",
    "end": "after the last step",
    "unknown": "nothing measured it",
}
"""The classes of time and their descriptions, in the order of the report's bar."""
STEPS = ("compute", "steps", "bubble", "communication", "data", "checkpoint", "evaluate", "other")
"""The classes of time that can be spent within a step."""
_OF_KIND = {
    **dict.fromkeys((*COMPUTE, "optimizer"), "compute"),
    **{kind: kind for kind in ("data", "checkpoint", "evaluate", "other")},
}


def name_class(kind: str) -> str:
    """Return the class of time that a kind of trace event belongs to."""
    return "communication" if kind in COMMUNICATION else _OF_KIND.get(kind, "other")


TOLERANCE = 0.001
"""The sum of the classes may exceed the whole time by this fraction without being an error."""
ROUNDED_S = 1e-5
"""Sums of fewer rank-seconds than this are rounding errors."""
WAITS = ("attempt", "rank", "bubble_s", "transfer_s", "exposed_s", "overlapped_s", "late_s")
"""Columns of the table of waits in detailed steps: waits of actions for work and for messages,
communication that work does not overlap and that it overlaps, and the part of the exposed
communication spent on ranks that came late."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the ranks (an attempt or an earlier try). Times are seconds since 1970."""

    label: str
    since: float
    """The end of the previous attempt, or the submit for the first one."""
    started: float
    ended: float
    is_queued: bool
    """True if the attempt waited in the scheduler's queue between `since` and its start."""
    is_lost: bool
    """True if work after the attempt's last step was lost: a rank failed, or the nodes changed."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Rank-seconds of a run, divided by rank and class of time."""

    rows: pd.DataFrame
    """A row for each attempt and rank, with the columns attempt, rank, span_s, `<class>_s` of each
    class, and overlap_s. The sum of the classes less overlap_s equals span_s."""
    attempts: tuple[Attempt, ...]
    is_split: bool
    """True if traces divide the time of the steps into classes."""
    was_cancelled: bool = False
    """True if a cancel ended the last attempt."""
    may: Mapping[str, float] = field(default_factory=dict)
    """Seconds of `unknown` that may belong to each class: to steps, the start or the end."""
    slack_s: float = 0.0
    """Error of the seconds of `steps`: the true value may be smaller by this much, since the times
    at which log lines were written are not exact."""
    start: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part of the start (see START), for ranks whose beginning is known."""

    @property
    def total_s(self) -> float:
        """Rank-seconds of all classes together."""
        return float(self.rows["span_s"].sum())

    @property
    def since_start_s(self) -> float:
        """Rank-seconds since the first attempt's start: without the wait before it."""
        first = self.attempts[0] if self.attempts else None
        before_s = 0.0 if first is None else (first.started - first.since) * len(first.ranks)
        return self.total_s - before_s

    @property
    def seconds(self) -> dict[str, float]:
        """Rank-seconds by class, without classes below ROUNDED_S, which are rounding errors."""
        sums = {name: float(self.rows[f"{name}_s"].sum()) for name in CLASSES}
        return {name: seconds for name, seconds in sums.items() if seconds > ROUNDED_S}

    @property
    def shares(self) -> dict[str, float]:
        """Share of all rank-seconds by class. The sum exceeds 1 by time that two classes claim."""
        total = self.total_s
        return {name: seconds / total for name, seconds in self.seconds.items()} if total else {}

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """The smallest and the largest share that each class may have."""
        total = self.total_s
        if not total:
            return {}
        less = {"steps": self.slack_s}
        parts = {name: (self.seconds.get(name, 0.0), self.may.get(name, 0.0)) for name in CLASSES}
        return {
            name: (
                max(seconds - less.get(name, 0.0), 0.0) / total,
                min(1.0, (seconds + more) / total),
            )
            for name, (seconds, more) in parts.items()
            if seconds or more
        }

    @property
    def overlap(self) -> float:
        """The fraction of all time that two classes claim."""
        total = self.total_s
        return float(self.rows["overlap_s"].sum()) / total if total else 0.0

    @property
    def stepping_s(self) -> float:
        """Rank-seconds within steps that count; 0 if the steps' times are not known."""
        known_s = sum(self.seconds.get(name, 0.0) for name in STEPS)
        most_s = known_s + self.may.get("steps", 0.0)
        return known_s if known_s >= LEAST_COVERED * most_s else 0.0


START = ("checks and container", "imports", "communicators, data and loading", "in the program")
"""Parts of a start: until a rank's process began, until it opened its trace, and until its first
step; the last two together for a rank without a trace."""


def divide_start(
    found: Accounting,
    begun: Mapping[tuple[str, int], float],
    opened: Mapping[tuple[str, int], float],
) -> dict[str, float]:
    """Return the seconds of all ranks by part of the start (see START). `begun` has the time at
    which the process of each attempt's rank began, and `opened` the time at which the rank opened
    its trace, both since 1970. A rank without an entry in `begun` began with the others."""
    started = {attempt.label: attempt.started for attempt in found.attempts}
    usual = {
        label: float(np.mean([at for (own, _), at in begun.items() if own == label]))
        for label in {label for label, _ in begun}
    }
    parts = dict.fromkeys(START, 0.0)
    columns = ["attempt", "rank", "start_s"]
    for label, rank, start_s in found.rows[columns].itertuples(index=False):
        at = begun.get((label, rank), usual.get(label))
        if at is None or start_s <= 0:
            continue
        checks = min(max(at - started[label], 0.0), start_s)
        parts[START[0]] += checks
        open_at = opened.get((label, rank))
        if open_at is None:
            parts[START[3]] += start_s - checks
            continue
        imports = min(max(open_at - max(at, started[label]), 0.0), start_s - checks)
        parts[START[1]] += imports
        parts[START[2]] += start_s - checks - imports
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def format_least(found: Accounting, name: str) -> str:
    """Format a class's share: `12 %`; `12 % or more` if more of the time may be of this class; `8 %
    to 12 %` if less may be."""
    low, high = found.bounds[name]
    share = found.shares.get(name, 0.0)
    if share - low > TOLERANCE:
        return f"{format_share(low)} to {format_share(high)}"
    return f"{format_share(low)} or more" if high - low > TOLERANCE else format_share(low)


def describe_class(found: Accounting, name: str) -> str:
    """Describe a class of time; the start by its parts, and lost time by what may have cost it."""
    if name == "lost" and found.was_cancelled:
        cut = "work after the last step, cut off by the cancel"
        more = ", or lost to faults, changes of nodes and repeated steps"
        return cut + (more if len(found.attempts) > 1 else "")
    if name == "lost" and len(found.attempts) == 1:  # nothing was done again
        return "after the last step, until the end of ranks that did not end well"
    if name != "start" or not found.start:
        return CLASSES[name]
    parts = "; ".join(f"{part} {format_duration(s)}" for part, s in found.start.items())
    return f"{CLASSES[name]}: of which {parts}"


def list_attempts(
    history: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    spans: Mapping[str, tuple[float | None, float | None]],
    ranks: Mapping[str, Sequence[int]],
    failed: Sequence[str],
) -> list[Attempt]:
    """Return the attempts in order of time. `labels` are in order; `spans` has the first and last
    known moment of each attempt by other sources, and `failed` the attempts that ended badly."""
    asked = [float(e["time"]) for e in history if e.get("kind") in ("intent", "submitted")]
    requeues = [float(e["time"]) for e in history if e.get("kind") == "requeued"]
    found: list[Attempt] = []
    for at, label in enumerate(labels):
        own = [time for time in spans.get(label, (None, None)) if time is not None]
        started = _find_times(history, "started", label, labels)
        ended = _find_times(history, "ended", label, labels)
        times = [*own, *started, *ended]
        if not times:
            continue
        begin, end = min(started, default=min(times)), max(times)
        before = found[-1].ended if found else max((t for t in asked if t <= begin), default=begin)
        begin = max(begin, before)
        was_requeued = ".earlier-" in labels[at - 1] if at else True
        found.append(
            Attempt(
                label=label,
                since=before,
                started=begin,
                ended=max(begin, end),
                is_queued=was_requeued or any(before - 1 <= time <= begin for time in requeues),
                is_lost=label in failed or at < len(labels) - 1,
                ranks=tuple(ranks.get(label, ())) or (0,),
            )
        )
    return found


def _find_times(
    history: Sequence[Mapping[str, Any]], kind: str, label: str, labels: Sequence[str]
) -> list[float]:
    """Return the time of this event in the try named `label`, as a list of at most one."""
    number, _, earlier = label.partition(".earlier-")
    times = sorted(
        float(event["time"])
        for event in history
        if event.get("kind") == kind and str(event.get("attempt", "")) == number
    )
    tries = [other for other in labels if other.partition(".earlier-")[0] == number]
    if len(times) < len(tries):
        return times[-1:] if not earlier and times else []
    return times[-1:] if not earlier else times[int(earlier) : int(earlier) + 1]


def account(
    attempts: Sequence[Attempt],
    steps: pd.DataFrame,
    after: pd.DataFrame,
    waits: pd.DataFrame,
    readings: Mapping[str, Readings],
    log_lines: pd.DataFrame,
    hung: Mapping[str, float] | None = None,
) -> Accounting:
    """Divide the time of all attempts by class.

    `steps` are the steps of the traces, with begin_s since 1970. `after` has attempt, rank and the
    seconds by class after each rank's last step. `waits` has the columns WAITS. `readings`, by
    attempt, serve attempts without traces. `log_lines` has attempt, step, took_s and a count of log
    lines, for ranks that were killed before their last steps reached their traces. `hung` is the
    seconds by attempt in which its ranks hung.
    """
    labels = [item.label for item in attempts]
    every = pd.concat([steps[["attempt", "step"]], log_lines[["attempt", "step"]]])
    log_lines = log_lines.assign(again=count_repeated(log_lines, every, labels))
    again = count_repeated(steps.assign(count=1), every, labels) > 0
    taken = _take_apart(steps, waits, again)
    are_steps_told = any(one.steps_s > 0 for one in readings.values())
    rows = []
    may: Counter[str] = Counter()
    slack_s = 0.0
    for attempt in attempts:
        own = taken[taken["attempt"] == attempt.label].set_index("rank")
        late = after[after["attempt"] == attempt.label].set_index("rank")
        for rank in attempt.ranks:
            row: dict[str, Any] = {f"{name}_s": 0.0 for name in CLASSES}
            row |= {"attempt": attempt.label, "rank": rank, "overlap_s": 0.0}
            row["span_s"] = attempt.ended - attempt.since
            row["queue_s" if attempt.is_queued else "lost_s"] += attempt.started - attempt.since
            if rank in own.index:
                sums = own.loc[rank]
                tail = {} if rank not in late.index else late.loc[rank].dropna().to_dict()
                _add_traced(
                    row, attempt, sums, tail, log_lines[log_lines["attempt"] == attempt.label]
                )
            else:
                found = readings.get(attempt.label)
                more = _add_logged(row, attempt, found, are_steps_told=are_steps_told)
                may.update(more)
                slack_s += found.slack_s if found is not None else 0.0
            _take_hung(row, (hung or {}).get(attempt.label, 0.0))
            rows.append(row)
    names = ["attempt", "rank", "span_s", *(f"{name}_s" for name in CLASSES), "overlap_s"]
    table = pd.DataFrame(rows, columns=names)
    return Accounting(
        rows=table,
        attempts=tuple(attempts),
        is_split=len(taken) > 0,
        may=dict(may),
        slack_s=slack_s,
    )


def _take_hung(row: dict[str, Any], seconds: float) -> None:
    """Move the seconds of a hang into `hung_s` from the classes in which they were counted."""
    for name in ("lost", "end", "unknown", "bubble", "communication"):
        part = min(row[f"{name}_s"], seconds)
        row[f"{name}_s"] -= part
        row["hung_s"] += part
        seconds -= part


def _add_traced(
    row: dict[str, Any],
    attempt: Attempt,
    sums: pd.Series[float],
    tail: Mapping[str, Any],
    log_lines: pd.DataFrame,
) -> None:
    """Add the time of a rank with a trace: before its first step, in its steps, and after."""
    first, last = float(sums["first"]), float(sums["last"])
    start = first - attempt.started
    early = min(float(sums["early_s"]), max(start, 0.0))  # such as data read before the first step
    row["start_s"] += max(start - early, 0.0)
    row["overlap_s"] += float(sums["early_s"]) - early + max(-start, 0.0)
    for name in (*STEPS, "lost", "unknown", "overlap"):
        row[f"{name}_s"] += float(sums[f"{name}_s"])
    rest = attempt.ended - last
    if attempt.is_lost:
        later = log_lines[log_lines["step"] > sums["step"]]
        counts = np.minimum(later["count"], later["step"] - sums["step"])
        useful_s = float((later["took_s"] * (counts - later["again"]).clip(lower=0)).sum())
        untraced_s = min(useful_s, max(rest, 0.0))
        row["steps_s"] += untraced_s
        rest -= untraced_s
        row["lost_s"] += max(rest, 0.0)
        row["overlap_s"] += max(-rest, 0.0)
        return
    known = {name: float(tail[name]) for name in STEPS if name in tail}
    for name, seconds in known.items():
        row[f"{name}_s"] += seconds
    rest -= sum(known.values())
    row["end_s"] += max(rest, 0.0)
    row["overlap_s"] += max(-rest, 0.0)


def _add_logged(
    row: dict[str, Any], attempt: Attempt, found: Readings | None, *, are_steps_told: bool
) -> dict[str, float]:
    """Add the time of a rank without a trace, with its steps from the log. Time in which it may
    have taken steps is unknown; return how much of that may belong to each class."""
    room = attempt.ended - attempt.started
    if found is None or not found.steps_s > 0:
        is_lost = found is None and attempt.is_lost and are_steps_told
        row["lost_s" if is_lost else "unknown_s"] += room
        return {} if is_lost else {name: room for name in ("steps", "start", "end")}
    before = after = 0.0
    if found.first_at is not None and found.last_at is not None:
        start = min(max(found.first_at - attempt.started, 0.0), room)
        tail = min(max(attempt.ended - found.last_at, 0.0), room - start)
        before, after = min(found.before_s, start), min(found.after_s, tail)
        row["start_s"] += start - before
        row["lost_s" if attempt.is_lost else "end_s"] += tail - after
        row["unknown_s"] += before + after
        room -= start + tail
    row["steps_s"] += found.steps_s - found.repeated_s
    row["lost_s"] += found.repeated_s
    row["checkpoint_s"] += found.checkpoint_s
    row["evaluate_s"] += found.evaluate_s
    rest = room - found.steps_s - found.checkpoint_s - found.evaluate_s
    row["unknown_s"] += max(rest, 0.0)
    row["overlap_s"] += max(-rest, 0.0)
    gap = min(found.gap_s, max(rest, 0.0))
    return {"steps": before + gap + after, "start": before, "end": after}


def _take_apart(steps: pd.DataFrame, waits: pd.DataFrame, again: pd.Series[bool]) -> pd.DataFrame:
    """Return a row for each attempt and rank: first, last, early_s (time before the first step that
    a class claims), step (the last one), the seconds of each class between first and last, and
    lost_s, unknown_s and overlap_s."""
    names = ["attempt", "rank", "first", "last", "early_s"]
    columns = [*names, "step", *(f"{name}_s" for name in (*STEPS, "lost", "unknown", "overlap"))]
    if steps.empty:
        return pd.DataFrame(columns=columns)
    table = steps.assign(again=again).sort_values(["attempt", "rank", "begin_s"], kind="stable")
    keys = [table["attempt"], table["rank"]]
    begin, end = table["begin_s"], table["begin_s"] + table["took_s"]
    before = end.groupby(keys).cummax().groupby(keys).shift()
    is_first = before.isna()
    # Of what lies between two steps, such as an evaluation, the later one's sums tell.
    window = np.maximum(end - before.fillna(begin), 0.0)
    parts = {name: pd.Series(0.0, index=table.index) for name in STEPS}
    for kind, name in _OF_KIND.items():
        if f"{kind}_s" in table:
            parts[name] = parts[name] + table[f"{kind}_s"].fillna(0.0)
    ratios = _compute_ratios(table[["attempt", "rank"]], waits)
    spoken = pd.Series(0.0, index=table.index)
    for kind in COMMUNICATION:
        if f"{kind}_s" in table:
            spoken = spoken + table[f"{kind}_s"].fillna(0.0)
    waited = table["wait_s"].fillna(0.0)
    exposed = spoken * ratios["exposed"]
    parts["bubble"] = waited * ratios["bubble"] + exposed * ratios["late"]
    parts["communication"] = waited * (1 - ratios["bubble"]) + exposed * (1 - ratios["late"])
    rest = window - sum(parts.values())
    # Communication may run beside work: without details the part that had no room is taken off.
    beside = spoken.where(~ratios["is_known"], 0.0)
    off = np.minimum(np.maximum(-rest, 0.0), beside * (1 - ratios["late"]))
    parts["communication"] = parts["communication"] - off
    rest = rest + off
    # Where no sum of all ranks follows a rank's last action, it waited there for the others.
    idle = np.minimum(np.maximum(rest, 0.0), _compute_drain(table))
    parts["bubble"] = parts["bubble"] + idle
    rest = rest - idle
    early = np.maximum(-rest, 0.0).where(is_first, 0.0)
    found = pd.DataFrame({f"{name}_s": values for name, values in parts.items()})
    found["unknown_s"] = np.maximum(rest, 0.0)
    found["overlap_s"] = np.maximum(-rest, 0.0) - early
    found["lost_s"] = 0.0
    is_again = table["again"].to_numpy()
    claimed = window + np.where(is_again, found["overlap_s"], 0.0)
    found.loc[is_again, [f"{name}_s" for name in (*STEPS, "unknown")]] = 0.0
    found.loc[is_again, "lost_s"] = (claimed + early)[is_again]
    found["early_s"] = early
    found["first"], found["last"], found["step"] = begin, end, table["step"]
    found[["attempt", "rank"]] = table[["attempt", "rank"]]
    how = {name: "sum" for name in found.columns if name.endswith("_s")}
    summed = found.groupby(["attempt", "rank"], sort=False).agg(
        {**how, "first": "min", "last": "max", "step": "max"}
    )
    return summed.reset_index()[columns]


def _compute_drain(steps: pd.DataFrame) -> pd.Series[float]:
    """Return, by step, the seconds from a rank's last action to the last one in its replica."""
    own = steps["last_s"].astype(float)
    last = own.groupby([steps[name] for name in ("attempt", "replica", "step")]).transform("max")
    return (last - own).fillna(0.0)


def _compute_ratios(rows: pd.DataFrame, waits: pd.DataFrame) -> pd.DataFrame:
    """Return ratios for each row: `bubble`, the part of its waits that is for work; `exposed`, the
    part of its communication that no work hides; `late`, the part of exposed communication spent on
    late ranks; `is_known`. They are measured in detailed steps of the same rank or else attempt."""

    def divide(table: pd.DataFrame) -> pd.DataFrame:
        waited = table["bubble_s"] + table["transfer_s"]
        spoken = table["exposed_s"] + table["overlapped_s"]
        return pd.DataFrame(
            {
                "bubble": table["bubble_s"] / waited.where(waited > 0),
                "exposed": table["exposed_s"] / spoken.where(spoken > 0),
                "late": table["late_s"] / table["exposed_s"].where(table["exposed_s"] > 0),
            }
        )

    own = divide(waits.groupby(["attempt", "rank"]).sum())
    mean = divide(waits.groupby("attempt").sum(numeric_only=True))
    found = rows.join(own, on=["attempt", "rank"])
    found = found.fillna(rows[["attempt"]].join(mean, on="attempt")[["bubble", "exposed", "late"]])
    found["is_known"] = found["exposed"].notna()
    return found.fillna({"bubble": 1.0, "exposed": 1.0, "late": 0.0})


def compute_late(events: pd.DataFrame) -> pd.DataFrame:
    """Return attempt, rank and late_s of each all-reduce: its time before the last rank joined."""
    own = events[events["kind"].isin(["all-reduce", "communication"])]
    if own.empty:
        empty: dict[str, list[float]] = {"attempt": [], "rank": [], "late_s": []}
        return pd.DataFrame(empty)
    own = own.sort_values("begin_s", kind="stable")
    number = own.groupby(["attempt", "step", "rank", "kind", "what"]).cumcount()
    keys = [own[name] for name in ("attempt", "step", "kind", "what")]
    last = own["begin_s"].groupby([*keys, number]).transform("max")
    until = np.minimum(last, own["end_s"])
    late = own.assign(late_s=np.maximum(until - own["begin_s"], 0.0))
    return late.groupby(["attempt", "rank"])["late_s"].sum().reset_index()
