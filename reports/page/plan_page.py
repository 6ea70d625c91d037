"""The page of a plan: cost against time, and the work and memory of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vjob.reports.page.figure import BLUE, GREY, ORANGE, RED, Figure, draw, plain
from vjob.reports.page.html import Page, PagePart, render


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """A whole run by one plan."""

    hours: float
    price: float
    text: str


def render_plan_page(
    *,
    name: str,
    text: str,
    front: Sequence[PlanPoint],
    work_s: Sequence[float],
    idle_s: Sequence[float],
    held_gb: Sequence[float],
    limit_gb: Sequence[float],
    made_at: str,
    cdn: bool,
) -> str:
    """The whole file; `text` is what the terminal shows. No front where there are no prices."""
    figures = {
        "work": _draw_bars([("work", work_s, BLUE), ("idle", idle_s, GREY)], "s a step"),
        "memory": _draw_memory(held_gb, limit_gb),
    }
    parts = [
        PagePart(title="What each stage does in a step", figure="figure-work", width="half"),
        PagePart(title="What a GPU of each stage holds", figure="figure-memory", width="half"),
    ]
    sections: list[tuple[str, list[PagePart]]] = [("Stages", parts)]
    if front:
        figures["front"] = _draw_front(front)
        title = "Cost against time: none of these is both cheaper and faster"
        sections.insert(0, ("Choices", [PagePart(title=title, figure="figure-front")]))
    page = Page(name=name, made_at=made_at, sections=sections, conf=text, figures=figures)
    return render(page, cdn=cdn)


def _draw_front(front: Sequence[PlanPoint]) -> Figure:
    line: Figure = {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"shape": "hv", "color": GREY},
        "marker": {"size": 10, "color": ORANGE},
        "x": [point.hours for point in front],
        "y": [point.price for point in front],
        "text": [plain(point.text) for point in front],
        "hovertemplate": "%{x:.4g} h, %{y:.4g}<br>%{text}<extra></extra>",
    }
    return draw(
        [line],
        height=380,
        xaxis={"title": {"text": "hours of the whole run"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "price of the whole run"}, "rangemode": "tozero"},
    )


def _draw_bars(
    bars: Sequence[tuple[str, Sequence[float], str]], unit: str, more: Sequence[Figure] = ()
) -> Figure:
    data: list[Figure] = [
        {
            "type": "bar",
            "name": name,
            "x": [f"stage {stage}" for stage in range(len(values))],
            "y": list(values),
            "marker": {"color": colour},
        }
        for name, values, colour in bars
    ]
    return draw(
        [*data, *more],
        height=320,
        barmode="stack",
        showlegend=True,
        yaxis={"title": {"text": unit}},
    )


def _draw_memory(held: Sequence[float], limits: Sequence[float]) -> Figure:
    limit: Figure = {
        "type": "scatter",
        "mode": "markers",
        "name": "may be used",
        "x": [f"stage {stage}" for stage in range(len(limits))],
        "y": list(limits),
        "marker": {"symbol": "line-ew-open", "size": 22, "color": RED, "line": {"width": 3}},
    }
    return _draw_bars([("held", held, BLUE)], "GB", [limit])
