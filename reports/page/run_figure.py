"""The figure of the whole run: ranks, marks, steps, loss and GPUs above each other on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from varuna_core.records.morphs import tell_morph
from vjob.reports.analysis.measures import Analysis
from vjob.reports.load.tables import Job
from vjob.reports.page.figure import (
    BLUE,
    GREEN,
    GREY,
    LEAN,
    MOST_TICKS,
    ORANGE,
    PINK,
    RED,
    Figure,
    Rows,
    draw_lines,
    list_cells,
    plain,
    round_all,
)
from vjob.reports.page.overview import (
    Matrix,
    Span,
    Strips,
    build_gpu_strips,
    build_work_strips,
    find_span,
)

MOST_MARKS = 400


def draw_run(job: Job, analysis: Analysis) -> Figure | None:
    span = find_span(job, analysis)
    has_times = not job.traces.steps.empty
    rows = Rows()
    if span is not None and has_times:
        worked, against = build_work_strips(job, span)
        _add_strips(rows, span, worked, "work of each rank, part of its steps", "Cividis", 1.0)
        if len(against.names):
            _add_strips(rows, span, against, "work against the median of its stage", "RdBu", None)
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
            _add_strips(rows, span, scaled, title, "Cividis", 1.0)
    if not rows.rows:
        return None
    title = f"{span.unit} since the start" if span is not None and has_times else "step"
    if not len(analysis.times) and span is not None:
        title = f"{span.unit} since the first sample"
    shapes = _list_starts(analysis, span) if span is not None and has_times else []
    return rows.draw({"title": {"text": title}, "zeroline": False}, shapes=shapes)


def _add_strips(
    rows: Rows, span: Span, strips: Strips, title: str, scale: str, most: float | None
) -> None:
    """A heat map, a row a rank; `most` is the top of the scale, None for one around 1."""
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
    """Where on the axis a step lies: when it ended, or its number where no clock says."""

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


def _add_series(rows: Rows, analysis: Analysis, places: _StepPlaces) -> None:
    pairs = [
        (analysis.times, "took_s", "step time, s", BLUE, 150, 1.0),
        (analysis.bubbles, "bubble_share", "ranks idle in the pipeline, %", ORANGE, 90, 100.0),
        (analysis.curves.table, "loss", "loss", GREEN, 120, 1.0),
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
"""What every run goes through: attempts show it already."""


def _add_marks(rows: Rows, job: Job, analysis: Analysis, span: Span) -> None:
    """Starts of attempts, checkpoints, morphs and the like, each a line of symbols."""
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
    """`morph: from 8 x 4 to 6 x 4, 12 s: a node was lost`; of others, all that they say."""
    if event.get("kind") == "morph":
        return f"morph: {tell_morph(event)}: {event.get('reason', '')}"
    facts = [
        f"{key} {value}"
        for key, value in event.items()
        if key not in ("time", "kind") and isinstance(value, (str, int, float))
    ]
    return f"{event['kind']}: {', '.join(facts)}" if facts else str(event["kind"])


def _list_starts(analysis: Analysis, span: Span) -> list[Figure]:
    """A line through all rows where an attempt begins; the first needs none."""
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
