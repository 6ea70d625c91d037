"""Compare several jobs: their figures, and the differences between their confs."""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from varuna_core.facts.known import NotKnown, Value, value_of
from vjob.reports.analysis.headline import format_bounded
from vjob.reports.analysis.measures import Analysis
from vjob.reports.analysis.step_times import drop_first
from vjob.reports.load.tables import Job
from vjob.reports.page.figure import (
    BLUE,
    GREEN,
    GREY,
    LEAN,
    ORANGE,
    PINK,
    RED,
    Figure,
    FigureRows,
    draw_lines,
    plain,
)
from vjob.reports.page.html import Page, PagePart, render, show_table
from vjob.reports.page.sections import ReportTable

COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, GREY)
NAMES = {
    "step_s": "median step, s",
    "slowest_step_s": "slowest step, s",
    "last_step": "last step",
    "num_steps": "steps whose time is known",
    "idle_share": "idle in the pipeline, median of the steps",
    "step_idle_share": "idle in the pipeline, one step",
    "ideal_idle_share": "least possible idle share, by that step's stage times",
    "most_memory_mb": "most memory, MB",
    "goodput_share": "useful part of the time",
    "wall_s": "from start to end, s",
    "num_attempts": "attempts",
    "last_loss": "last loss",
    "best_loss": "best loss",
    "last_val_loss": "last validation loss",
    "best_val_loss": "best validation loss",
    "common_loss": "loss at the last step that all logged",
}
"""Keys of `--json` and the names shown for them."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    name: str
    job: Job
    analysis: Analysis
    settings: Mapping[str, str]
    """Values of the conf by dotted key; for a bare folder, the settings printed in its logs."""
    has_conf: bool

    @property
    def losses(self) -> pd.Series[float]:
        """Loss by step; for a repeated step, the last one."""
        table = self.analysis.curves.table
        loss = pd.to_numeric(table["loss"], errors="coerce").set_axis(table["step"])
        return loss.dropna().groupby(level=0).last()

    @property
    def validations(self) -> pd.Series[float]:
        """Losses of the evaluations, in order; empty if another metric stands for them."""
        evaluated = self.analysis.curves.list_evaluated()
        found = (rows for split, metric, rows in evaluated if split == "val" and "loss" in metric)
        rows = next(found, None)
        return pd.Series(dtype=float) if rows is None else rows["value"].astype(float).dropna()

    @property
    def figures(self) -> dict[str, float | None]:
        """Figures by the keys of NAMES; None means not known."""
        analysis = self.analysis
        later = drop_first(analysis.times)
        slowest_s = None if (later["count"] > 1).any() else later["took_s"].max()
        median = analysis.find_step("median")
        bubbles = median.bubbles if median is not None else ()
        loss, val = self.losses, self.validations
        memory, share = analysis.memory["used_mb"], analysis.goodput.share
        return {
            "step_s": _find(value_of(analysis.headline.step_s)),
            "slowest_step_s": _find(slowest_s),
            "last_step": _find(value_of(analysis.headline.last_step)),
            "num_steps": float(analysis.times["count"].sum()),
            "idle_share": value_of(analysis.headline.idle),
            "step_idle_share": _find(_mean([bubble.measured for bubble in bubbles])),
            "ideal_idle_share": _find(_mean([bubble.ideal for bubble in bubbles])),
            "most_memory_mb": _find(memory.max()),
            "goodput_share": share.value if isinstance(share, Value) else None,
            "wall_s": analysis.goodput.wall_s,
            "num_attempts": float(len(analysis.goodput.attempts)),
            "last_loss": _find(loss.iloc[-1] if len(loss) else None),
            "best_loss": _find(loss.min()),
            "last_val_loss": _find(val.iloc[-1] if len(val) else None),
            "best_val_loss": _find(val.min()),
        }


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _find(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten a conf to dotted keys; a list of mappings uses the index as a key."""
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        pairs = [(str(at), item) for at, item in enumerate(value)]
    else:
        return {prefix: str(value)}
    found: dict[str, str] = {}
    for key, item in pairs:
        found |= flatten(item, f"{prefix}.{key}" if prefix else key)
    return found


def find_differences(jobs: Sequence[Compared]) -> dict[str, list[str | None]]:
    """Return the values of each key that differs between jobs; None for a job without the key.

    A conf and a log use different names for settings: if some jobs have no conf, a key that only
    one job has does not count as a difference.
    """
    keys = Counter(key for job in jobs for key in job.settings)
    least = 1 if all(job.has_conf for job in jobs) else 2
    found = {
        key: [job.settings.get(key) for job in jobs]
        for key, count in keys.items()
        if count >= least
    }
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def build_comparison(jobs: Sequence[Compared]) -> list[ReportTable]:
    """Build the tables of figures, compared with the first job's, and of conf differences."""
    columns = ("", *(job.name for job in jobs))
    figures = _collect(jobs)
    rows = []
    for key, name in NAMES.items():
        values = [own[key] for own in figures]
        cells = [_show(key, value, values[0]) for value in values]
        if key == "goodput_share":  # as the reports say it, bounds included
            shares = [job.analysis.goodput.share for job in jobs]
            cells = ["-" if isinstance(one, NotKnown) else format_bounded(one) for one in shares]
        if any(cell != "-" for cell in cells):
            rows.append((name, *cells))
    differences = [(key, *_shorten(values)) for key, values in find_differences(jobs).items()]
    tables = (
        ReportTable(title="figures", columns=columns, rows=rows),
        ReportTable(title="differences", columns=columns, rows=differences),
    )
    return [table for table in tables if table.rows]


def _shorten(values: Sequence[str | None]) -> list[str]:
    """Drop from lists, such as the arguments of a program, the parts that all jobs have: an option
    together with its values. Lists that differ only in their order are not shortened."""
    whole = [value if value is not None else "-" for value in values]
    groups: list[list[str]] = []
    for text in whole:
        try:
            words = literal_eval(text) if text.startswith("[") else None
        except (ValueError, SyntaxError):
            words = None
        if not isinstance(words, list):
            return whole
        own: list[str] = []
        for word in map(str, words):
            if own and not word.startswith("-") and own[-1].startswith("-"):
                own[-1] += f" {word}"
            else:
                own.append(word)
        groups.append(own)
    common = set(groups[0]).intersection(*groups)
    short = [" ".join(one for one in own if one not in common) or "-" for own in groups]
    return [f"... {one}" for one in short] if common and len(set(short)) > 1 else whole


def _show(key: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("_share"):
        return f"{100 * value:.1f} %"
    text = f"{value:.5g}" if key.endswith("loss") else f"{value:.4g}"
    text = f"{value:.0f}" if key.startswith(("num_", "most_")) else text
    if first and value != first and key.endswith(("step_s", "_mb", "wall_s")):
        text += f" ({100 * (value / first - 1):+.0f} %)"
    return text


def _collect(jobs: Sequence[Compared]) -> list[dict[str, float | None]]:
    losses = [job.losses for job in jobs]
    common = max(set.intersection(*(set(each.index) for each in losses)), default=None)
    return [
        {**job.figures, "common_loss": None if common is None else float(loss[common])}
        for job, loss in zip(jobs, losses, strict=True)
    ]


def build_json(jobs: Sequence[Compared]) -> dict[str, Any]:
    return {
        "jobs": [{"name": job.name, **own} for job, own in zip(jobs, _collect(jobs), strict=True)],
        "differences": find_differences(jobs),
    }


def render_comparison(jobs: Sequence[Compared], *, made_at: str) -> str:
    """Render the comparison as a page, with step times and losses of all jobs in one chart."""
    figure = _draw_series(jobs)
    parts = [show_table(table) for table in build_comparison(jobs)]
    curves = [PagePart(title="Step by step", figure="figure-series")] if figure is not None else []
    page = Page(
        name=" and ".join(job.name for job in jobs),
        made_at=made_at,
        sections=[("Comparison", parts), *([("Curves", curves)] if curves else [])],
        figures={"series": figure} if figure is not None else {},
        compares=True,
    )
    return render(page)


def _draw_series(jobs: Sequence[Compared]) -> Figure | None:
    rows = FigureRows()
    series = (("took_s", "step time, s"), ("loss", "loss"), ("grad_norm", "gradient norm"))
    for name, title in series:
        traces: list[Figure] = []
        for number, job in enumerate(jobs):
            table = job.analysis.times if name == "took_s" else job.analysis.curves.table
            lines = draw_lines(table, name, title, COLOURS[number % len(COLOURS)])
            for line in lines:
                line |= {"name": plain(job.name), "showlegend": line is lines[0] and not rows.rows}
            traces += lines
        rows.add(160, title, LEAN, traces)
    if not rows.rows:
        return None
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"}
    axis = {"title": {"text": "step"}, "zeroline": False}
    return rows.draw(axis, showlegend=True, legend=legend)
