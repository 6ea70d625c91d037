"""Building blocks of the page's figures: plotly's JSON as plain dicts.

Axes and texts take their colours from the page's style sheet, which has light, dark and print
modes. Data has the same colours in all three, from a palette for the colour-blind. Texts of users
are escaped, since plotly would interpret tags.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PINK, GREY = "#cc79a7", "#8a8f98"
MOST_POINTS = 1500
MOST_TICKS = 24
MOST_STRIPS = 64
ROW_GAP = 30
"""Pixels above a row, for its title."""

Figure = dict[str, Any]

CIVIDIS = ((0, "#00224e"), (0.25, "#434e6c"), (0.5, "#7d7c78"), (0.75, "#bcae6c"), (1, "#fee838"))
BLUE_TO_RED = ((0, "#2166ac"), (0.5, "#f2f2f2"), (1, "#b2182b"))
"""Colours of heat maps, at shares of their scale."""

LEAN: Figure = {"zeroline": False, "nticks": 5}
"""Settings of an axis of a low row."""


def plain(text: object) -> str:
    """Escape text so that plotly shows its tags literally."""
    return html.escape(str(text)[:200], quote=False)


def draw(data: list[Figure], **layout: Any) -> Figure:
    return {
        "data": data,
        "layout": {
            "font": {"size": 12},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 150, "r": 90, "t": 10, "b": 44},
            "hoverlabel": {"align": "left"},
            "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
            "showlegend": False,
            **layout,
        },
    }


def needs_plotly(figure: Figure) -> bool:
    """Return True if only plotly can draw the figure: a heat map with more than MOST_STRIPS rows,
    or with columns of unequal width."""
    maps = [trace for trace in figure["data"] if trace["type"] == "heatmap"]
    return any("x0" not in one or len(one["z"]) > MOST_STRIPS for one in maps)


def thin(y: Matrix) -> npt.NDArray[np.int64]:
    """Return the rows to draw: the least and greatest in each piece of a series, to keep peaks."""
    known = np.flatnonzero(~np.isnan(y))
    if len(known) <= MOST_POINTS:
        return known
    kept = [known[0], known[-1]]
    for piece in np.array_split(known, MOST_POINTS // 2):
        kept += [piece[y[piece].argmin()], piece[y[piece].argmax()]]
    return np.unique(np.array(kept))


class FigureRows:
    """Charts stacked on one shared axis, each under its title; heights are in pixels."""

    def __init__(self) -> None:
        self.data: list[Figure] = []
        self.rows: list[tuple[int, str, Figure]] = []

    def add(self, height: int, title: str, axis: Figure, traces: list[Figure]) -> None:
        """Add a chart, unless there are no traces."""
        if not traces:
            return
        self.rows.append((height, title, axis))
        name = _name_axis(len(self.rows))
        self.data += [{**trace, "xaxis": "x", "yaxis": name} for trace in traces]

    def draw(self, xaxis: Figure, **layout: Any) -> Figure:
        total = sum(height + ROW_GAP for height, _, _ in self.rows)
        axes: Figure = {}
        titles: list[Figure] = []
        top = total - ROW_GAP
        for number, (height, title, axis) in enumerate(self.rows, start=1):
            low, high = (top - height) / (total - ROW_GAP), top / (total - ROW_GAP)
            name = _name_axis(number)
            axes[name.replace("y", "yaxis")] = {**axis, "domain": [max(0.0, low), high]}
            titles.append(_write_title(title, high))
            for trace in self.data:
                if trace["yaxis"] == name and "colorbar" in trace:
                    place = {
                        "y": high,
                        "yanchor": "top",
                        "lenmode": "pixels",
                        "len": max(height, 74),
                    }
                    trace["colorbar"] = {**trace["colorbar"], **place}
            top -= height + ROW_GAP
        xaxis = {**xaxis, "anchor": _name_axis(len(self.rows))}
        margin = {"l": 150, "r": 90, "t": ROW_GAP, "b": 44}
        height = total + margin["b"]
        return draw(
            self.data,
            height=height,
            margin=margin,
            xaxis=xaxis,
            annotations=titles,
            **axes,
            **layout,
        )


def _name_axis(number: int) -> str:
    return f"y{number}" if number > 1 else "y"


def _write_title(title: str, y: float) -> Figure:
    return {
        "text": f"<b>{title}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": y,
        "xanchor": "left",
        "yanchor": "bottom",
        "yshift": 3,
        "showarrow": False,
    }


def draw_lines(
    table: pd.DataFrame,
    name: str,
    title: str,
    colour: str,
    *,
    place: Callable[[str, Matrix], Matrix] = lambda attempt, steps: steps,
    times: float = 1.0,
) -> list[Figure]:
    """Draw a column over the steps, a line for each attempt; `place` maps steps to the axis."""
    lines = []
    for label, own in table.groupby("attempt", sort=False):
        attempt, steps = str(label), own["step"].to_numpy(dtype=float)
        x = place(attempt, steps)
        y = pd.to_numeric(own[name], errors="coerce").to_numpy(dtype=float) * times
        kept = thin(np.where(np.isfinite(x) & np.isfinite(y), y, np.nan))
        if len(kept):
            lines.append(_draw_line(x[kept], y[kept], steps[kept], attempt, title, colour))
    return lines


def _draw_line(
    x: Matrix, y: Matrix, steps: Matrix, attempt: str, title: str, colour: str
) -> Figure:
    of = " of attempt %{customdata[0]}" if attempt else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < 200 else "lines",
        "x": round_all(x),
        "y": round_all(y),
        "customdata": [[attempt, int(step)] for step in steps],
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 5},
        "name": title,
        "legendgroup": title,
        "hovertemplate": f"step %{{customdata[1]}}{of}: %{{y:.4g}}<extra>{title}</extra>",
    }


def round_all(values: Matrix) -> list[float | None]:
    """Round to six digits, more than can be seen; what is not finite becomes None."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def list_cells(values: Matrix) -> list[list[float | None]]:
    """Return the cells of a heat map; None where a value is not known."""
    return [[cell if cell == cell else None for cell in row] for row in values.tolist()]


Matrix = npt.NDArray[np.float64]
