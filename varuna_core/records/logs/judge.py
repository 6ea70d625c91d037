"""Determine a job's step from traces, counters of optimizer steps and lines of logs. Pure.

    lines      step 110      step 120      step 130          110 and so on are the program's own
    counter    10 done       20 done       30 done    34     steps of this attempt, by every rank
                                                      └─► step 134, now: 100 + 34

If the lines count what the counter counts, they give the step's number, and the counter gives how
many steps were made and when. `Fit` says how lines and counter are related:

    Unit.STEP       each step has a number of its own; the offset is that of a resumed program
    Unit.PART       several numbers a step: micro-batches, samples
    Unit.SEVERAL    several steps a number: epochs, intervals between two lines
    Unit.OTHER      something else: the lines' number is shown as such, not as a step
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from enum import Enum
from typing import Mapping, Optional, Sequence, Tuple

from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value
from varuna_core.records.logs.step_counts import StepCounts

LEAST_STEPS = 4
"""Fewest steps between two lines that show what the lines count."""
SAME = 10
"""Least number of a step with which a single line shows that lines count steps, if the optimizer's
counter has about the same number."""
MANY_STEPS = 16
"""Number of optimizer steps after which lines whose numbers do not match the counter are taken to
count something else."""
UNEVEN = 0.15
NEAR = 0.1
"""A ratio within this distance of a whole number is that number."""
TWICE = 0.34
"""Largest error of a ratio: with a larger one, 1 and 2 cannot be distinguished."""
EXACT = 16
"""Divisor of the optimizer's count: the number in a line is a multiple of the count if it misses
the multiple by at most this part of the count, and by at most the numbers of one step."""
MOST_PARTS = 100_000
SURE_STEPS = 1.0
"""An offset that is sure to fewer steps is exact."""


class Source(str, Enum):
    """Source of a figure."""

    TRACE = "trace"
    COUNTER = "counter"
    LINES = "lines"


class Unit(str, Enum):
    """Units that the numbers in a log's lines may count."""

    STEP = "step"
    PART = "part of a step"
    SEVERAL = "several steps"
    OTHER = "other"


@dataclass(frozen=True)
class Lines:
    """Steps as the lines of one log show them."""

    step: int
    total: Optional[int]
    points: Tuple[Tuple[int, Optional[float]], ...]
    """(step, time of writing), the oldest first."""
    file: str = ""
    slack_s: float = 0.0
    """Error in seconds of the times of writing in `points`."""
    unit: str = "step"
    """`epoch` for lines that count only epochs."""
    is_least: bool = False
    """True if the first epoch of the lines was not read and may have the number 0 or 1; `step`
    assumes that it is 1."""


@dataclass(frozen=True)
class Fit:
    """Relation of the numbers in lines to the optimizer steps of the same rank or node."""

    unit: Unit
    ratio: float
    """Numbers of the lines for one step."""
    offset: Optional[int] = None
    """Number in the lines at the time when the counter of optimizer steps was 0; None if it is not
    known exactly."""


@dataclass(frozen=True)
class RankSteps:
    """Steps of one rank in this attempt."""

    rank: int
    done: int
    last_at: float
    pace_s: Optional[float]


@dataclass(frozen=True)
class Steps:
    """Result of `judge_steps`: the steps of a job, each figure with its source."""

    step: Known[int]
    """The program's own number of the step if lines have it, else `done`."""
    total: Known[int]
    done: Known[int]
    """Optimizer steps of this attempt, by the rank that did the most."""
    at: Optional[float]
    """Time at which the last step ended."""
    source: Optional[Source]
    fit: Optional[Fit]
    """None if lines or counter are missing, or if there is too little of them."""
    other: Optional[int]
    """Step of the source that was not used, if lines and counter disagree."""
    ranks: Tuple[RankSteps, ...]
    starts_at_least: bool = False
    """True if the lines that gave `step` have `is_least`: their first epoch was not read."""

    @property
    def is_counted(self) -> bool:
        """True if `step` is `done` because no line shows the program's own number."""
        is_same = self.fit is not None and self.fit.unit is Unit.STEP
        return self.source is Source.COUNTER and not is_same

    @property
    def is_least(self) -> bool:
        """True if `step` is only a lower bound: it is from the last line of a resumed program,
        after which steps may have been counted without the program's own number, or the first epoch
        of the lines was not read."""
        if self.starts_at_least:
            return True
        is_same = self.fit is not None and self.fit.unit is Unit.STEP and self.fit.offset is None
        total = self.total.value if isinstance(self.total, Value) else None
        return is_same and isinstance(self.step, Value) and self.step.value != total

    @property
    def slowest(self) -> Optional[RankSteps]:
        return min(self.ranks, key=lambda one: (one.done, one.rank), default=None)


def judge_steps(
    lines: Optional[Lines],
    counts: Mapping[int, StepCounts],
    reference: Optional[int] = None,
    traced: Optional[Tuple[int, Optional[float]]] = None,
) -> Steps:
    """Combine lines, counters and traces into the steps of a job. `reference` is a rank on the node
    that wrote the lines: both use one clock. `traced` is the last step of the farthest trace, which
    has the program's own numbers, and its end."""
    counts = {rank: one for rank, one in counts.items() if one.count}
    ranks = tuple(
        RankSteps(rank, one.count, one.last_at, one.median_s)
        for rank, one in sorted(counts.items())
    )
    if traced is not None:
        return _take_trace(lines, ranks, *traced)
    if not counts:
        return _take_lines(lines, ranks)
    most = max(sorted(counts), key=lambda rank: counts[rank].count)
    own = counts[most]
    least = " at least" if own.is_captured else ""
    seen = Evidence(
        "optimizer hook", Sure.MEASURED, seen=own.count, since=own.first_at, until=own.last_at,
        text=f"{own.count} steps of rank {most}{least}",
    )  # fmt: skip
    done: Known[int] = Value(own.count, (seen,))
    if own.is_captured:
        done = NotKnown("the optimizer runs in a CUDA graph, and replays are not counted", (seen,))
    if lines is None:
        total: Known[int] = NotKnown("no line says how many steps there will be")
        return Steps(done, total, done, own.last_at, Source.COUNTER, None, None, ranks)
    fit = None
    if not own.is_captured:
        fit = fit_lines(lines, counts[most if reference not in counts else reference])
    by_lines = _take_lines(lines, ranks)
    if lines.unit == "epoch" and not own.is_captured:
        fit = fit if fit is not None and fit.unit is Unit.SEVERAL else None
    is_whole = lines.unit == "step" and not own.is_captured and own.count == lines.total
    if is_whole and (fit is None or fit.unit is Unit.STEP):
        fit = Fit(Unit.STEP, 1.0, 0)  # the counter has come to the total of the lines
    is_evenly = fit is not None and fit.unit in (Unit.PART, Unit.SEVERAL)
    if not own.is_captured and not is_evenly and _starts_again(lines, own):
        total = NotKnown("the lines restart their count, as the bar of each epoch does")
        return Steps(done, total, done, own.last_at, Source.COUNTER, None, lines.step, ranks)
    if fit is None:
        if own.is_captured or (lines.unit == "step" and _may_be_steps(lines, own)):
            return _with(by_lines, done=done)
        total = NotKnown("it is not known yet what the lines count")
        return Steps(done, total, done, own.last_at, Source.COUNTER, None, lines.step, ranks)
    if fit.unit is Unit.OTHER:
        return _with(by_lines, done=done, fit=fit, other=own.count)
    if fit.unit is Unit.STEP:
        step = lines.step if fit.offset is None else max(lines.step, fit.offset + own.count)
        if lines.total is not None and lines.step <= lines.total:
            step = min(step, lines.total)
        evidence = (*by_lines.step.evidence, seen)
        counted = replace(by_lines, step=Value(step, evidence), source=Source.COUNTER)
        return replace(counted, done=done, at=own.last_at, fit=fit)
    return Steps(
        done, _convert(lines, fit), done, own.last_at, Source.COUNTER, fit, lines.step, ranks
    )


def _starts_again(lines: Lines, counts: StepCounts) -> bool:
    """Return True if the numbers in the lines begin again, as those of a bar for each epoch do.

    This is so if the counter is ahead of the lines by their total or, without a total, by as many
    steps as they show. A counter that is ahead by less may have counted a warm-up.
    """
    if lines.total is not None and lines.step > lines.total:
        return False
    most = lines.step if lines.total is None else lines.total
    return counts.count - max(lines.step, LEAST_STEPS) >= most


def _may_be_steps(lines: Lines, counts: StepCounts) -> bool:
    """Return True unless the numbers in the lines count something other than optimizer steps: all
    of them are less than half of the optimizer's count, as epochs are, or all are the same multiple
    of it, as micro-batches are. The numbers of a resumed program may be a multiple by chance, but
    not the same one in the next line."""
    pairs = [(step, round(counts.count_at(at))) for step, at in lines.points if at is not None]
    late = [pair for pair in pairs or [(lines.step, counts.count)] if pair[1] >= SAME]
    if not late:
        return True
    parts = {_find_parts(step, done) for step, done in late}
    return len(parts) > 1 or None in parts


def _find_parts(step: int, done: int) -> Optional[int]:
    """Return how many times `done`, the optimizer's count, goes into `step`, the number in a line:
    0 for less than half of it, None for once or for no whole number of times."""
    parts = round(step / done)
    if step < done / 2:
        return 0
    return parts if parts > 1 and abs(step - parts * done) <= min(parts, done // EXACT) else None


def fit_lines(lines: Lines, counts: StepCounts) -> Optional[Fit]:
    """Find what lines count; return None if there are too few lines or counts."""
    pairs = [(step, counts.count_at(at), at) for step, at in lines.points if at is not None]
    pairs = [pair for pair in pairs if pair[1] > 0]
    if not pairs:
        return None
    (first, first_done, _), (last, last_done, _) = pairs[0], pairs[-1]
    span = last_done - first_done
    pace = counts.median_s or 0.0
    slack = lines.slack_s / pace if pace else 0.0
    unsure = (1 + 2 * slack) / span if span else 1.0
    if span < LEAST_STEPS or unsure > TWICE or last < first:
        is_same = last >= SAME and abs(last - last_done) <= min(1 + slack, NEAR * last)
        gaps = [abs(step - done) for step, done, _ in pairs]
        is_same = is_same or (len({step for step, _, _ in pairs}) >= LEAST_STEPS
                              and max(gaps) + slack < SURE_STEPS / 2)  # fmt: skip
        return Fit(Unit.STEP, 1.0, 0) if is_same else None
    ratio = (last - first) / span
    if abs(ratio - 1) <= max(NEAR, unsure):
        return Fit(Unit.STEP, 1.0, _find_offset(pairs, slack))
    if span < MANY_STEPS:
        return None
    if not _is_even(pairs):
        return Fit(Unit.OTHER, ratio)
    if ratio > 1:
        parts = round(ratio)
        if parts <= MOST_PARTS and abs(ratio / parts - 1) <= max(NEAR / parts, unsure):
            return Fit(Unit.PART, float(parts))
    elif ratio > 0:
        several = round(1 / ratio)
        if abs(ratio * several - 1) <= max(NEAR / several, unsure):
            return Fit(Unit.SEVERAL, 1 / several)
    return Fit(Unit.OTHER, ratio)


def _find_offset(pairs: Sequence[Tuple[int, float, float]], slack: float) -> Optional[int]:
    """Return the step that the log lines had reached when the optimizer's counter was 0; None if
    that is not sure. A line is written a little after its step."""
    offset = statistics.median(step - done for step, done, _ in pairs[-9:])
    if slack + 0.5 < SURE_STEPS:
        return round(offset + 0.25)
    return 0 if abs(offset) <= slack + 1 else None


def _is_even(pairs: Sequence[Tuple[int, float, float]]) -> bool:
    """Return False if lines and counts have different ratios in the second half of the lines."""
    (first, begin, _), (step, done, _), (last, end, _) = pairs[0], pairs[len(pairs) // 2], pairs[-1]
    share = (step - first) / (last - first) if last > first else 0.0
    return abs((done - begin) / (end - begin) - share) <= UNEVEN


def _convert(lines: Lines, fit: Fit) -> Known[int]:
    """Return the total number of steps from a known number of parts or epochs."""
    name = "parts of a step" if fit.unit is Unit.PART else "several steps at once"
    if lines.total is None:
        return NotKnown("no line says how many steps there will be")
    steps = lines.total / fit.ratio
    if abs(steps - round(steps)) > 1e-6 * steps:
        return NotKnown(f"the lines count {name}: {lines.total} are not a whole number of steps")
    return Value(round(steps), (Evidence("step lines", Sure.INFERRED, lines.file),))


def _take_lines(lines: Optional[Lines], ranks: Tuple[RankSteps, ...]) -> Steps:
    if lines is None:
        unknown = NotKnown("no step was seen: not in the lines, in a trace or by the optimizer")
        return Steps(unknown, unknown, unknown, None, None, None, None, ranks)
    seen = Evidence("step lines", Sure.REPORTED, lines.file, seen=len(lines.points))
    total: Known[int] = NotKnown("no line says how many steps there will be")
    if lines.total is not None:
        total = Value(lines.total, (seen,))
    at = lines.points[-1][1] if lines.points else None
    unknown = NotKnown("the optimizer steps were not counted")
    return Steps(
        Value(lines.step, (seen,)), total, unknown, at, Source.LINES, None, None, ranks,
        lines.is_least,
    )  # fmt: skip


def _take_trace(
    lines: Optional[Lines], ranks: Tuple[RankSteps, ...], step: int, at: Optional[float]
) -> Steps:
    """Return the steps by the trace, whose last step is `step`, unless lines are ahead: a killed
    rank lacks the last seconds of its trace."""
    found = _take_lines(lines, ranks)
    if lines is not None and lines.step > step:
        return found
    taken: Known[int] = Value(step, (Evidence("trace", Sure.MEASURED),))
    return replace(found, step=taken, at=at, source=Source.TRACE, starts_at_least=False)


def _with(
    steps: Steps, *, done: Known[int], fit: Optional[Fit] = None, other: Optional[int] = None
) -> Steps:
    return replace(steps, done=done, fit=fit, other=other)
