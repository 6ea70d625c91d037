"""Draw the figure of the whole run: ranks, events, steps and GPUs in charts stacked on one time
axis.

The run is divided into a few hundred columns of time. The work of a step is spread evenly over the
step; between two steps nothing is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.records.record import format_morph
from vjob.reports.analysis.measures import Analysis, list_ranks
from vjob.reports.load.tables import Job
from vjob.reports.page.figure import (
    BLUE,
    BLUE_TO_RED,
    CIVIDIS,
    GREEN,
    GREY,
    LEAN,
    MOST_TICKS,
    ORANGE,
    PINK,
    RED,
    Figure,
    FigureRows,
    Matrix,
    draw_lines,
    list_cells,
    plain,
    round_all,
)

NUM_BINS = 480
MOST_ROWS = 256
"""The most rows of a chart; with more, a row would be thinner than a pixel."""
STALE = 3.0
"""A sample is held for this many usual intervals, in case the next one is missing."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time axis shared by all charts of the run."""

    zero_s: float
    """The origin of the axis, in seconds since 1970."""
    begin_s: float
    end_s: float
    unit: str
    unit_s: float

    @property
    def edges_s(self) -> Matrix:
        return np.linspace(self.begin_s, self.end_s, NUM_BINS + 1)


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Rows for ranks or GPUs, with a column for each piece of the span; NaN means not known."""

    names: list[str]
    values: list[Matrix]

    def add(self, name: str, row: Matrix) -> None:
        self.names.append(name)
        self.values.append(row)


def find_span(job: Job, analysis: Analysis) -> Span | None:
    """Return the span from the first attempt's start to the last one's end; None without clocks."""
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
    """Return two charts: the share of steps that each rank worked, and its work divided by that of
    its stage.

    The second has rows only for ranks that share their stage with others, and may be empty. Beyond
    MOST_ROWS, a row stands for several neighbours in a stage: their mean in the first chart, and
    the rank farthest from 1 in the second.
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
                farthest.add(name, _choose_farthest(against[rows]))
    return means, farthest


def _name_ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]}..{numbers[-1]}"


def _choose_farthest(rows: Matrix) -> Matrix:
    """Choose for each column the value farthest from 1."""
    off = np.where(np.isnan(rows), -1.0, np.abs(rows - 1))
    found: Matrix = np.take_along_axis(rows, off.argmax(axis=0)[None], axis=0)[0]
    return found


def _fill_bins(steps: pd.DataFrame, shift: float, edges: Matrix) -> tuple[Matrix, Matrix]:
    """Return, for each bin, the share of work in steps and the work per step, from running sums."""
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
    """Return the samples named `name`: utilization, temperature, power_w or memory_used_mb."""
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
    """Return the mean of the samples in each bin, or else the last one while it is not stale."""
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


MOST_MARKS = 400


def draw_run(job: Job, analysis: Analysis) -> Figure | None:
    span = find_span(job, analysis)
    has_times = not job.traces.steps.empty
    rows = FigureRows()
    if span is not None and has_times:
        worked, against = build_work_strips(job, span)
        _add_strips(rows, span, worked, "work of each rank, part of its steps", CIVIDIS, 1.0)
        if len(against.names):
            _add_strips(
                rows, span, against, "work against the median of its stage", BLUE_TO_RED, None
            )
    if span is not None and has_times:
        _add_marks(rows, job, analysis, span)
    x_of = _StepPlaces(job, analysis, span if has_times else None)
    _add_series(rows, analysis, x_of)
    if span is not None and (has_times or not rows.rows):
        busy = build_gpu_strips(job, span, "utilization")
        if busy is not None:
            scaled = Strips(names=busy.names, values=[row / 100 for row in busy.values])
            is_cpu = all(name.endswith("processors") for name in busy.names)
            title = "processors busy" if is_cpu else "GPUs busy"
            _add_strips(rows, span, scaled, title, CIVIDIS, 1.0)
    if not rows.rows:
        return None
    title = f"{span.unit} since the start" if span is not None and has_times else "step"
    if not len(analysis.times) and span is not None:
        title = f"{span.unit} since the first sample"
    shapes = _list_starts(analysis, span) if span is not None and has_times else []
    return rows.draw({"title": {"text": title}, "zeroline": False}, shapes=shapes)


def _add_strips(
    rows: FigureRows, span: Span, strips: Strips, title: str, scale: Any, most: float | None
) -> None:
    """Add a heat map, a row for each rank; `most` is the scale's top, None centres it on 1."""
    count = len(strips.names)
    if not count:
        return
    percent = np.rint(100 * np.array(strips.values))
    cells = list_cells(np.clip(percent, 0, 999))
    width = (span.end_s - span.begin_s) / percent.shape[1]
    bounds = {"zmin": 0, "zmax": 100} if most is not None else {"zmin": 50, "zmax": 150}
    trace = {
        "type": "heatmap",
        "z": cells,
        "x0": (span.begin_s + width / 2) / span.unit_s,
        "dx": width / span.unit_s,
        "y": [plain(name) for name in strips.names],
        "colorscale": scale,
        **bounds,
        "hovertemplate": f"%{{y}}, %{{x:.4g}} {span.unit}: %{{z}} %<extra></extra>",
        "colorbar": {"thickness": 10, "ticksuffix": " %", "tickfont": {"size": 10}, "nticks": 4},
    }
    axis = {
        "autorange": "reversed",
        "type": "category",
        "nticks": MOST_TICKS,
        "tickfont": {"size": 10},
        "showgrid": False,
        "zeroline": False,
    }
    rows.add(int(np.clip(14 * count, 42, 420)), title, axis, [trace])


class _StepPlaces:
    """Position of each step on the axis: its end, or its number if no clock is known."""

    def __init__(self, job: Job, analysis: Analysis, span: Span | None) -> None:
        self.span = span
        self.known: dict[str, tuple[Matrix, Matrix]] = {}
        if span is None:
            return
        shift = job.traces.zero_ns / 1e9 - span.zero_s
        for attempt, own in analysis.times.groupby("attempt", sort=False):
            own = own.sort_values("step")
            ends = (own["begin_s"] + own["took_s"]).to_numpy(dtype=float) + shift
            self.known[str(attempt)] = (own["step"].to_numpy(dtype=float), ends / span.unit_s)

    def find(self, attempt: str, steps: Matrix) -> Matrix:
        if self.span is None:
            return steps
        if attempt not in self.known:
            return np.full(len(steps), np.nan)
        return np.interp(steps, *self.known[attempt], left=np.nan, right=np.nan)


def _add_series(rows: FigureRows, analysis: Analysis, places: _StepPlaces) -> None:
    pairs = [
        (analysis.times, "took_s", "step time, s", BLUE, 150, 1.0),
        (analysis.bubbles, "bubble_share", "ranks idle in the pipeline, %", ORANGE, 90, 100.0),
    ]
    for table, name, title, colour, height, times in pairs:
        traces = draw_lines(table, name, title, colour, place=places.find, times=times)
        if traces and name == "took_s":
            traces += _mark_outliers(analysis, places)
        rows.add(height, title, LEAN, traces)


def _mark_outliers(analysis: Analysis, places: _StepPlaces) -> list[Figure]:
    found = analysis.outliers
    if not found:
        return []
    x = [float(places.find(item.attempt, np.array([float(item.step)]))[0]) for item in found]
    text = [
        f"step {item.step} stands out"
        + (f": {plain(item.kind)} of rank {item.rank}" if item.kind else "")
        for item in found
    ]
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": round_all(np.array(x)),
            "y": round_all(np.array([item.took_s for item in found])),
            "customdata": [[item.attempt, item.step] for item in found],
            "text": text,
            "marker": {"symbol": "circle-open", "size": 11, "color": RED, "line": {"width": 2}},
            "hovertemplate": "%{text}: %{y:.4g} s<extra></extra>",
        }
    ]


QUIET = ("intent", "submitted", "adopted", "started", "preflight", "ended")
"""Kinds of events that need no mark: every run has them, and attempts are shown already."""


def _add_marks(rows: FigureRows, job: Job, analysis: Analysis, span: Span) -> None:
    """Add marks for attempts, checkpoints, morphs and others, a line for each kind."""
    kinds: dict[str, list[tuple[float, str]]] = {}
    for attempt in analysis.goodput.attempts:
        if attempt.started is not None:
            text = f"attempt {attempt.label or '-'} begins"
            kinds.setdefault("attempt", []).append((attempt.started - span.zero_s, text))
    steps = job.traces.steps
    if "checkpoint_s" in steps:
        saved = steps[steps["checkpoint_s"] > 0].drop_duplicates(["attempt", "step"])
        shift = job.traces.zero_ns / 1e9 - span.zero_s
        for step, begin, took in saved[["step", "begin_s", "checkpoint_s"]].itertuples(index=False):
            text = f"checkpoint in step {step}, {took:.4g} s"
            kinds.setdefault("checkpoint", []).append((float(begin) + shift, text))
    for event in job.history:
        kind = str(event.get("kind", ""))[:40]
        if kind not in QUIET:
            kinds.setdefault(kind, []).append(
                (float(event["time"]) - span.zero_s, _describe(event))
            )
    traces = []
    for at, (kind, marks) in enumerate(kinds.items()):
        inside = [mark for mark in marks if span.begin_s - 1 <= mark[0] <= span.end_s + 1]
        marks = inside[:: -(-len(inside) // MOST_MARKS) or 1]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": round_all(np.array([time / span.unit_s for time, _ in marks])),
                "y": [at] * len(marks),
                "text": [plain(text) for _, text in marks],
                "marker": {"size": 9, "symbol": at, "color": (BLUE, PINK, RED, GREEN)[at % 4]},
                "name": plain(kind),
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    axis = {
        "tickvals": list(range(len(traces))),
        "ticktext": [plain(kind) for kind in kinds],
        "range": [len(traces) - 0.4, -0.6],
        "fixedrange": True,
        "zeroline": False,
    }
    rows.add(22 * len(traces) + 6, "what happened", axis, traces)


def _describe(event: Mapping[str, Any]) -> str:
    """Describe an event: `morph: from 8 x 4 to 6 x 4, 12 s: a node was lost`."""
    if event.get("kind") == "morph":
        return f"morph: {format_morph(event)}: {event.get('reason', '')}"
    facts = [
        f"{key} {value}"
        for key, value in event.items()
        if key not in ("time", "kind") and isinstance(value, (str, int, float))
    ]
    kind = str(event.get("kind", ""))
    return f"{kind}: {', '.join(facts)}" if facts else kind


def _list_starts(analysis: Analysis, span: Span) -> list[Figure]:
    """Return vertical lines where attempts begin, except the first."""
    return [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": (attempt.started - span.zero_s) / span.unit_s,
            "x1": (attempt.started - span.zero_s) / span.unit_s,
            "y0": 0,
            "y1": 1,
            "line": {"color": GREY, "width": 1, "dash": "dot"},
        }
        for attempt in analysis.goodput.attempts[1:]
        if attempt.started is not None
    ]
