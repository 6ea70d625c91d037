"""The whole run in a few hundred columns of time: ranks' work, and samples of GPUs.

A step's work counts as spread evenly over the step; between two steps nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from vjob.reports.analysis.measures import Analysis, list_ranks
from vjob.reports.load.tables import Job

NUM_BINS = 480
MOST_ROWS = 256
"""A row of a picture is then still higher than a pixel."""
STALE = 3.0
"""A sample holds for so many times the usual time between two, in case one is missing."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time axis that all of the run's pictures share."""

    zero_s: float
    """Seconds since 1970 at which the axis begins to count."""
    begin_s: float
    end_s: float
    unit: str
    unit_s: float

    @property
    def edges_s(self) -> Matrix:
        return np.linspace(self.begin_s, self.end_s, NUM_BINS + 1)


@dataclass(frozen=True, kw_only=True)
class Strips:
    """A row a rank or GPU, a column a piece of the span; NaN where nothing is known."""

    names: list[str]
    values: list[Matrix]

    def add(self, name: str, row: Matrix) -> None:
        self.names.append(name)
        self.values.append(row)


def find_span(job: Job, analysis: Analysis) -> Span | None:
    """From the first attempt's start to the last one's end; None where no clock says."""
    known = [
        time
        for attempt in analysis.goodput.attempts
        for time in (attempt.started, attempt.ended)
        if time is not None
    ]
    if not known and len(job.gpus):
        known = [float(time) for time in job.gpus["time"].dropna()]
    if not known:
        return None
    zero, length = min(known), max(max(known) - min(known), 1e-3)
    unit, unit_s = next(
        (name, size)
        for name, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("s", 1.0))
        if length > 3 * size or size == 1.0
    )
    return Span(zero_s=zero, begin_s=0.0, end_s=length, unit=unit, unit_s=unit_s)


def build_work_strips(job: Job, span: Span) -> tuple[Strips, Strips]:
    """Of every rank: the part of its steps that it worked, and its work against its stage's median.

    The second has rows only for ranks that share their stage with others, and may be empty. Beyond
    MOST_ROWS a row is several neighbours of a stage: their mean, and whoever is farthest off.
    """
    steps = job.traces.steps
    shift = job.traces.zero_ns / 1e9 - span.zero_s
    ranks = list_ranks(job).drop_duplicates("rank", keep="last")
    ranks = ranks.sort_values(["stage", "replica", "rank"])
    grouped = {int(rank): own for rank, own in steps.groupby("rank")}
    ranks = ranks[ranks["rank"].isin(list(grouped))]
    each = -(-len(ranks) // MOST_ROWS)
    means, farthest = Strips(names=[], values=[]), Strips(names=[], values=[])
    for stage, own in ranks.groupby("stage"):
        numbers = [int(rank) for rank in own["rank"]]
        pairs = [_fill_bins(grouped[number], shift, span.edges_s) for number in numbers]
        worked, a_step = (np.array(rows) for rows in zip(*pairs, strict=True))
        usual = _median(a_step)
        against = np.divide(a_step, usual, out=np.full_like(a_step, np.nan), where=usual > 0)
        for at in range(0, len(numbers), max(1, each)):
            rows = slice(at, at + each)
            name = f"stage {stage} {_name_ranks(numbers[rows])}"
            means.add(name, _mean(worked[rows]))
            if len(numbers) > 1:
                farthest.add(name, _find_farthest(against[rows]))
    return means, farthest


def _name_ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]}..{numbers[-1]}"


def _find_farthest(rows: Matrix) -> Matrix:
    """Of each column the value farthest from 1."""
    off = np.where(np.isnan(rows), -1.0, np.abs(rows - 1))
    found: Matrix = np.take_along_axis(rows, off.argmax(axis=0)[None], axis=0)[0]
    return found


def _fill_bins(steps: pd.DataFrame, shift: float, edges: Matrix) -> tuple[Matrix, Matrix]:
    """Work over time in steps, and work a step, bin by bin, from their running sums."""
    steps = steps.sort_values("begin_s")
    begin = steps["begin_s"].to_numpy(dtype=float) + shift
    took = np.maximum(steps["took_s"].to_numpy(dtype=float), 0)
    end = np.minimum(begin + took, np.append(begin[1:], np.inf))
    times = np.maximum.accumulate(np.column_stack([begin, end]).ravel())

    def sum_up(amounts: Any) -> Matrix:
        totals = np.cumsum(np.column_stack([np.zeros(len(begin)), amounts]).ravel())
        return np.diff(np.interp(edges, times, totals))

    covered = sum_up(np.maximum(end - begin, 0))
    worked = sum_up(steps["work_s"].to_numpy(dtype=float))
    # A sliver of a step in a bin would stand for all of it.
    known = covered > 0.02 * np.diff(edges)
    share = np.where(known, worked / np.where(known, covered, 1), np.nan)
    count = sum_up(np.ones(len(begin)))
    return share, np.where(known & (count > 0), worked / np.where(count > 0, count, 1), np.nan)


def _median(rows: Matrix) -> Matrix:
    found = np.full(rows.shape[1], np.nan)
    known = ~np.isnan(rows).all(axis=0)
    if known.any():
        found[known] = np.nanmedian(rows[:, known], axis=0)
    return found


def build_gpu_strips(job: Job, span: Span, name: str) -> Strips | None:
    """`name` is utilization, temperature, power_w or memory_used_mb."""
    if job.gpus.empty:
        return None
    samples = job.gpus.dropna(subset=["time", name])
    at = samples["time"].astype(float) - span.zero_s
    samples = samples.assign(at=at)[(at >= span.begin_s) & (at <= span.end_s)]
    if samples.empty:
        return None
    rows = {
        (str(node), str(gpu)): _hold(own.sort_values("at"), name, span.edges_s)
        for (node, gpu), own in samples.groupby(["node", "gpu"], sort=False)
    }
    if len(rows) <= MOST_ROWS:
        names = [f"{node} {'processors' if gpu == 'cpu' else f'GPU {gpu}'}" for node, gpu in rows]
        return Strips(names=names, values=list(rows.values()))
    nodes: dict[str, list[Matrix]] = {}
    for (node, _), values in rows.items():
        nodes.setdefault(node, []).append(values)
    return Strips(
        names=[f"{node}, {len(own)} GPUs" for node, own in nodes.items()],
        values=[_mean(np.array(own)) for own in nodes.values()],
    )


def _hold(samples: pd.DataFrame, name: str, edges: Matrix) -> Matrix:
    """The mean of the samples in a bin; in a bin without one, the sample before while it holds."""
    times, values = samples["at"].to_numpy(), samples[name].to_numpy(dtype=float)
    bins = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    sums = np.bincount(bins, weights=values, minlength=NUM_BINS)
    usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    before = np.searchsorted(times, edges[1:], side="right") - 1
    age = edges[:-1] - times[np.maximum(before, 0)]
    holds = (before >= 0) & (age <= STALE * usual)
    held = np.where(holds, values[np.maximum(before, 0)], np.nan)
    return np.where(counts > 0, sums / np.maximum(counts, 1), held)


def _mean(rows: Matrix) -> Matrix:
    known = ~np.isnan(rows)
    counts = known.sum(axis=0)
    sums = np.where(known, rows, 0).sum(axis=0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
