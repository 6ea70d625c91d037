"""Render one HTML file that opens anywhere without a network: a template with its style and
scripts.

Findings and tables are plain HTML. The data of the figures is embedded, deflated and in base64. A
script of the page draws ordinary figures; plotly, two megabytes, is embedded only where a figure
needs it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from varuna_core import __version__
from vjob.reports.analysis.findings import Finding
from vjob.reports.analysis.headline import Fact
from vjob.reports.page.document import fill, read_scripts
from vjob.reports.page.figure import needs_plotly
from vjob.reports.page.sections import ReportTable, shorten

LEVEL = 6


def pack_bytes(data: bytes) -> str:
    """Compress bytes to the text form that reports/web/unpack.js reads."""
    return base64.b64encode(zlib.compress(data, LEVEL)).decode("ascii")


def pack_json(value: Any) -> str:
    return pack_bytes(_write_json(value))


def list_planes(column: npt.NDArray[Any]) -> bytes:
    """Return 32-bit numbers as byte planes, lowest byte first; values out of range are clipped."""
    bounds = np.iinfo(np.int32)
    whole = np.clip(column, bounds.min, bounds.max).astype("<i4")
    planes: bytes = whole.view(np.uint8).reshape(-1, 4).T.tobytes()
    return planes


SCRIPTS = (
    *("theme.js", "unpack.js", "view.js", "steps.js", "raster.js", "painter.js", "timeline.js"),
    *("chart.js", "page.js"),
)
MOST_ROWS = 30
"""Rows of a table on the page; an export has all."""


@dataclass(frozen=True, kw_only=True)
class PagePart:
    """A figure or a table of a section, as the template receives it."""

    title: str
    figure: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    width: str = "whole"


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """One class in the bar of all ranks' time."""

    name: str
    share: float
    meaning: str
    value: str
    """The share and time of the class, formatted for people."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page, from top to bottom."""

    name: str
    made_at: str
    is_partial: bool = False
    opening: str = ""
    """One sentence on how the run went and what to change."""
    facts: Sequence[Fact] = ()
    """The figures at the top of the page."""
    bar: Sequence[BarPart] = ()
    bar_note: str = ""
    findings: Sequence[Finding] = ()
    has_timeline: bool = False
    is_own_program: bool = False
    """True for a user's script, on which the conf's keys for a timeline have no effect."""
    sections: Sequence[tuple[str, Sequence[PagePart]]]
    """(title, parts) of each section."""
    conf: str = ""
    figures: dict[str, Any]
    """plotly figures, by the names that parts refer to."""
    compares: bool = False
    """True for a page about several runs, whose figures plotly draws: their lines are many, and one
    zooms into both axes and isolates a run by its name."""
    timeline: dict[str, Any] | None = None
    """Data about the steps that page.js needs."""
    steps: Sequence[str] = ()
    """Packed steps, in the order of the timeline."""


def render(page: Page) -> str:
    """Render the page as one HTML file."""
    figures: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for name, figure in page.figures.items():
        figures[page.compares or needs_plotly(figure)][f"figure-{name}"] = figure
    model = {**(page.timeline or {"steps": []}), "charts": figures[False], "figures": figures[True]}
    return _render(
        page,
        model=pack_json(model),
        plotly=_pack_plotly() if figures[True] else "",
        script=Markup(read_scripts(SCRIPTS)),
    )


@cache
def _pack_plotly() -> str:
    return pack_bytes(get_plotlyjs().encode())


def _render(page: Page, **values: Any) -> str:
    sections = [
        (f"section-{title.split()[-1].lower()}", title, parts) for title, parts in page.sections
    ]
    names = [
        *([("time", "Time")] if page.bar else []),
        *([("findings", "Findings")] if page.findings else []),
        *([("timeline", "Timeline")] if page.has_timeline else []),
        *((id_, title) for id_, title, _ in sections),
        *([("conf", "Conf")] if page.conf else []),
    ]
    return fill(
        "report.html.j2",
        page=page,
        version=__version__,
        contents=names,
        sections=sections,
        **values,
    )


def _write_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def show_table(table: ReportTable, width: str = "whole", note: str = "") -> PagePart:
    """Return a table as a part of the page, shortened if it is long."""
    rows, left_out = shorten(table.rows, MOST_ROWS)
    if left_out:
        blank = ("",) * (len(table.columns) - 1)
        rows.insert(MOST_ROWS // 2, (f"... {left_out} more", *blank))
    columns = table.columns if any(table.columns) else ()
    return PagePart(
        title=table.title.capitalize(), columns=columns, rows=tuple(rows), note=note, width=width
    )
