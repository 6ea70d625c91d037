"""Several jobs side by side: their figures, and where their confs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from reports.analysis import Analysis
from reports.load import Job

Better = Literal["less", "more", ""]
MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One job: what it is called in the table, what was found, what was asked."""

    label: str
    job: Job
    analysis: Analysis
    conf: Mapping[str, Any]
    """The resolved conf; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of each job."""

    name: str
    values: tuple[float | None, ...]
    digits: int
    better: Better = ""

    def ratio(self, place: int) -> float | None:
        """Over the first job's, where both are there."""
        base, value = self.values[0], self.values[place]
        return None if value is None or not base else value / base


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key of the conf that is not the same in all jobs; None where it is absent."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The first job is what the others are held against."""

    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]


def compare(jobs: Sequence[Compared]) -> Comparison:
    """Figures that no job has are left out."""
    common = max(
        set.intersection(*(set(_find_losses(each)["step"]) for each in jobs)), default=None
    )
    measured: list[tuple[str, int, Better, Callable[[Compared], float | None]]] = [
        ("steps", 0, "", _count_steps),
        ("step time, s (median)", 4, "less", _find_step_time),
        ("step time, s (slowest)", 4, "less", _find_slowest),
        ("idle in the pipeline, %", 1, "less", _find_bubble),
        ("exposed communication, s a step", 4, "less", _find_exposed),
        ("useful time, %", 1, "more", _find_goodput),
        ("attempts", 0, "less", lambda each: float(len(each.analysis.goodput.attempts))),
        ("most memory, MB", 0, "less", _find_memory),
        ("last loss", 4, "less", lambda each: _find_loss(each, None)),
    ]
    if common is not None:
        name = f"loss at step {common}"
        measured.append((name, 4, "less", lambda each: _find_loss(each, common)))
    rows = [
        Row(name=name, digits=digits, better=better, values=tuple(map(find, jobs)))
        for name, digits, better, find in measured
    ]
    return Comparison(
        labels=_tell_apart([each.label for each in jobs]),
        rows=tuple(row for row in rows if any(value is not None for value in row.values)),
        differences=tuple(find_differences([each.conf for each in jobs])),
    )


def _tell_apart(labels: Sequence[str]) -> tuple[str, ...]:
    twice = {label for label in labels if labels.count(label) > 1}
    return tuple(
        f"{label} ({number})" if label in twice else label
        for number, label in enumerate(labels, start=1)
    )


def _later_times(each: Compared) -> pd.DataFrame:
    """An attempt's first step warms up: it is no measure where there are others."""
    times = each.analysis.times
    later = times[times.duplicated("attempt")]
    return later if len(later) else times


def _count_steps(each: Compared) -> float | None:
    times = each.analysis.times
    return float(times["count"].sum()) if len(times) else None


def _find_step_time(each: Compared) -> float | None:
    times = _later_times(each)
    return float(times["took_s"].median()) if len(times) else None


def _find_slowest(each: Compared) -> float | None:
    times = _later_times(each)
    return float(times["took_s"].max()) if len(times) else None


def _find_bubble(each: Compared) -> float | None:
    bubbles = each.analysis.bubbles
    return 100 * float(bubbles["bubble_share"].median()) if len(bubbles) else None


def _find_exposed(each: Compared) -> float | None:
    """Of all ranks' in the median step, their mean."""
    step = each.analysis.find_step("median")
    if step is None or step.communication.empty:
        return None
    return float(step.communication.groupby("rank")["exposed_s"].sum().mean())


def _find_goodput(each: Compared) -> float | None:
    share = each.analysis.goodput.share
    return None if share is None else 100 * share


def _find_memory(each: Compared) -> float | None:
    most = each.analysis.memory["used_mb"].dropna()
    return float(most.max()) if len(most) else None


def _find_losses(each: Compared) -> pd.DataFrame:
    table = each.analysis.curves.table
    numbers = pd.to_numeric(table["loss"], errors="coerce")
    held = table.assign(loss=numbers).dropna(subset=["loss"])
    return held.drop_duplicates("step", keep="last").sort_values("step")


def _find_loss(each: Compared, step: int | None) -> float | None:
    losses = _find_losses(each)
    if step is not None:
        losses = losses[losses["step"] == step]
    return float(losses["loss"].iloc[-1]) if len(losses) else None


def find_differences(confs: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """Key by key, in the order of the first conf that has them."""
    flat = [dict(_flatten(conf, "")) for conf in confs]
    for key in dict.fromkeys(key for each in flat for key in each):
        values = tuple(each.get(key) for each in flat)
        if len(set(values)) > 1:
            yield Difference(key=key, values=values)


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, (Mapping, list)) for inner in value):
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{key}[{number}]")
    elif key:
        yield key, str(value)


def render_comparison(comparison: Comparison) -> str:
    """For a terminal: figures with their ratio to the first job's, then the confs."""
    lines = _render_columns(
        [["", *comparison.labels], *(_show_row(row) for row in comparison.rows)], right=True
    )
    if comparison.differences:
        shown = [
            [each.key, *(MISSING if value is None else value for value in each.values)]
            for each in comparison.differences
        ]
        lines += ["", "WHERE THE CONFS DIFFER"]
        lines += _render_columns([["", *comparison.labels], *shown], right=False)
    return "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in lines)


def _show_row(row: Row) -> list[str]:
    cells = [row.name]
    for place, value in enumerate(row.values):
        shown = MISSING if value is None else f"{value:.{row.digits}f}"
        ratio = row.ratio(place)
        if place and ratio is not None and row.better:
            shown += f" ({ratio:.2f}x)"
        cells.append(shown)
    return cells


def _render_columns(rows: Sequence[Sequence[str]], *, right: bool) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (
            f"{cell:>{width}}" if right and place else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([f"  {first}", *others]).rstrip())
    return lines


def as_json(comparison: Comparison) -> dict[str, Any]:
    """For scripts."""
    return {
        "jobs": list(comparison.labels),
        "figures": {row.name: list(row.values) for row in comparison.rows},
        "conf": {each.key: list(each.values) for each in comparison.differences},
    }
