"""What the page's figures are made of: plotly's JSON as plain dicts.

Colours of axes and texts come from the page's style sheet, which knows light, dark and print; those
of the data are the same in all three, from a palette that the colour-blind can tell apart. Texts of
users are escaped, since plotly would take tags out of them.
"""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.overview import Matrix

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PINK, GREY = "#cc79a7", "#8a8f98"
MOST_POINTS = 1500
MOST_TICKS = 24

Figure = dict[str, Any]


def plain(text: object) -> str:
    """Text that plotly shows as it is: it would take tags out of it."""
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


def thin(x: Matrix, y: Matrix) -> npt.NDArray[np.int64]:
    """Rows to draw: of each piece of a long series its least and its most, so no peak is lost."""
    known = np.flatnonzero(~np.isnan(y))
    if len(known) <= MOST_POINTS:
        return known
    kept = [known[0], known[-1]]
    for piece in np.array_split(known, MOST_POINTS // 2):
        kept += [piece[y[piece].argmin()], piece[y[piece].argmax()]]
    return np.unique(np.array(kept))


class Rows:
    """Pictures above each other; heights in pixels."""

    def __init__(self, gap: int = 34) -> None:
        self.data: list[Figure] = []
        self.rows: list[tuple[int, Figure]] = []
        self.gap = gap

    def add(self, height: int, axis: Figure, traces: list[Figure]) -> None:
        self.rows.append((height, axis))
        name = f"y{len(self.rows)}" if len(self.rows) > 1 else "y"
        self.data += [{**trace, "xaxis": "x", "yaxis": name} for trace in traces]

    def place(self, data_index: int) -> tuple[float, float]:
        """From where to where a row is, in parts of the height."""
        total = self.height
        top = sum(height + self.gap for height, _ in self.rows[:data_index])
        height = self.rows[data_index][0]
        return 1 - (top + height) / total, 1 - top / total

    @property
    def height(self) -> int:
        return sum(height for height, _ in self.rows) + self.gap * (len(self.rows) - 1)

    def draw(self, xaxis: Figure, **layout: Any) -> Figure:
        axes: Figure = {}
        for at, (_, axis) in enumerate(self.rows):
            low, high = self.place(at)
            axes[f"yaxis{at + 1 if at else ''}"] = {**axis, "domain": [max(0.0, low), high]}
            for trace in self.data:
                if trace["yaxis"] == (f"y{at + 1}" if at else "y") and "colorbar" in trace:
                    bar = {"y": (low + high) / 2, "len": max(high - low, 60 / self.height)}
                    trace["colorbar"] = {**trace["colorbar"], **bar}
        anchor = f"y{len(self.rows)}" if len(self.rows) > 1 else "y"
        height = self.height + 60
        return draw(self.data, height=height, xaxis={**xaxis, "anchor": anchor}, **axes, **layout)


def draw_line(x: Matrix, y: Matrix, steps: Matrix, attempt: str, title: str, colour: str) -> Figure:
    of = f" of attempt {plain(attempt)}" if attempt else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) < 200 else "lines",
        "x": round_all(x),
        "y": round_all(y),
        "customdata": [[attempt, int(step)] for step in steps],
        "line": {"color": colour, "width": 1.5},
        "marker": {"color": colour, "size": 5},
        "name": title,
        "hovertemplate": f"step %{{customdata[1]}}{of}: %{{y:.4g}}<extra>{title}</extra>",
    }


def round_all(values: Matrix) -> list[float | None]:
    """Six digits: more is not seen, and takes room; None where there is no number."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def list_cells(values: Matrix) -> list[list[float | None]]:
    """A heat map's; None where nothing is known."""
    return [[cell if cell == cell else None for cell in row] for row in values.tolist()]
