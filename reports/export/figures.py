"""Draw the page's figures as plotly Figures, for notebooks.

Each function takes the same job argument as `load_job`. If a job left nothing to draw, the figure
is empty and its title says what is missing. The timeline of a step is available only on the page,
on a canvas that draws a million events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from vjob.reports.export.tables import JobLike, load_job
from vjob.reports.page import run_page
from vjob.reports.page.comparison import COLOURS
from vjob.reports.page.figure import LEAN, FigureRows, draw_lines, plain
from vjob.reports.page.run_figure import draw_run

NO_TRACE = "no rank wrote a trace (docs/report.md, The trace)"


def overview(job: JobLike) -> go.Figure:
    """Draw the whole run: work of ranks, events, step times and GPUs over time."""
    tables = load_job(job)
    return _build(draw_run(tables.job, tables.analysis), f"{tables.name}: nothing to draw yet")


def stages(job: JobLike) -> go.Figure:
    """Draw each stage's work in the median step, with the plan's estimate."""
    tables = load_job(job)
    return _build(run_page.draw_stages(tables.job, tables.analysis), f"{tables.name}: {NO_TRACE}")


def shares(job: JobLike) -> go.Figure:
    """Draw the median step's time by stage and kind."""
    tables = load_job(job)
    return _build(run_page.draw_shares(tables.analysis), f"{tables.name}: {NO_TRACE}")


def training(job: JobLike) -> go.Figure:
    """Draw loss, gradient norm, loss scale and learning rate by step."""
    tables = load_job(job)
    missing = f"{tables.name}: no log has a line about a step"
    return _build(run_page.draw_training(tables.analysis), missing)


def timers(job: JobLike) -> go.Figure:
    """Draw the mean time of each of Megatron's timers, for each rank, over all logged steps."""
    tables = load_job(job)
    missing = f"{tables.name}: no log has Megatron's timers (profile.timers)"
    return _build(run_page.draw_timers(tables.job), missing)


def losses(*jobs: JobLike) -> go.Figure:
    """Draw the loss by step of one or several jobs, with a line for each job and attempt."""
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
    """Draw memory over time: of GPUs by their samples, or of ranks by Megatron's lines."""
    tables = load_job(job)
    figure = run_page.draw_memory(tables.job)
    return _build(figure, f"{tables.name}: no samples of GPUs, and no lines about memory")


def _build(figure: Mapping[str, Any] | None, missing: str) -> go.Figure:
    """Convert a figure of the page, coloured by a style sheet, to plotly's own colours."""
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
