"""Bound the time of an attempt's steps by its log lines: what the lines prove, and what they do not
exclude.

    began         first reading                    last reading       ended
      │ start, or steps │ steps, pauses, time unaccounted for │ steps, or end │

A program that prints steps 5, 10 and 15 took at most five steps before the first line and at most
four after the last. A program that prints once, at its end, may have taken steps all the time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pandas as pd

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Value, Within
from varuna_core.records.formatting import format_share
from varuna_core.records.logs.judge import Source
from varuna_core.records.logs.step_counts import SLOW, StepCounts
from vjob.reports.analysis.slowdown import Slowdown
from vjob.reports.load.training_log import PHASES

LEAST_COVERED = 0.9
"""Fraction of the steps between the first and the last reading, and of the time between them, that
must be accounted for."""
LEAST_READINGS = 3
"""The number of lines needed to know how often a program prints one."""
NARROW = 0.03
"""Bounds of a share that differ by no more than this are shown as one value."""
WIDE = 0.5
"""Bounds of a share that differ by more than this are shown as not known."""
LIKELY = 0.5
"""Untimed steps must have had at least this fraction of their time at the usual pace."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Seconds of one attempt by what the lines prove about them; time that may be steps is in
    `before_s`, `gap_s` and `after_s`."""

    steps_s: float
    """Seconds of steps that lines prove: between the first and last line, and before the first."""
    repeated_s: float = 0.0
    """The part of `steps_s` in steps that a later attempt repeated."""
    first_at: float | None = None
    """`first_at` is the time at which the first proved step began, and `last_at` the time at which
    the last line was written, both in seconds since 1970."""
    last_at: float | None = None
    slack_s: float = 0.0
    """Error of the time between `first_at` and `last_at`."""
    checkpoint_s: float = 0.0
    evaluate_s: float = 0.0
    before_s: float = 0.0
    gap_s: float = 0.0
    after_s: float = 0.0
    between_s: float = math.inf
    """The usual time between two lines."""
    seen: int = 0
    """The number of steps that were done and are accounted for."""
    expected: int = 0
    step_s: float | None = None
    """Seconds of the median step; known only if all steps were counted."""
    covers: bool = False
    """True if nearly all of the time between the first and the last line is accounted for."""
    reason: str = ""
    """Why part of the steps' time is not known; empty if all of it is."""

    @property
    def may_s(self) -> float:
        return self.before_s + self.gap_s + self.after_s


TRACE, LOG, COUNTER = "trace", "log", Source.COUNTER.value
"""Names of the sources of step times."""


def choose_counter(counts: Iterable[StepCounts]) -> StepCounts | None:
    """Return the counter of the rank with the highest count; None if it misses steps or has no time
    for them."""
    found = max(counts, key=lambda one: one.count, default=None)
    return found if found is not None and found.is_of_all and found.median_s is not None else None


def read_counter(
    counts: Iterable[StepCounts],
    spans: Mapping[str, float],
    slowdown: Slowdown | None = None,
    told_s: Iterable[float] = (),
) -> Readings | None:
    """Return the readings of an attempt from the optimizer steps that its ranks counted (see
    choose_counter); None if they do not suffice. `spans` comes from to_spans. The slow steps of
    `slowdown` are steps, not pauses, and so are those whose seconds the program printed itself,
    `told_s`."""
    found = choose_counter(counts)
    if found is None or found.pauses_s is None or found.steps_s is None or found.median_s is None:
        return None
    usual_s, steps_s, pauses_s = found.median_s, found.steps_s, found.pauses_s
    phases = {name: spans.get(name, 0.0) for name in PHASES}
    slow_s = sum(one - usual_s for one in told_s if one > SLOW * usual_s)
    slow_s = min(slow_s, max(pauses_s - sum(phases.values()), 0.0))
    if slowdown is not None and slowdown.slow_s > SLOW * usual_s:
        since, until = found.first_at, found.last_at
        slow_s = max(slow_s, min(slowdown.count_lost(since, until), pauses_s))
    steps_s, pauses_s = steps_s + slow_s, pauses_s - slow_s
    fits = min(1.0, pauses_s / max(sum(phases.values()), 1e-9))
    gap_s = max(pauses_s - sum(phases.values()), 0.0)  # slow steps, or pauses that no line explains
    covers = steps_s >= LEAST_COVERED * (steps_s + gap_s)
    return Readings(
        steps_s=steps_s,
        first_at=found.first_at - usual_s,
        last_at=found.last_at,
        checkpoint_s=fits * phases["checkpoint_s"],
        evaluate_s=fits * phases["evaluate_s"],
        gap_s=gap_s,
        between_s=usual_s,
        seen=found.count,
        expected=found.count,
        step_s=usual_s,
        covers=covers,
        reason="" if covers else _explain_gap(steps_s, gap_s),
    )


def measure_readings(
    times: pd.DataFrame,
    steps: Collection[int],
    spans: Mapping[str, float],
    total: int | None = None,
    slowdown: Slowdown | None = None,
    *,
    is_traced: bool = False,
) -> Readings | None:
    """Return what the times of one attempt's steps prove about its time, as `Readings`.

    `times` has the columns of build_step_times; `steps` are the numbers of all steps with a line,
    with a time or without. `spans` comes from to_spans, as far as known. With `is_traced`, no steps
    are assumed before the first or after the last one, since a trace records all of them.
    """
    if not steps:
        return None
    numbers = sorted(set(steps))
    first, last = numbers[0], numbers[-1]
    every = max((b - a for a, b in pairwise(numbers)), default=0)
    every = every if len(numbers) >= LEAST_READINGS else 0
    rows = times.sort_values("step")
    is_timed = len(rows) > 0 and rows["step"].iloc[0] == first
    inner = rows.iloc[1:] if is_timed else rows
    pace_s = float((inner if len(inner) else rows)["took_s"].median()) if len(rows) else math.nan
    # Before the first line.
    own = int(rows["covers"].iloc[0]) if is_timed else 0
    own_s = float(rows["took_s"].iloc[0] * rows["count"].iloc[0]) if is_timed else 0.0
    before = 0 if is_traced else max(min(first, every or first) - own, 0)
    if before == 1 and not own and pace_s == pace_s:
        before, own, own_s = 0, 1, pace_s  # it took as long as the next ones
    # Between the first and the last.
    usual_s = pd.Series(pace_s, index=inner.index)
    if slowdown is not None:
        usual_s[slowdown.mark(inner["attempt"], inner["step"])] = slowdown.slow_s
    took_s = inner["took_s"].mask(~inner["is_told"] & (inner["took_s"] > SLOW * usual_s), usual_s)
    timed_s = float((took_s * inner["count"]).sum())
    num_timed = min(int(inner["count"].sum()), last - first)
    missing = last - first - num_timed
    phases_s = sum(spans.get(name, 0.0) for name in PHASES)
    first_at, last_at = _find(spans, "first_s"), _find(spans, "last_s")
    missing_s = missing * pace_s if missing else 0.0
    gap_s, filled_s = missing_s, 0.0
    if first_at is not None and last_at is not None:
        rest_s = max(last_at - first_at - phases_s - timed_s, 0.0)
        if missing and rest_s >= LIKELY * missing_s:
            filled_s, num_timed = min(missing_s, rest_s), num_timed + missing
        gap_s = rest_s - filled_s
    after = 0 if is_traced else math.inf if total is None else max(total - last, 0)
    after = min(after, every - 1) if every else after
    inside_s = timed_s + filled_s
    found = Readings(
        steps_s=own_s + inside_s,
        first_at=None if first_at is None else first_at - own_s,
        last_at=last_at,
        slack_s=spans.get("slack_s", 0.0),
        checkpoint_s=spans.get("checkpoint_s", 0.0),
        evaluate_s=spans.get("evaluate_s", 0.0),
        before_s=math.inf if before else 0.0,  # the first steps may compile for long
        gap_s=gap_s if gap_s == gap_s else math.inf,
        after_s=_multiply(after, pace_s),
        between_s=_multiply(every or math.inf, pace_s),
        seen=num_timed + own,
        expected=last - first + own + before,
    )
    covers = inside_s >= LEAST_COVERED * (inside_s + gap_s)
    return replace(
        found,
        covers=covers and (is_traced or len(numbers) >= LEAST_READINGS),
        reason=_explain(found, first, last, before, covers),
    )


def _explain(found: Readings, first: int, last: int, before: int, covers: bool) -> str:
    if before:
        return f"the first step that was read is {first}"
    if found.seen < LEAST_COVERED * found.expected:
        return f"{found.seen} of {found.expected} steps have a time"
    if not covers:
        return _explain_gap(found.steps_s, found.gap_s)
    return f"the last step that was read is {last}" if found.after_s == math.inf else ""


def _explain_gap(steps_s: float, gap_s: float) -> str:
    share = gap_s / (steps_s + gap_s)
    return f"up to {format_share(share)} of the time between the first and the last may be pauses"


def _find(spans: Mapping[str, float], name: str) -> float | None:
    value = spans.get(name, math.nan)
    return value if value == value else None


def _multiply(count: float, pace_s: float) -> float:
    """Return the seconds that `count` steps take; infinity if the time of a step is not known."""
    if not count:
        return 0.0
    return count * pace_s if pace_s == pace_s else math.inf


def limit(found: Readings, started: float | None, ended: float | None) -> Readings:
    """Limit an attempt's readings to the time in which its ranks ran."""
    before_s, after_s = found.before_s, found.after_s
    if started is not None and found.first_at is not None:
        before_s = min(before_s, max(found.first_at - started, 0.0))
    if ended is not None and found.last_at is not None:
        after_s = min(after_s, max(ended - found.last_at, 0.0))
    return replace(found, before_s=before_s, after_s=after_s)


def bound_share(
    part_s: float,
    may_s: float,
    whole_s: float | None,
    proof: Sequence[Evidence],
    reason: str,
    slack_s: float = 0.0,
) -> Bounded[float]:
    """Return the share of `part_s` in `whole_s`; it may be `may_s` larger or `slack_s` smaller."""
    evidence = tuple(proof)
    if not whole_s:
        why = "it is not known when the run began and ended"
        return NotKnown(reason or why, evidence)
    low = min(1.0, max(part_s - slack_s, 0.0) / whole_s)
    high = min(1.0, (part_s + may_s) / whole_s)
    if high - low > WIDE:
        return NotKnown(reason or "too little of the time is accounted for", evidence)
    if high - low > NARROW or reason:
        return Within(low, high, evidence)
    return Value(min(1.0, part_s / whole_s), evidence)


def to_spans(table: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return by attempt the times of the first and last lines about steps, and phases' seconds."""
    if table.empty:
        return {}
    how = {"first_s": "min", "last_s": "max", **dict.fromkeys(("slack_s", *PHASES), "max")}
    rows: dict[Any, dict[str, float]] = table.groupby("attempt").agg(how).to_dict("index")
    return {str(label): row for label, row in rows.items()}
