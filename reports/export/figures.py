"""The page's figures as plotly Figures, for notebooks.

Each takes a job as `load_job` does. Where a job left nothing to draw, the figure is empty and its
title says what is missing. The page's timeline is a canvas, which draws a million events; the one
here is plotly's, and joins neighbours where a step has more than plotly can draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from varuna_core.records.logs.trace import COMPUTE
from vjob.reports.export.tables import JobLike, JobTables, load_job
from vjob.reports.load.trace_reader import read_events
from vjob.reports.page import run_page
from vjob.reports.page.comparison import COLOURS
from vjob.reports.page.figure import LEAN, FigureRows, draw_lines, plain
from vjob.reports.page.run_figure import draw_run

MOST_BARS = 8000
"""Drawn in about a second."""
NO_TRACE = "no rank wrote a trace (docs/report.md, The trace)"
KINDS = {
    "F": ("forward", "#0072b2"),
    "f": ("forward", "#0072b2"),
    "R": ("recompute", "#56b4e9"),
    "B": ("backward", "#e69f00"),
    "I": ("backward of inputs", "#d55e00"),
    "W": ("backward of weights", "#00805a"),
    "O": ("copies", "#44aa99"),
    "L": ("copies", "#44aa99"),
    "compute": ("compute", "#0072b2"),
    "send": ("send", "#cc79a7"),
    "all-reduce": ("all-reduce", "#882255"),
    "communication": ("communication", "#882255"),
    "memcpy": ("copies", "#44aa99"),
    "optimizer": ("optimizer", "#b5b044"),
    "checkpoint": ("checkpoint", "#332288"),
    "evaluate": ("evaluation", "#44aa99"),
    "data": ("data", "#9db0c4"),
    "detail": ("spans inside others", "#c4b8a5"),
    "other": ("other", "#777777"),
}
"""Names and colours of the page's timeline (reports/web/page.css)."""
WAIT = ("wait", "#d3d7dd")


def overview(job: JobLike) -> go.Figure:
    """The whole run: work of ranks, what happened, step times, loss and GPUs on one axis."""
    tables = load_job(job)
    return _build(draw_run(tables.job, tables.analysis), f"{tables.name}: nothing to draw yet")


def stages(job: JobLike) -> go.Figure:
    """Work of each stage in the median step, and what the plan promised."""
    tables = load_job(job)
    return _build(run_page.draw_stages(tables.job, tables.analysis), f"{tables.name}: {NO_TRACE}")


def shares(job: JobLike) -> go.Figure:
    """Where the median step goes, stage by stage."""
    tables = load_job(job)
    return _build(run_page.draw_shares(tables.analysis), f"{tables.name}: {NO_TRACE}")


def training(job: JobLike) -> go.Figure:
    """Loss, norm of the gradients, loss scale and learning rate by step."""
    tables = load_job(job)
    missing = f"{tables.name}: no log has a line about a step"
    return _build(run_page.draw_training(tables.analysis), missing)


def timers(job: JobLike) -> go.Figure:
    """Megatron's timers, rank by rank: the mean of all logged steps."""
    tables = load_job(job)
    missing = f"{tables.name}: no log has Megatron's timers (profile.timers)"
    return _build(run_page.draw_timers(tables.job), missing)


def losses(*jobs: JobLike) -> go.Figure:
    """The loss by step, a line a job and attempt: of one job, or of several over each other."""
    every = [load_job(job) for job in jobs]
    rows, lines = FigureRows(), []
    for number, tables in enumerate(every):
        colour = COLOURS[number % len(COLOURS)]
        found = draw_lines(tables.analysis.curves.table, "loss", "loss", colour)
        for line in found:
            line |= {"name": plain(tables.name), "showlegend": line is found[0]}
        lines += found
    rows.add(360, "loss", LEAN, lines)
    axis = {"title": {"text": "step"}, "zeroline": False}
    figure = rows.draw(axis, showlegend=len(every) > 1) if rows.rows else None
    names = ", ".join(tables.name for tables in every)
    return _build(figure, f"{names}: no log has a line with a loss")


def memory(job: JobLike) -> go.Figure:
    """Memory over time: of each GPU by its samples, or of each rank by Megatron's lines."""
    tables = load_job(job)
    figure = run_page.draw_memory(tables.job)
    return _build(figure, f"{tables.name}: no samples of GPUs, and no lines about memory")


def timeline(
    job: JobLike,
    step: int | None = None,
    *,
    attempt: str | int | None = None,
    ranks: Sequence[int] | None = None,
) -> go.Figure:
    """What each rank did in one step: the median one if none is given.

    The upper part of a lane is the schedule's actions with the waits before them, the lower part
    what ran beside. `attempt`: the last that did the step, unless given. `ranks`: those to draw.
    """
    tables = load_job(job)
    pair, missing = _find_step(tables, step, None if attempt is None else str(attempt))
    if pair is None:
        return _build(None, f"{tables.name}: {missing}")
    events = _read_step(tables, pair)
    if ranks is not None:
        events = events[events["rank"].isin(list(ranks))]
    if events.empty:
        return _build(None, f"{tables.name}: no events of these ranks in step {pair[1]}")
    of = f" of attempt {pair[0]}" if len(tables.job.sources.attempts) > 1 else ""
    return _draw_timeline(events, f"{plain(tables.name)}: step {pair[1]}{of}")


def _find_step(
    tables: JobTables, step: int | None, attempt: str | None
) -> tuple[tuple[str, int] | None, str]:
    """(attempt, step) to draw; or None, and why."""
    known = [*tables.job.traces.detailed_steps, *tables.job.chosen.values()]
    found = [pair for pair in known if attempt in (None, pair[0])]
    if not found:
        return None, NO_TRACE if attempt is None else f"attempt {attempt} has no trace"
    if step is None:
        median = tables.job.chosen.get("median")
        return (median if median in found else found[len(found) // 2]), ""
    exact = [pair for pair in found if pair[1] == step]
    if exact:
        return exact[-1], ""
    steps = sorted({pair[1] for pair in found})
    near = sorted(sorted(steps, key=lambda other: abs(other - step))[:5])
    return None, f"no events of step {step}; there are of {', '.join(map(str, near))}, ..."


def _read_step(tables: JobTables, pair: tuple[str, int]) -> pd.DataFrame:
    held = tables.job.events
    own = held[(held["attempt"] == pair[0]) & (held["step"] == pair[1])] if len(held) else held
    return own if len(own) else read_events(tables.job.traces, [pair])


def _draw_timeline(events: pd.DataFrame, title: str) -> go.Figure:
    first_s = float(events["begin_s"].min())
    span_s = float(events["end_s"].max()) - first_s
    unit, size = next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if span_s > 2 * size),
        ("µs", 1e-6),
    )
    lanes = events.groupby("rank")[["stage", "replica"]].min().reset_index()
    lanes = lanes.sort_values(["stage", "replica", "rank"]).reset_index(drop=True)
    bars = _list_bars(events, {int(rank): at for at, rank in enumerate(lanes["rank"])})
    shortest_s, bars = _join_short(bars, span_s)
    traces = [_draw_bars(own, str(kind), first_s, size, unit) for kind, own in bars.groupby("kind")]
    traces.sort(
        key=lambda trace: [WAIT[0], *(name for name, _ in KINDS.values())].index(trace.name)
    )
    if shortest_s:
        title += f"; neighbours within {shortest_s / size:.3g} {unit} are drawn as one"
    names = [
        f"stage {stage} rank {rank}" if stage >= 0 else f"rank {rank}"
        for rank, stage in lanes[["rank", "stage"]].itertuples(index=False)
    ]
    each = max(1, len(names) // 40)
    return go.Figure(
        data=traces,
        layout={
            "title": {"text": title, "font": {"size": 15}},
            "barmode": "overlay",
            "height": int(np.clip(30 * len(names), 120, 1600)) + 130,
            "bargap": 0,
            "xaxis": {"title": {"text": f"{unit} since the step began"}, "zeroline": False},
            "yaxis": {
                "tickvals": list(range(0, len(names), each)),
                "ticktext": names[::each],
                "range": [len(names) - 0.45, -0.55],
                "showgrid": False,
                "zeroline": False,
            },
            "hoverlabel": {"align": "left"},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
            "showlegend": True,
        },
    )


def _list_bars(events: pd.DataFrame, lanes: Mapping[int, int]) -> pd.DataFrame:
    """A row a bar: lane, track, kind, begin_s, end_s, and what to say of it."""
    is_action = events["kind"].isin(COMPUTE)
    lane = events["rank"].map(lanes)
    names = events["kind"].map(lambda kind: KINDS.get(kind, KINDS["other"])[0])
    micro = [f" {number}" if number >= 0 else "" for number in events["microbatch"]]
    what = [f" {plain(text)}" if text else "" for text in events["what"]]
    sizes = [f", {size:,} bytes" if size else "" for size in events["bytes"]]
    said = [
        f"{name}{number}{text}{size_}"
        for name, number, text, size_ in zip(names, micro, what, sizes, strict=True)
    ]
    work = pd.DataFrame({
        "lane": lane, "track": (~is_action).astype(int), "rank": events["rank"], "kind": names,
        "begin_s": events["ready_s"].where(is_action, events["begin_s"]),
        "end_s": events["end_s"], "said": said,
    })  # fmt: skip
    waits = work.assign(
        begin_s=events["begin_s"], end_s=events["ready_s"], kind=WAIT[0],
        said=[f"waits for {text}" for text in said],
    )[is_action & (events["ready_s"] > events["begin_s"])]  # fmt: skip
    return pd.concat([waits, work], ignore_index=True).sort_values(
        ["lane", "track", "kind", "begin_s"], ignore_index=True
    )


def _join_short(bars: pd.DataFrame, span_s: float) -> tuple[float, pd.DataFrame]:
    """Neighbours of a lane and kind joined until few enough bars are left; the gap that was."""
    gap_s = 0.0
    while len(bars) > MOST_BARS:
        gap_s = 2 * gap_s or span_s / 4096
        same = (bars[["lane", "track", "kind"]] == bars[["lane", "track", "kind"]].shift()).all(
            axis=1
        )
        near = bars["begin_s"] - bars["end_s"].shift() <= gap_s
        short = (bars["end_s"] - bars["begin_s"] <= gap_s) | (
            (bars["end_s"] - bars["begin_s"]).shift() <= gap_s
        )
        group = (~(same & near & short)).cumsum()
        counts = bars.groupby(group)["said"].transform("size")
        bars = (
            bars.assign(said=bars["said"].where(counts == 1, bars["kind"] + ", several"))
            .groupby(group, as_index=False)
            .agg({**dict.fromkeys(bars.columns, "first"), "end_s": "max"})
        )
        if gap_s > span_s:
            break
    return gap_s, bars


def _draw_bars(own: pd.DataFrame, kind: str, first_s: float, size: float, unit: str) -> go.Bar:
    colour = next((colour for name, colour in (*KINDS.values(), WAIT) if name == kind), WAIT[1])
    begin: npt.NDArray[Any] = (own["begin_s"].to_numpy(dtype=float) - first_s) / size
    took: npt.NDArray[Any] = (own["end_s"] - own["begin_s"]).to_numpy(dtype=float) / size
    is_below = own["track"].to_numpy() == 1
    return go.Bar(
        name=kind,
        orientation="h",
        base=begin,
        x=took,
        y=own["lane"].to_numpy() + np.where(is_below, 0.3, -0.1),
        width=np.where(is_below, 0.2, 0.56),
        marker={"color": colour, "line": {"width": 0}},
        customdata=np.column_stack([own["rank"].astype(str), own["said"]]),
        hovertemplate=f"rank %{{customdata[0]}}: %{{customdata[1]}}<br>%{{base:.4g}} {unit}, "
        f"takes %{{x:.4g}} {unit}<extra></extra>",
    )


def _build(figure: Mapping[str, Any] | None, missing: str) -> go.Figure:
    """A figure of the page in plotly's own colours; the page's come from its style sheet."""
    if figure is None:
        return go.Figure(layout={
            "title": {"text": plain(missing), "font": {"size": 15}}, "height": 160,
            "xaxis": {"visible": False}, "yaxis": {"visible": False},
        })  # fmt: skip
    layout = {
        name: value
        for name, value in figure["layout"].items()
        if name not in ("paper_bgcolor", "plot_bgcolor")
    }
    return go.Figure(data=figure["data"], layout=layout)
