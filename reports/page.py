"""The report as one HTML file that opens anywhere, without a network.

Findings and tables are plain HTML; what the pictures are drawn from lies beside them, packed
(reports/packing.py), and so does plotly, which is a third of its size so.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from reports.analysis import Analysis
from reports.finding import Finding
from reports.load import Job
from reports.packing import pack_bytes, pack_json
from reports.run_figure import draw_run
from reports.sections import Table, build_sections, shorten
from reports.stage_figures import draw_shares, draw_stages, draw_timers, draw_training
from reports.timeline import build_lanes, build_steps
from varuna_core import __version__

WEB = Path(__file__).parent / "web"
SCRIPTS = ("unpack.js", "steps.js", "raster.js", "timeline.js", "page.js")
MOST_ROWS = 60
MOST_CONF = 200_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """A figure or a table of a section, as the template sees it."""

    title: str
    figure: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    width: str = "whole"


SECTIONS = {
    "The run": (
        ("figure", "run", "whole", "Ranks, steps and GPUs over time"),
        ("table", "steps", "half", ""),
        ("table", "pipeline", "half", ""),
    ),
    "Stages": (
        ("figure", "stages", "half", "Work of each stage; the slowest sets the pace"),
        ("figure", "shares", "half", "Where a step goes"),
        ("table", "stages", "whole", ""),
        ("figure", "timers", "whole", "Megatron's timers, the mean of all logged steps"),
    ),
    "Training": (
        ("figure", "training", "whole", "What the log says"),
        ("table", "training", "whole", ""),
    ),
    "Job": (
        ("table", "job", "half", ""),
        ("table", "memory", "half", ""),
        ("table", "attempts", "whole", ""),
        ("table", "failed ranks", "whole", ""),
        ("table", "nodes", "whole", ""),
        ("table", "not read", "whole", ""),
    ),
}
"""The parts of each section: what it is, its name (of a figure, or a table's title), its width, and
the caption of a figure."""


def render_page(
    job: Job,
    analysis: Analysis,
    findings: list[Finding],
    *,
    is_partial: bool,
    made_at: str,
    cdn: bool,
) -> str:
    """The whole file."""
    figures = _draw_figures(job, analysis)
    lanes = build_lanes(job, analysis)
    steps = build_steps(job, lanes)
    sections = list(_list_sections(figures, build_sections(job, analysis), analysis))
    conf = _read_conf(job)
    names = [("findings", "Findings"), ("timeline", "Timeline")]
    names += [(name, title) for name, title, _ in sections]
    plotly = get_plotlyjs()
    presets = _name_steps(job)
    model = {
        "lanes": lanes,
        "steps": [{**step.facts, **_find_extras(analysis, presets, step.facts)} for step in steps],
        "presets": list(dict.fromkeys(name for own in presets.values() for name in own)),
        "shown": _choose_shown(job, [step.facts for step in steps]),
        "figures": {f"figure-{name}": figure for name, figure in figures.items()},
    }
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            name=job.sources.name,
            made_at=made_at,
            version=__version__,
            is_partial=is_partial,
            contents=[*names, ("conf", "Conf")] if conf else names,
            findings=findings,
            sections=sections,
            conf=conf,
            model=pack_json(model),
            steps=[step.packed for step in steps],
            plotly="" if cdn else pack_bytes(plotly.encode()),
            plotly_url=f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js" if cdn else "",
            plotly_hash=_hash(plotly),
            styles=Markup((WEB / "page.css").read_text(encoding="utf-8")),
            script=Markup("\n".join((WEB / name).read_text(encoding="utf-8") for name in SCRIPTS)),
        )
    )


def _draw_figures(job: Job, analysis: Analysis) -> dict[str, Any]:
    """Those that there is data for."""
    found = {
        "run": draw_run(job, analysis),
        "stages": draw_stages(job, analysis),
        "shares": draw_shares(analysis),
        "training": draw_training(analysis),
        "timers": draw_timers(job),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _list_sections(
    figures: dict[str, Any], tables: list[Table], analysis: Analysis
) -> Iterator[tuple[str, str, list[Part]]]:
    """(id, title, parts) of those that have any."""
    by_title = {table.title: table for table in tables}
    for title, places in SECTIONS.items():
        parts = []
        for what, name, width, caption in places:
            if what == "figure" and name in figures:
                parts.append(Part(title=caption, figure=f"figure-{name}", width=width))
            elif what == "table" and name in by_title:
                parts.append(_show_table(by_title[name], width, analysis))
        if parts:
            yield "section-" + title.split()[-1].lower(), title, parts


def _show_table(table: Table, width: str, analysis: Analysis) -> Part:
    rows, left_out = shorten(table.rows, MOST_ROWS)
    if left_out:
        blank = ("",) * (len(table.columns) - 1)
        rows.insert(MOST_ROWS // 2, (f"... {left_out} more", *blank))
    note = ""
    if table.title == "stages" and analysis.suggestion is not None:
        note = f"suggested partition: {analysis.suggestion}"
    columns = table.columns if any(table.columns) else ()
    return Part(
        title=table.title.capitalize(), columns=columns, rows=tuple(rows), note=note, width=width
    )


def _name_steps(job: Job) -> dict[tuple[str, int], list[str]]:
    """What the selector calls a step, beside its number."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, (attempt, step) in job.chosen.items():
        failed = job.exits[(job.exits["attempt"] == attempt) & (job.exits["code"] != 0)]
        is_end = name == "last" and len(failed)
        found.setdefault((attempt, step), []).append("last before the failure" if is_end else name)
    return found


def _find_extras(
    analysis: Analysis, names: dict[tuple[str, int], list[str]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Names of a step, and its critical path where it was looked for."""
    key = (facts["attempt"], facts["step"])
    paths = [step.path for step in analysis.steps if (step.attempt, step.step) == key]
    path = [[p.rank, p.action] for p in paths[0] if p.what == "work"] if paths else []
    return {"names": names.get(key, []), **({"path": path} if path else {})}


def _choose_shown(job: Job, steps: list[dict[str, Any]]) -> int:
    """The median step is what a job mostly does."""
    for number, facts in enumerate(steps):
        if (facts["attempt"], facts["step"]) == job.chosen.get("median"):
            return number
    return 0


def _read_conf(job: Job) -> str:
    if job.sources.run is None:
        return ""
    try:
        text = job.sources.run.resolved.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text[:MOST_CONF]


def _hash(text: str) -> str:
    """For the browser, which then takes nothing else from the network."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _clean(value: Any) -> Any:
    """Texts of logs without what would not be seen."""
    if (
        isinstance(value, Markup)
        or not isinstance(value, str)
        or (value.isascii() and value.isprintable())
    ):
        return value
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in value)


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("templates", ""),
        undefined=jinja2.StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
