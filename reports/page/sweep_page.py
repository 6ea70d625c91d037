"""Compare the runs of a sweep: their final figures against the keys that were swept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from varuna_core.facts.known import value_of
from vjob.reports.page.comparison import COLOURS, Compared
from vjob.reports.page.figure import LEAN, MOST_TICKS, Figure, FigureRows, plain
from vjob.reports.page.html import Page, PagePart, render
from vjob.reports.page.sections import ReportTable

NAMES = {
    "last_step": "step",
    "last_loss": "loss",
    "step_s": "s/step",
    "tokens_per_s": "tokens/s",
}
"""Column titles by key of `--json`."""
TITLES = {
    "last_loss": "final loss",
    "step_s": "median step, s",
    "tokens_per_s": "tokens a second",
}
"""Titles of the figures that are drawn."""
MANY = 10.0
"""The axis becomes logarithmic if the largest value is at least this many times the smallest."""
NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    name: str
    state: str
    """The scheduler's state of the run."""
    message: str
    """Why the run did not end well, or is not running."""
    values: Mapping[str, str]
    """The text of each swept key's value in this run."""
    figures: Mapping[str, float | None]
    """Figures by the keys of NAMES; None means not known, and a loss may be NaN."""


def find_figures(compared: Compared | None) -> dict[str, float | None]:
    """Return the final figures of a run; all are None if it left nothing to read."""
    if compared is None:
        return dict.fromkeys(NAMES)
    analysis = compared.analysis
    last = value_of(analysis.headline.last_step)
    step_s = compared.figures["step_s"]
    return {
        "last_step": None if last is None else float(last),
        "last_loss": _find_last_loss(compared),
        "step_s": step_s,
        "tokens_per_s": _find_tokens(compared, step_s),
    }


def _find_last_loss(compared: Compared) -> float | None:
    """Return the last line's loss, which may be NaN; skipped steps without a loss do not count."""
    table = compared.analysis.curves.table
    loss = pd.to_numeric(table["loss"], errors="coerce")
    skipped = pd.to_numeric(table["skipped"], errors="coerce").fillna(0) > 0
    loss = loss[loss.notna() | ~skipped]
    # The column is of floats where a loss was printed, even NaN; else it holds None.
    is_known = pd.api.types.is_float_dtype(table["loss"]) or loss.notna().any()
    return float(loss.iloc[-1]) if is_known and len(loss) else None


def _find_tokens(compared: Compared, step_s: float | None) -> float | None:
    """Return tokens a second from the log, or else from the conf's batch and sequence length."""
    said = compared.job.logs["iterations"].get("tokens_per_s")
    if said is not None and said.notna().any():
        return float(said.median())
    batch, sequence = (
        compared.settings.get(key, "") for key in ("train.global_batch_size", "model.sequence")
    )
    if step_s and batch.isdecimal() and sequence.isdecimal():
        return int(batch) * int(sequence) / step_s
    return None


def sort_runs(runs: Sequence[SweptRun]) -> list[SweptRun]:
    """Sort by loss, lowest first; then runs whose loss is NaN, then those without a loss."""

    def place(run: SweptRun) -> tuple[int, float]:
        loss = run.figures["last_loss"]
        if loss is None:
            return 2, 0.0
        return (1, 0.0) if math.isnan(loss) else (0, loss)

    return sorted(runs, key=place)


def build_sweep_table(runs: Sequence[SweptRun], keys: Mapping[str, str]) -> ReportTable:
    """Build a table with a row for each run, best first; `keys` maps keys to shown names."""
    shown = [key for key in NAMES if any(run.figures[key] is not None for run in runs)]
    rows = [
        (
            run.name,
            *(run.values.get(key, NOTHING) for key in keys),
            run.state,
            *(_show(key, run.figures[key]) for key in shown),
            run.message,
        )
        for run in sort_runs(runs)
    ]
    columns = ("run", *keys.values(), "state", *(NAMES[key] for key in shown), "")
    return ReportTable(title="sweep", columns=columns, rows=rows)


def _show(key: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}" if key in ("last_step", "tokens_per_s") else f"{value:.5g}"


def build_sweep_json(runs: Sequence[SweptRun]) -> list[dict[str, Any]]:
    """Return the runs as JSON, best first; `is_nan` tells a NaN loss from an unknown one."""
    return [
        {
            "name": run.name,
            "state": run.state,
            "message": run.message,
            "swept": dict(run.values),
            **{key: None if _is_nan(value) else value for key, value in run.figures.items()},
            "is_nan": _is_nan(run.figures["last_loss"]),
        }
        for run in sort_runs(runs)
    ]


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def render_sweep(
    name: str, runs: Sequence[SweptRun], keys: Mapping[str, str], *, made_at: str
) -> str:
    """Render the table as a page, with figures over each key that has several values."""
    drawn = {key: draw_key(runs, key, keys) for key in keys}
    figures = {f"key-{at}": figure for at, figure in enumerate(drawn.values()) if figure}
    parts = [
        PagePart(title=f"Over {key}", figure=f"figure-key-{at}")
        for at, key in enumerate(drawn)
        if drawn[key]
    ]
    table = build_sweep_table(runs, keys)
    rows = PagePart(title="Lowest loss first", columns=table.columns, rows=tuple(table.rows))
    page = Page(
        name=name,
        made_at=made_at,
        sections=[("Runs", [rows]), *([("Final figures", parts)] if parts else [])],
        figures=figures,
        compares=True,
    )
    return render(page)


def draw_key(runs: Sequence[SweptRun], key: str, keys: Mapping[str, str]) -> Figure | None:
    """Draw the final figures over one key's values, with a colour for each value of another."""
    known = [run for run in runs if key in run.values and _has_figures(run)]
    values = list(dict.fromkeys(run.values[key] for run in known))
    if len(values) < 2:
        return None
    numbers = read_numbers(values)
    axis = _draw_axis(values, numbers)
    other = _choose_colours(known, key)
    rows = FigureRows()
    named: set[str] = set()
    for name, title in TITLES.items():
        traces = []
        names = dict.fromkeys(run.values.get(other, NOTHING) for run in known)
        for at, value in enumerate(names):
            group = [run for run in known if run.values.get(other, NOTHING) == value]
            label = f"{keys.get(other, other)} {value}" if other else title
            trace = _draw_points(group, key, numbers, name, label, COLOURS[at % len(COLOURS)])
            if trace is not None:
                traces.append({**trace, "showlegend": bool(other) and label not in named})
                named.add(label)
        rows.add(160, title, LEAN, traces)
    if not rows.rows:
        return None
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1.0, "xanchor": "right"}
    return rows.draw({**axis, "title": {"text": plain(key)}}, showlegend=bool(other), legend=legend)


def read_numbers(values: Sequence[str]) -> dict[str, float] | None:
    """Return each value as a number; None if one of them is not a finite number: all are then drawn
    as categories."""
    try:
        numbers = {value: float(value.strip("'\"")) for value in values}
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers.values())) else None


def _draw_axis(values: Sequence[str], numbers: Mapping[str, float] | None) -> Figure:
    """Return an axis with ticks at the values themselves, if they are few enough."""
    if numbers is None:
        return {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [*map(plain, values)],
        }
    least, most = min(numbers.values()), max(numbers.values())
    kind = "log" if least > 0 and most >= MANY * least else "linear"
    axis: Figure = {"type": kind, "zeroline": False}
    if len(numbers) <= MOST_TICKS:
        axis |= {"tickvals": [*numbers.values()], "ticktext": [*map(plain, numbers)]}
    return axis


def _choose_colours(runs: Sequence[SweptRun], key: str) -> str:
    """Return the key for colours: with fewest values, from two to the number of colours, or ""."""
    others = dict.fromkeys(other for run in runs for other in run.values if other != key)
    counts = {other: len({run.values.get(other) for run in runs}) for other in others}
    fitting = {other: count for other, count in counts.items() if 2 <= count <= len(COLOURS)}
    return min(fitting, key=lambda other: fitting[other], default="")


def _has_figures(run: SweptRun) -> bool:
    found = (run.figures[name] for name in TITLES)
    return any(value is not None and math.isfinite(value) for value in found)


def _draw_points(
    runs: Sequence[SweptRun],
    key: str,
    numbers: Mapping[str, float] | None,
    name: str,
    label: str,
    colour: str,
) -> Figure | None:
    """Draw the runs of one colour: connected by a line if no two share a value, else as points."""
    known = [(run, run.figures[name]) for run in runs]
    points = [(run, y) for run, y in known if y is not None and math.isfinite(y)]
    if not points:
        return None
    if numbers is not None:
        points.sort(key=lambda point: numbers[point[0].values[key]])
    x = [run.values[key] for run, _ in points]
    is_line = numbers is not None and len(set(x)) == len(x) > 1
    hover_texts = [
        [plain(run.name), plain(", ".join(f"{k} = {v}" for k, v in run.values.items()))]
        for run, _ in points
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers" if is_line else "markers",
        "x": [plain(value) if numbers is None else numbers[value] for value in x],
        "y": [float(f"{y:.6g}") for _, y in points],
        "customdata": hover_texts,
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 8},
        "name": plain(label),
        "hovertemplate": "%{customdata[0]}: %{y:.5g}<br>%{customdata[1]}<extra></extra>",
    }
