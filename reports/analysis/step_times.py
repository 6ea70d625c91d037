"""Collect step times, find outliers, and compute the useful fraction of the wall time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Sure, value_of
from varuna_core.records.logs.judge import Lines, Steps, judge_steps
from varuna_core.records.logs.step_counts import StepCounts
from varuna_core.records.logs.times import BAR_SLACK_S
from vjob.reports.analysis.readings import (
    COUNTER,
    LEAST_READINGS,
    LOG,
    TRACE,
    Readings,
    bound_share,
    choose_counter,
    limit,
    measure_readings,
    read_counter,
)
from vjob.reports.analysis.slowdown import (
    COLUMNS,
    LEAST_ROWS,
    SUMS,
    Slowdown,
    find_slowdown,
    list_counted,
    list_paces,
)
from vjob.reports.load.tables import measure_steps

FAR = 6.0
"""Outliers are this many deviations (scaled median absolute deviations) above the median, and MUCH
times the median."""
MUCH = 1.1
"""Minimum ratio of an outlier to the median step."""
_MAD = 1.4826
BESIDE = ("checkpoint_s", "data_s", "evaluate_s", "other_s")
"""Sums of a step's trace that include what was done between the step before and this one."""


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step that took much longer than the others."""

    attempt: str
    step: int
    took_s: float
    median_s: float
    num_steps: int
    """Number of steps over which `took_s` is a mean, the last of which is `step`; 1 for a step that
    was timed alone."""
    source: str
    """The times from which the median was computed: of usual steps, or of a slow stretch."""
    rank: int | None
    """The rank whose work grew most; None if the traces show no such rank."""
    kind: str
    """The kind of work that grew most, if that is most of the difference; else empty."""


def build_step_times(
    steps: pd.DataFrame, iterations: pd.DataFrame, cut: Collection[str] = ()
) -> pd.DataFrame:
    """Return attempt, step, begin_s, took_s, count, covers, from the traces or else from the log.

    A log line has a mean over the steps since the previous line: one row stands for those `count`
    steps, under the last one's number. The count of the first line is taken from the second. A row
    `covers` the steps up to its own, which are more than `count` if pauses between lines were left
    out. `is_told` is False if the time is the difference between the times at which two lines were
    written. Killed ranks lose the last seconds of their traces: for attempts in `cut`, the steps
    after the trace come from the log.
    """
    columns = ["attempt", "step", "begin_s", "took_s", "count", "covers", "is_told"]
    if not steps.empty:
        table = measure_steps(steps).reset_index()
        table["count"] = table["covers"] = 1
        table["is_told"] = True
        later = list_untraced(table, build_step_times(steps.iloc[:0], iterations), cut)
        table = pd.concat([table, later], ignore_index=True) if len(later) else table
        return table.sort_values("begin_s", kind="stable")[columns].reset_index(drop=True)
    if iterations.empty:
        return pd.DataFrame(columns=columns)
    table = _follow_one(iterations.dropna(subset=["time_ms"])).drop_duplicates(["attempt", "step"])
    table = table.assign(took_s=table["time_ms"] / 1000, begin_s=float("nan"))
    since = table.groupby("attempt")["step"].diff()
    table["count"] = since.fillna(since.groupby(table["attempt"]).shift(-1)).clip(lower=1)
    table["count"] = table["count"].fillna(1).clip(upper=table["step"].clip(lower=1))
    table["covers"] = table["count"]
    table["is_told"] = True
    if "timed" in table:  # from times of writing, which leave pauses out
        table["count"] = table["timed"].fillna(table["count"])
        table["covers"] = np.maximum(table["covers"], table["count"])
        table["is_told"] = table["timed"].isna()
    return table[columns].reset_index(drop=True)


def _follow_one(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep, for each attempt, the rows of the node whose log times the most steps: nodes may print
    different lines about the same steps, which would be counted twice."""
    if "timed" not in rows or "node" not in rows or rows["timed"].isna().all():
        return rows
    timed = rows.groupby(["attempt", "node"])["timed"].agg(["sum", "count"])
    best = timed.sort_values(["sum", "count"], kind="stable").groupby(level=0).tail(1).index
    return rows[pd.MultiIndex.from_frame(rows[["attempt", "node"]]).isin(best)]


def list_untraced(traced: pd.DataFrame, logged: pd.DataFrame, cut: Collection[str]) -> pd.DataFrame:
    """Return the log's rows for steps after the last one in an attempt's traces, placed end to end
    from there. All tables have the columns of build_step_times."""
    ends = (traced["begin_s"] + traced["took_s"]).groupby(traced["attempt"]).max()
    later = logged[logged["attempt"].isin(set(cut) & set(ends.index))].sort_values("step")
    # Of no rows pandas makes columns of text.
    last = later["attempt"].map(traced.groupby("attempt")["step"].max()).astype(float)
    later, last = later[later["step"] > last], last[later["step"] > last]
    later = later.assign(
        count=np.minimum(later["count"], later["step"] - last),
        covers=np.minimum(later["covers"], later["step"] - last),
    )
    all_s = (later["took_s"] * later["count"]).astype(float)
    before = all_s.groupby(later["attempt"]).cumsum() - all_s
    return later.assign(begin_s=later["attempt"].map(ends).astype(float) + before)


def count_repeated(
    times: pd.DataFrame, every: pd.DataFrame, labels: Sequence[str]
) -> pd.Series[float]:
    """Count, for each row of `times`, how many of its `count` steps a later attempt repeated.
    `every` has attempt and step of all known steps, also of untimed ones; `labels` are in order."""
    ends = pd.DataFrame({"attempt": times["attempt"], "step": times["step"] - times["count"] + 1})
    known = pd.concat([every[["attempt", "step"]], times[["attempt", "step"]], ends])
    known["step"] = known["step"].astype(float)
    bounds = known.groupby("attempt")["step"].agg(["min", "max"])
    high = times["step"].astype(float)
    low, found = high - times["count"].astype(float), pd.Series(0.0, index=times.index)
    later: list[tuple[float, float]] = []
    for label in reversed(labels):
        own = times["attempt"] == label
        for first, last in later:
            both = np.minimum(high[own], last) - np.maximum(low[own], first - 1)
            found[own] += both.clip(lower=0)
        if label in bounds.index:
            later = _join(later, float(bounds["min"][label]), float(bounds["max"][label]))
    return found


def _join(spans: list[tuple[float, float]], first: float, last: float) -> list[tuple[float, float]]:
    """Merge a span of steps into a list of disjoint spans."""
    apart = [span for span in spans if span[1] < first or span[0] > last]
    whole = [(first, last), *(span for span in spans if span not in apart)]
    return [*apart, (min(span[0] for span in whole), max(span[1] for span in whole))]


def drop_first(times: pd.DataFrame) -> pd.DataFrame:
    """Drop each attempt's first step, which is a warm-up, unless no other step is left."""
    later = times[times.duplicated("attempt")]
    return later if len(later) else times


def name_times(times: pd.DataFrame) -> str:
    """Describe what a table of step times holds, for a sentence on their median: `121 steps`, or
    `18 lines, each the mean of up to 10 steps` for a log that prints every tenth step."""
    most = int(times["count"].max())
    if most == 1:
        return f"{len(times):,} step{'s' if len(times) > 1 else ''}"
    if len(times) == 1:
        return f"one line, the mean of {most:,} steps"
    return f"{len(times):,} lines, each the mean of up to {most:,} steps"


def _mark_evaluated(times: pd.DataFrame, evaluations: pd.DataFrame) -> pd.Series[bool]:
    """Return True for each row of a log whose time may include an evaluation: for a printed time,
    by the number of its step; for a difference of writing times, by all steps since the previous
    line."""
    marks = pd.Series(False, index=times.index)
    since = times["step"] - times["covers"].mask(times["is_told"], 0)
    for attempt, own in evaluations[evaluations["unit"] == "step"].groupby("attempt"):
        at = np.sort(own["step"].to_numpy(float))
        low, high = np.searchsorted(at, since), np.searchsorted(at, times["step"], side="right")
        marks |= (times["attempt"] == attempt) & (low < high)
    return marks


def find_outliers(
    times: pd.DataFrame,
    steps: pd.DataFrame,
    evaluations: pd.DataFrame,
    slowdown: Slowdown | None = None,
) -> list[Outlier]:
    """Return steps that took unusually long, slowest first, without the warm-up of an attempt.
    Steps of a slow stretch are compared with their own median. Without traces (`steps`) that show
    what a step did, rows with an evaluation are skipped."""
    later = times[times.duplicated("attempt")]
    if steps.empty:
        later = later[~_mark_evaluated(later, evaluations)]
    level = pd.Series(0, index=later.index)
    for number, one in enumerate(slowdown.stretches if slowdown is not None else (), 1):
        is_in = later["step"].between(one.first, one.last)
        level[is_in & (later["attempt"] == one.attempt)] = number
    found = []
    for _, own in later.groupby(level):
        median = float(own["took_s"].median())
        deviation = float((own["took_s"] - median).abs().median()) * _MAD
        bound = max(median + FAR * deviation, median * MUCH)
        slow = own[own["took_s"] > bound] if len(own) >= LEAST_ROWS else own[:0]
        columns = ["attempt", "step", "took_s", "count"]
        for attempt, step, took_s, count in slow[columns].itertuples(index=False):
            rank, kind = _find_cause(steps, attempt, step, took_s - median)
            found.append(
                Outlier(
                    attempt=attempt,
                    step=int(step),
                    took_s=took_s,
                    median_s=median,
                    num_steps=int(count),
                    source=name_times(own),
                    rank=rank,
                    kind=kind,
                )
            )
    return sorted(found, key=lambda one: -one.took_s)


def _find_cause(
    steps: pd.DataFrame, attempt: str, step: int, excess_s: float
) -> tuple[int | None, str]:
    """Return the rank and the kind of work that grew most against its own median in a step, if that
    is most of the `excess_s` by which the step was longer than others. Work that may have been
    done in an unusually long pause before a step is not counted to the step."""
    if steps.empty:
        return None, ""
    kinds = [name for name in steps.columns if name.endswith("_s") and name not in SUMS]
    own = steps[steps["attempt"] == attempt].sort_values("begin_s")
    pause = own["begin_s"] - (own["begin_s"] + own["took_s"]).groupby(own["rank"]).shift()
    longer = (pause - pause.groupby(own["rank"]).transform("median")).clip(lower=0.0).fillna(0.0)
    beside = [name for name in BESIDE if name in kinds]
    own[beside] = own[beside].sub(longer, axis=0).clip(lower=0.0)
    usual = own.groupby("rank")[kinds].median()
    then = own[own["step"] == step].set_index("rank")[kinds]
    grown = (then - usual.loc[then.index]).stack()
    if grown.empty or grown.max() <= excess_s / 2:
        return None, ""
    rank, name = grown.idxmax()
    return int(rank), str(name)[:-2]


def measure_bubbles(steps: pd.DataFrame) -> pd.DataFrame:
    """Return attempt, step, makespan_s and bubble_share of each step: means over the replicas."""
    known = steps.dropna(subset=["first_s", "last_s"]) if not steps.empty else steps
    if known.empty:
        return pd.DataFrame(columns=["attempt", "step", "makespan_s", "bubble_share"])
    table = known.groupby(["attempt", "step", "replica"]).agg(
        first=("first_s", "min"),
        last=("last_s", "max"),
        work=("work_s", "sum"),
        ranks=("rank", "nunique"),
    )
    table["makespan_s"] = table["last"] - table["first"]
    table["bubble_share"] = 1 - table["work"] / (table["makespan_s"] * table["ranks"])
    means = table.groupby(["attempt", "step"])[["makespan_s", "bubble_share"]].mean()
    return means.dropna().reset_index()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first step of an attempt, by the program's own numbers."""

    step: int
    source: str
    """Source of the number."""
    doubt: int = 0
    """Number of steps by which `step` may be too low."""

    @property
    def is_resumed(self) -> bool:
        """True if steps were done before this step; a program may count from 0 or from 1."""
        return self.step > 1


@dataclass(frozen=True, kw_only=True)
class AttemptSpan:
    """One start of the ranks on the wall clock, in seconds since 1970; None if not known."""

    label: str
    started: float | None
    ended: float | None
    ran: float | None
    """Time at which the attempt's first rank began."""
    first_step: int | None
    """The first step that was read."""
    origin: Origin | None
    """The first step of the attempt; None if not known."""
    steps: Steps
    """The last step and the number of steps, from the same function that `vjob status` uses."""
    readings: Readings | None
    """Readings of the attempt's steps; None if no step was read."""
    outcome: str
    may_s: float = 0.0
    """Seconds that steps may have taken in addition to the known ones."""

    @property
    def last_step(self) -> int | None:
        return None if self.steps.is_counted else value_of(self.steps.step)

    @property
    def steps_s(self) -> float:
        return self.readings.steps_s if self.readings is not None else 0.0

    @property
    def repeated_s(self) -> float:
        """Seconds of steps that a later attempt repeated."""
        return self.readings.repeated_s if self.readings is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The time of a job from the start of its first attempt to the end of its last."""

    attempts: tuple[AttemptSpan, ...]
    wall_s: float | None
    between_s: float
    """Seconds between the end of an attempt and the start of the next one."""
    source: str
    slowdown: Slowdown | None
    unwritten: int = 0
    """Number of bytes that the attempt's logs lack because they could not be written."""
    clock: str = ""
    """Why no times of day can be compared; empty if they can."""

    @property
    def useful_s(self) -> float:
        return sum(item.steps_s - item.repeated_s for item in self.attempts)

    @property
    def covers(self) -> bool:
        """True if nearly all of the time between first and last steps is accounted for."""
        found = [item.readings for item in self.attempts if item.readings is not None]
        return bool(self.useful_s) and all(one.covers for one in found)

    @property
    def tells_silence(self) -> bool:
        """True if every step is recorded soon after it ends, so that silence means that no step was
        made."""
        return self.source == TRACE or self.covers

    @property
    def reason(self) -> str:
        """Why part of the steps' time is not known; empty if all of it is."""
        found = [item.readings for item in self.attempts if item.readings is not None]
        if not any(item.steps_s for item in self.attempts):
            return "no time of a step was read"
        return next((item.reason for item in found if item.reason), "")

    @property
    def proof(self) -> tuple[Evidence, ...]:
        """Evidence for the figure: the source, and how many of all steps have a time."""
        found = [item.readings for item in self.attempts if item.readings is not None]
        seen, expected = sum(one.seen for one in found), sum(one.expected for one in found)
        return (Evidence(self.source, Sure.MEASURED, seen=seen, expected=expected or None),)

    @property
    def share(self) -> Bounded[float]:
        """The fraction of the time spent on useful steps."""
        may_s = sum(item.may_s for item in self.attempts)
        if self.clock:
            return NotKnown(self.clock, self.proof)
        if self.unwritten and self.source == LOG:
            reason = f"{self.unwritten:,} bytes of its logs could not be written"
            return NotKnown(reason, self.proof)
        if not self.useful_s and self.reason:
            return NotKnown(self.reason, self.proof)
        slack_s = sum(item.readings.slack_s for item in self.attempts if item.readings)
        return bound_share(self.useful_s, may_s, self.wall_s, self.proof, self.reason, slack_s)


def measure_goodput(
    times: pd.DataFrame,
    iterations: pd.DataFrame,
    zero_s: float,
    exits: pd.DataFrame,
    history: Sequence[Mapping[str, Any]],
    outcomes: Mapping[str, str],
    labels: Sequence[str],
    source: str = LOG,
    spans: Mapping[str, Mapping[str, float]] | None = None,
    total: int | None = None,
    counts: Mapping[str, Mapping[int, StepCounts]] | None = None,
    evaluations: pd.DataFrame | None = None,
    goes_to: float | None = None,
) -> Goodput:
    """Measure the useful fraction of a job's time.

    `times` has the columns of build_step_times, with `begin_s` counted from `zero_s`; `labels` are
    in order. `iterations` are the log lines about steps, some of which (mostly the last) have no
    time. `source` is TRACE if `times` begins with traced steps. `spans` comes from to_spans;
    `total` is the number of steps of the whole training. `counts` has the counted optimizer steps
    by attempt and rank, which are preferred to times of lines. A line about one of `evaluations`
    has no time of a step alone. `goes_to` is given for a run that has not ended, and says up to
    when it counts: the present if it hangs, else inf, which stands for its last step.
    """
    seen = [table[["attempt", "step"]] for table in (times, iterations) if len(table)]
    every = pd.concat(seen) if seen else times
    order = {label: at for at, label in enumerate(labels)}
    steps = times.assign(order=times["attempt"].map(order)).sort_values(["step", "order"])
    steps["all_s"] = steps["took_s"] * steps["count"]
    attempts, judged, paces = [], {}, [pd.DataFrame(columns=COLUMNS)]
    origins: dict[str, Origin | None] = {}
    for label in labels:
        own = times[times["attempt"] == label]
        is_traced = source == TRACE and bool(own["begin_s"].notna().any())
        own_counts = (counts or {}).get(label, {})
        ranks = exits[exits["attempt"] == label] if len(exits) else exits
        judged[label] = _judge(label, iterations, ranks, own_counts, own, is_traced)
        numbers = every.loc[every["attempt"] == label, "step"]
        origins[label] = _find_origin(numbers, judged[label], own_counts, is_traced=is_traced)
        counter = None if is_traced else choose_counter(own_counts.values())
        if counter is not None:
            paces.append(list_counted(label, counter, judged[label]))
        elif len(own):
            paces.append(list_paces(own, _list_written(iterations, label), zero_s))
    slowdown = find_slowdown(pd.concat([one for one in paces if len(one)] or paces))
    done = _add_ends(every, judged, origins)
    steps["again_s"] = steps["all_s"] * count_repeated(steps, done, labels) / steps["count"]
    for label in labels:
        own = steps[steps["attempt"] == label]
        ranks = exits[exits["attempt"] == label] if len(exits) else exits
        begins, ends = _list_numbers(ranks, "started"), _list_numbers(ranks, "ended")
        ran = min(begins, default=None)
        began = own["begin_s"].dropna()
        own_steps = every.loc[every["attempt"] == label, "step"]
        if len(began):
            begins.append(zero_s + float(began.min()))
            ends.append(zero_s + float((own["begin_s"] + own["took_s"]).max()))
        begins += _find_start(history, label, labels)
        is_traced = source == TRACE and len(began) > 0
        own_spans = {} if is_traced else (spans or {}).get(label, {})
        counted = None
        if not is_traced:
            is_told = own["is_told"].astype(bool) & (own["covers"] == 1)
            if evaluations is not None:
                is_told &= ~_mark_evaluated(own, evaluations)
            own_counts = (counts or {}).get(label, {})
            told_s = own[is_told]["took_s"].iloc[1:]
            counted = read_counter(own_counts.values(), own_spans, slowdown, told_s)
        found = counted or measure_readings(
            own,
            [int(step) for step in own_steps],
            own_spans,
            total,
            slowdown,
            is_traced=is_traced,
        )
        again_s = float(own["again_s"].sum())
        if counted is not None and label != labels[-1]:
            counted = found = _collect_repeated(counted, label, done, labels)
            again_s = counted.repeated_s
        if found is not None:
            if is_traced:
                found = replace(
                    found,
                    steps_s=float(own["all_s"].sum()),
                    first_at=zero_s + float(began.min()),
                    last_at=zero_s + float((own["begin_s"] + own["took_s"]).max()),
                )
            if goes_to is not None and label == labels[-1] and len(ranks) == 0:
                at = found.last_at if goes_to == inf else goes_to
                ends += [] if at is None else [at]
            found = replace(found, repeated_s=min(again_s, found.steps_s))
            found = limit(
                found,
                ran if ran is not None else min(begins, default=None),
                max(ends, default=None),
            )
        attempts.append(
            AttemptSpan(
                label=label,
                started=min(begins, default=None),
                ended=max(ends, default=None),
                ran=ran,
                first_step=int(own_steps.min()) if len(own_steps) else None,
                origin=origins[label],
                steps=judged[label],
                readings=found,
                outcome=outcomes.get(label, ""),
                may_s=found.may_s if found is not None else 0.0,
            )
        )
    if any(one.readings is not None and one.readings.step_s for one in attempts):
        source = COUNTER
    if source != TRACE:  # an attempt without a line ended before its first one
        longest_s = max((one.readings.between_s for one in attempts if one.readings), default=inf)
        attempts = [
            replace(one, may_s=min(longest_s, one.ended - one.ran))
            if one.readings is None and one.ran is not None and one.ended is not None
            else one
            for one in attempts
        ]
    known = [item for item in attempts if item.started is not None and item.ended is not None]
    starts = [item.started for item in known if item.started is not None]
    stops = [item.ended for item in known if item.ended is not None]
    between = sum(max(0.0, start - stop) for start, stop in zip(starts[1:], stops, strict=False))
    return Goodput(
        attempts=tuple(attempts),
        wall_s=max(stops) - min(starts) if known else None,
        between_s=between,
        source=source,
        slowdown=slowdown,
        unwritten=_count_unwritten(exits),
    )


def _count_unwritten(exits: pd.DataFrame) -> int:
    """Add up the bytes that are missing from the logs of all nodes."""
    if "unwritten" not in exits.columns:
        return 0
    numbers = pd.to_numeric(exits["unwritten"], errors="coerce").fillna(0)
    return int(numbers.groupby([exits["attempt"], exits["node"]]).max().sum())


def _find_origin(
    numbers: pd.Series[float],
    steps: Steps,
    counts: Mapping[int, StepCounts],
    *,
    is_traced: bool,
) -> Origin | None:
    """Return the first step that an attempt did, by the numbers of its steps."""
    seen = sorted({int(step) for step in numbers})
    if is_traced and seen:
        if any(one.count > seen[-1] - seen[0] + 1 for one in counts.values()):
            return None  # its trace began later than its steps
        return Origin(step=seen[0], source="the first step of its trace")
    if steps.fit is not None and steps.fit.offset is not None:
        how = "the numbers in its lines beside the count of its optimizer steps"
        return Origin(step=min([steps.fit.offset + 1, *seen[:1]]), source=how)
    if len(seen) < LEAST_READINGS or steps.is_counted:
        return None
    every = min(b - a for a, b in pairwise(seen))
    first = max(seen[0] - every + 1, 0)
    return Origin(step=first, source="its first line", doubt=seen[0] - first)


def _add_ends(
    every: pd.DataFrame, judged: Mapping[str, Steps], origins: Mapping[str, Origin | None]
) -> pd.DataFrame:
    """Add the first and the last step of each attempt to the known ones: lines print only some."""
    lasts = {label: value_of(one.step) for label, one in judged.items() if not one.is_counted}
    ends = [(label, one.step) for label, one in origins.items() if one is not None]
    ends += [(label, last) for label, last in lasts.items() if last is not None]
    known = set(every["attempt"])
    rows = [{"attempt": label, "step": step} for label, step in ends if label in known]
    return pd.concat([every, pd.DataFrame(rows)]) if rows else every


def _list_written(iterations: pd.DataFrame, label: str) -> pd.Series[float]:
    """Return the times at which an attempt's lines about steps were written, by step."""
    if iterations.empty:
        return pd.Series(dtype=float)
    own = iterations[iterations["attempt"] == label].drop_duplicates("step", keep="last")
    return own["written"].astype(float).set_axis(own["step"].astype(float))


def _judge(
    label: str,
    iterations: pd.DataFrame,
    exits: pd.DataFrame,
    counts: Mapping[int, StepCounts],
    times: pd.DataFrame,
    is_traced: bool,
) -> Steps:
    """Return the steps of one attempt, by the same rules as `vjob status`. All tables but
    `iterations` are of that attempt alone."""
    lines, reference = None, None
    own = iterations[iterations["attempt"] == label] if len(iterations) else iterations
    if len(own):
        node, rows = max(
            own.groupby("node", sort=False),
            key=lambda item: (item[1]["step"].iloc[-1], item[1]["loss"].notna().iloc[-1]),
        )
        totals = rows["num_steps"].dropna()
        written = [None if at != at else at for at in rows["written"].astype(float)]
        pairs = tuple(zip((int(step) for step in rows["step"]), written, strict=True))
        total = int(totals.iloc[-1]) if len(totals) else None
        is_least = "is_least" in rows and bool(rows["is_least"].eq(True).iloc[-1])  # else nan
        lines = Lines(pairs[-1][0], total, pairs, str(node), BAR_SLACK_S, is_least=is_least)
        there = [int(rank) for rank in exits["rank"][exits["node"] == node]] if len(exits) else []
        reference = min((rank for rank in there if rank in counts), default=None)
    traced = None
    if is_traced:
        last = times.loc[times["step"].idxmax()]
        traced = int(last["step"]), None
    return judge_steps(lines, counts, reference, traced)


def _collect_repeated(
    found: Readings, label: str, every: pd.DataFrame, labels: Sequence[str]
) -> Readings:
    """Return readings with `repeated_s`: the seconds of counted steps that a later attempt
    repeated, if lines tell the numbers. `every` and `labels` are as in count_repeated."""
    later = labels[labels.index(label) + 1 :]
    numbers = every.loc[every["attempt"] == label, "step"]
    if numbers.empty or not every["attempt"].isin(later).any():
        reason = "it is not known which steps a later attempt repeated"
        return replace(found, slack_s=found.steps_s, reason=reason)
    row = {"attempt": label, "step": float(numbers.max()), "count": float(found.seen)}
    again = count_repeated(pd.DataFrame([row]), every, labels)
    return replace(found, repeated_s=found.steps_s * float(again.iloc[0]) / found.seen)


def _list_numbers(table: pd.DataFrame, name: str) -> list[float]:
    numbers = pd.to_numeric(table[name], errors="coerce").dropna() if len(table) else []
    return [float(number) for number in numbers]


def _find_start(
    history: Sequence[Mapping[str, Any]], label: str, labels: Sequence[str]
) -> list[float]:
    """Return the time at which the batch script began this try of the attempt, if known."""
    number, _, earlier = label.partition(".earlier-")
    times = sorted(
        float(event["time"])
        for event in history
        if event.get("kind") == "started" and str(event.get("attempt", "")) == number
    )
    if earlier:
        return times[int(earlier) : int(earlier) + 1]
    was_tried = any(other.startswith(f"{number}.earlier-") for other in labels)
    return times[-1:] if was_tried else times[:1]
