"""Plots of results as SVG: bars up to a bound, and growth over sizes, both on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.figures import Figure

BLUE, RED, GREY = "#0072b2", "#d55e00", "#8a8f98"
COLOURS = (BLUE, "#e69f00", "#009e73", RED, "#cc79a7", "#56b4e9", GREY)
WIDTH, ROW, LABELS = 900, 20, 470
STYLE = 'font-family="sans-serif" font-size="12"'


def draw_page(width: float, height: float, pieces: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    inside = "\n".join([paper, *pieces])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {STYLE}>\n{inside}\n</svg>\n'


def write_text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"


def draw_line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def draw_bounds(groups: Mapping[str, Sequence[Figure]]) -> str:
    """Each figure as a part of its bound: what goes over the line is missed."""
    least, most = 0.01, 10.0

    def place(reach: float) -> float:
        inside = min(max(reach, least), most)
        return LABELS + (WIDTH - LABELS - 30) * math.log(inside / least) / math.log(most / least)

    pieces, y = [], 30.0
    for title, figures in groups.items():
        y += 8
        pieces.append(f'<g font-weight="bold">{write_text(8, y + 14, title)}</g>')
        y += ROW
        for figure in figures:
            reach = figure.reach(figure.value)
            colour = BLUE if figure.is_met else RED
            name = figure.what if len(figure.what) <= 70 else figure.what[:69] + "…"
            pieces.append(write_text(LABELS - 8, y + 14, name, "end"))
            width = place(reach) - LABELS
            box = f'x="{LABELS}" y="{y + 4:.1f}" width="{width:.1f}" height="{ROW - 8}"'
            pieces.append(f'<rect {box} fill="{colour}" fill-opacity="0.75"/>')
            if figure.spread is not None:
                ends = [place(figure.reach(end)) for end in figure.spread]
                pieces.append(draw_line(ends[0], y + 10, ends[1], y + 10, "#222"))
            y += ROW
    marks = [0.01, 0.1, 1.0, 10.0]
    for mark in marks:
        colour = RED if mark == 1.0 else "#ccc"
        pieces.insert(0, draw_line(place(mark), 26, place(mark), y + 4, colour))
        pieces.append(write_text(place(mark), 20, f"{mark:g}", "middle"))
    pieces.append(write_text(8, 20, "measured, as a part of its bound; over 1 is missed"))
    return draw_page(WIDTH, y + 16, pieces)
