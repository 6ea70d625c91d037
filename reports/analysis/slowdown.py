"""Find steps that became slower and stayed slower, and stretches of slow steps between usual ones.

seconds a step          ┌──────────    the times lie on two levels, far apart next to their
              ──────────┘              noise, and each level fills stretches of its own: a step
              before     slow          that stands out alone, as one with a save, is none
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from varuna_core.records.formatting import format_pace, format_seconds, format_share
from varuna_core.records.logs.judge import Steps
from varuna_core.records.logs.step_counts import StepCounts

Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]
COLUMNS = ["attempt", "first", "last", "begin_at", "end_at", "took_s", "count"]
"""Columns of paces: a row is about the steps from `first` to `last`, with the times at which they
began and ended (NaN if not known), and the time and number of timed steps."""
MOST_ROWS = 200
LEAST_ROWS = 5
"""Minimum rows of a slow stretch, and of the usual stretch before it."""
SLOWER = 1.3
"""Minimum ratio of the two levels."""
APART = 4.0
"""Minimum distance of the two levels, in deviations of neighbouring rows."""
PURE = 0.85
"""Minimum fraction of the rows of each level on its side of the boundary between the levels."""
COSTS = 0.02
"""Minimum fraction of the time of all steps that the slow steps cost."""
EDGE = 2
"""Rows by which smoothing may move the begin of a stretch."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps that took longer than usual, by the program's own numbers."""

    attempt: str
    first: int
    last: int
    begin_at: float | None
    """Seconds since 1970; None if not known, as with `end_at`."""
    end_at: float | None
    took_s: float
    """Seconds of the median step."""
    doubt: int
    """The number of steps by which `first` may be wrong."""
    begins_attempt: bool
    """True if the stretch begins with an attempt."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """Steps that took longer than those before."""

    before_s: float
    """Seconds of the usual step."""
    slow_s: float
    """Seconds of the slow step."""
    mean_s: float
    """Seconds of the mean step, of usual and slow ones."""
    lost_s: float
    """Seconds that slow steps took more than usual ones."""
    share: float
    """`lost_s` as a fraction of the time of all steps."""
    stretches: tuple[Stretch, ...]
    usual: tuple[Stretch, ...]
    """Stretches of usual steps, without a warm-up."""
    lasts: bool
    """True if the last stretch goes on to the last step."""
    is_gradual: bool
    """True if steps grew slower and slower; `before_s` and `slow_s` are then those of the ends."""

    @property
    def ratio(self) -> float:
        return self.slow_s / self.before_s

    @property
    def paces(self) -> str:
        """Describe the paces: `103 ms each before step 61, 404 ms from there on`."""
        before, slow = format_pace(self.before_s), format_pace(self.slow_s)
        if self.is_gradual:
            return f"{before} each at first, {slow} at last"
        if self.lasts and len(self.stretches) == 1:
            return f"{before} each before step {self.stretches[0].first:,}, {slow} from there on"
        many = len(self.stretches)
        return f"{before} each, {slow} in {many} slow stretch{'es' if many > 1 else ''}"

    def count_lost(self, since: float, until: float) -> float:
        """Return the seconds that slow steps between two times, as those of an attempt, took more
        than usual ones, without the pauses between them."""
        return sum(
            (one.last - one.first + 1) * (one.took_s - self.before_s)
            for one in self.stretches
            if one.begin_at is not None and since <= one.begin_at <= until
        )

    def mark(self, attempt: pd.Series[str], step: pd.Series[float]) -> pd.Series[bool]:
        """Return True for each step within a stretch."""
        found = pd.Series(False, index=step.index)
        for one in self.stretches:
            found |= (attempt == one.attempt) & step.between(one.first, one.last)
        return found


def list_paces(times: pd.DataFrame, written: pd.Series[float], zero_s: float) -> pd.DataFrame:
    """Return the paces of one attempt from its step times, without the first row, whose steps warm
    up. `written` has the times of its lines by step; those of traces begin at `begin_s` after
    `zero_s`."""
    rows = times.iloc[1:]
    rows = rows[rows["took_s"] > 0]
    last, span_s = rows["step"].astype(float), rows["took_s"] * rows["count"]
    begin = (zero_s + rows["begin_s"].astype(float)).fillna(last.map(written) - span_s)
    table = rows[["attempt", "took_s", "count"]].assign(
        first=last - rows["covers"] + 1, last=last, begin_at=begin, end_at=begin + span_s
    )
    if len(table) > MOST_ROWS:
        how = {
            "attempt": "first", "first": "min", "last": "max", "begin_at": "min", "end_at": "max",
            "took_s": "median", "count": "sum",
        }  # fmt: skip
        table = table.groupby(np.arange(len(table)) * MOST_ROWS // len(table)).agg(how)
    return table[COLUMNS]


def list_counted(label: str, found: StepCounts, steps: Steps) -> pd.DataFrame:
    """Return the paces of one attempt from the points of its counter, without the first one.
    `steps` has the program's own number of a step, if lines tell it."""
    least_s = (found.last_at - found.first_at) / MOST_ROWS
    kept: list[tuple[int, float]] = []
    for count, at in found.points:
        if not kept or (count > kept[-1][0] and at - kept[-1][1] > least_s):
            kept.append((count, at))
    base = (steps.fit.offset or 0) if steps.fit is not None else 0
    rows = [
        (label, base + a + 1, base + b, since, until, (until - since) / (b - a), b - a)
        for (a, since), (b, until) in pairwise(kept[1:])
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def find_slowdown(rows: pd.DataFrame) -> Slowdown | None:
    """Find the slow stretches among the paces of all attempts, given in their order."""
    took = rows["took_s"].to_numpy(dtype=float)
    spans_s = took * rows["count"].to_numpy(dtype=float)
    begin = _count_warm_up(took)
    marks = _mark_slow(took[begin:])
    if not marks.any():
        return None
    usual, slow = begin + np.flatnonzero(~marks), begin + np.flatnonzero(marks)
    before_s, slow_s = float(np.median(took[usual])), float(np.median(took[slow]))
    attempts = rows["attempt"].to_numpy()
    runs = _list_runs(slow, attempts)
    lasts = bool(marks[-1])
    edge = slow[0]
    jump = np.median(took[edge : edge + LEAST_ROWS]) / np.median(took[edge - LEAST_ROWS : edge])
    is_gradual = len(runs) == 1 and lasts and bool(jump < np.sqrt(slow_s / before_s))
    lost_s = float((spans_s[slow] * (1 - before_s / took[slow])).sum())
    if is_gradual:
        before_s = float(np.median(took[usual[:LEAST_ROWS]]))
        slow_s = float(np.median(took[slow[-LEAST_ROWS:]]))
    share = lost_s / float(spans_s.sum())
    if share < COSTS:
        return None
    return Slowdown(
        before_s=before_s,
        slow_s=slow_s,
        mean_s=float(spans_s.sum() / rows["count"].sum()),
        lost_s=lost_s,
        share=share,
        stretches=tuple(_describe(rows, run) for run in runs),
        usual=tuple(_describe(rows, run) for run in _list_runs(usual, attempts)),
        lasts=lasts,
        is_gradual=is_gradual,
    )


def _list_runs(
    places: npt.NDArray[np.intp], attempts: npt.NDArray[np.object_]
) -> list[npt.NDArray[np.intp]]:
    """Divide increasing row numbers into runs of consecutive rows of one attempt."""
    own = attempts[places]
    return np.split(places, np.flatnonzero((np.diff(places) > 1) | (own[1:] != own[:-1])) + 1)


def _describe(rows: pd.DataFrame, run: npt.NDArray[np.intp]) -> Stretch:
    first, last = rows.iloc[run[0]], rows.iloc[run[-1]]
    begin, end = float(first["begin_at"]), float(last["end_at"])
    return Stretch(
        attempt=str(first["attempt"]),
        first=int(first["first"]),
        last=int(last["last"]),
        begin_at=begin if begin == begin else None,
        end_at=end if end == end else None,
        took_s=float(rows["took_s"].iloc[run].median()),
        doubt=int(first["last"] - first["first"]),
        begins_attempt=bool(run[0] and rows["attempt"].iloc[run[0] - 1] != first["attempt"]),
    )


def _count_warm_up(took: Floats) -> int:
    """Count the slow rows at the beginning, before which there was no usual pace."""
    begin = 0
    while len(took) - begin >= 2 * LEAST_ROWS:
        marks = _split(_smooth(took[begin:]))
        if not marks[0] or marks.all():
            break
        begin += int(np.argmin(marks))
    return begin


def _mark_slow(took: Floats) -> Marks:
    """Mark the steps that are slow: True for each of the step times `took` that belongs to a
    stretch of slow steps.

    All are False unless the times lie on two levels that are far apart compared with their noise.
    """
    none = np.zeros(len(took), dtype=bool)
    if len(took) < 2 * LEAST_ROWS:
        return none
    logs, smooth = np.log(took), _smooth(took)
    marks = _split(smooth)
    if not marks.any():
        return none
    bound = (smooth[marks].min() + smooth[~marks].max()) / 2
    raw = logs > bound
    marks = _join_short(marks)
    for at in np.flatnonzero(np.diff(marks)) + 1:
        here = slice(max(at - EDGE, 0), at + EDGE)
        if np.count_nonzero(np.diff(raw[here])) == 1:
            marks[here] = raw[here]
    if not marks.any() or marks[:LEAST_ROWS].any():
        return none
    gap = np.median(logs[marks]) - np.median(logs[~marks])
    noise = 1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(logs)))
    is_apart = gap > max(np.log(SLOWER), APART * noise)
    is_pure = min(raw[marks].mean(), (~raw[~marks]).mean()) >= PURE
    return marks if is_apart and is_pure else none


def _smooth(took: Floats) -> Floats:
    series = pd.Series(np.log(took))
    smooth = series.rolling(2 * EDGE + 1, center=True, min_periods=1).median()
    return np.asarray(smooth, dtype=float)


def _split(values: Floats) -> Marks:
    """Mark the upper of the two levels that explain most of the variance (the method of Otsu)."""
    ordered = np.sort(values)
    low = np.arange(1, len(values))
    sums = np.cumsum(ordered)
    high = len(values) - low
    between = low * high * (sums[:-1] / low - (sums[-1] - sums[:-1]) / high) ** 2
    bound: float = ordered[int(np.argmax(between))]
    return np.asarray(values > bound, dtype=bool)


def _join_short(marks: Marks) -> Marks:
    """Remove stretches of equal marks (slow or not) that have fewer than LEAST_ROWS rows.

    The shortest is flipped first, so that it becomes part of the stretches before and after it.
    """
    marks = marks.copy()
    while True:
        edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
        length, at = min((b - a, a) for a, b in pairwise(edges))
        if length >= LEAST_ROWS or len(edges) == 2:
            return marks
        marks[at : at + length] = not marks[at]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that changed when steps became slower."""

    what: str
    """`attempt`, `batch`, `clock`, `processors`, `swap`, `memory`, `GPU use` or a kind of work."""
    who: str
    before: float | None
    then: float | None
    text: str


BUSIER = 0.2
"""Minimum change of the use of processors or GPUs, as a fraction, that is reported."""
HELD = 0.5
"""Minimum growth of the fraction of samples in which a GPU's clock is throttled."""
SWAPPED_MB = 512
FULL = 0.95
"""Fraction of a node's memory in use above which the memory counts as full."""
LEAST_SAMPLES = 2


def list_changes(
    found: Slowdown, gpus: pd.DataFrame, steps: pd.DataFrame, iterations: pd.DataFrame
) -> list[Change]:
    """List the changes at the time of the slow steps, from samples of GPUs and processors, traced
    steps and log lines. They coincide with the slow steps but need not be their cause."""
    first = found.stretches[0]
    changes = [
        Change(what="attempt", who=first.attempt, before=None, then=None,
               text=f"attempt {first.attempt} began there")
    ] if first.begins_attempt else []  # fmt: skip
    if len(iterations) and "global_batch_size" in iterations:
        sizes = iterations["global_batch_size"].astype(float)
        is_slow = found.mark(iterations["attempt"], iterations["step"])
        a, b = sizes[~is_slow].median(), sizes[is_slow].median()
        if a != b and a == a and b == b:
            text = f"a step had {b:g} samples, {a:g} before"
            changes.append(Change(what="batch", who="", before=a, then=b, text=text))
    for node, own in gpus.groupby("node") if len(gpus) else ():
        usual, slow = (
            own[_lies_in(own["time"], spans)] for spans in (found.usual, found.stretches)
        )
        if min(usual["time"].nunique(), slow["time"].nunique()) >= LEAST_SAMPLES:
            changes += _compare_samples(str(node), usual, slow)
    return changes + _compare_work(found, steps)


def _lies_in(at: pd.Series[float], spans: Sequence[Stretch]) -> pd.Series[bool]:
    at, found = at.astype(float), pd.Series(False, index=at.index)
    for one in spans:
        if one.begin_at is not None and one.end_at is not None:
            found |= at.between(one.begin_at, one.end_at)
    return found


def _compare_samples(node: str, usual: pd.DataFrame, slow: pd.DataFrame) -> Iterator[Change]:
    """Yield what changed on a node from its usual samples to those of slow steps."""
    a, b = (table["cpu_percent"].astype(float).mean() / 100 for table in (usual, slow))
    if b - a >= BUSIER:
        text = f"the processors of {node} were {format_share(b)} busy, up from {format_share(a)}"
        yield Change(what="processors", who=node, before=a, then=b, text=text)
    a, b = (table["swap_mb"].astype(float).max() for table in (usual, slow))
    if b - a >= SWAPPED_MB:
        text = f"{node} had {b / 1024:.1f} GiB in swap, {a / 1024:.1f} before"
        yield Change(what="swap", who=node, before=a, then=b, text=text)
    hosts = (table[table["gpu"] == "cpu"] for table in (usual, slow))
    a, b = ((one["memory_used_mb"] / one["memory_total_mb"]).astype(float).max() for one in hosts)
    if a < FULL <= b:
        text = f"the memory of {node} was {format_share(b)} full, {format_share(a)} before"
        yield Change(what="memory", who=node, before=a, then=b, text=text)
    for gpu, own in slow[slow["gpu"] != "cpu"].groupby("gpu"):
        before, name = usual[usual["gpu"] == gpu], f"GPU {gpu} of {node}"
        held = [table["throttle"].fillna("").str.contains("|".join(HELD_BY)).mean()
                for table in (before, own)]  # fmt: skip
        if held[1] - held[0] >= HELD:
            words = sorted({word for text in own["throttle"] for word in str(text).split(", ")})
            text = f"the clock of {name} was held down ({', '.join(filter(None, words))})"
            yield Change(what="clock", who=name, before=held[0], then=held[1], text=text)
        a, b = (table["utilization"].astype(float).mean() / 100 for table in (before, own))
        if a - b >= BUSIER:
            text = f"{name} was used {format_share(b)} of the time, {format_share(a)} before"
            yield Change(what="GPU use", who=name, before=a, then=b, text=text)


HELD_BY = ("thermal", "slowdown", "power")
"""Parts of the drivers' names for the reasons of a lowered clock."""


def _compare_work(found: Slowdown, steps: pd.DataFrame) -> list[Change]:
    """Return the kind of work of one rank that explains most of the longer steps, by the traces."""
    kinds = [name for name in steps if name.endswith("_s") and name not in SUMS]
    if steps.empty or not kinds:
        return []
    is_slow = found.mark(steps["attempt"], steps["step"])
    a, b = (steps[rows].groupby("rank")[kinds].median() for rows in (~is_slow, is_slow))
    grown = (b - a).stack()
    if grown.empty or grown.max() < (found.slow_s - found.before_s) / 2:
        return []
    rank, kind = grown.idxmax()
    was, then = float(a.loc[rank, kind]), float(b.loc[rank, kind])
    text = f"{kind[:-2]} of rank {rank} took {format_seconds(then)} of a step, "
    text += f"{format_seconds(was)} before"
    return [Change(what=kind[:-2], who=f"rank {rank}", before=was, then=then, text=text)]


SUMS = ("begin_s", "took_s", "first_s", "last_s", "wait_s", "work_s")
"""Columns of traced steps that are not kinds of work."""
