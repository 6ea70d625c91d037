"""The page of one job: which figure and table stands where, and what the timeline holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vjob.reports.analysis.finding import Finding
from vjob.reports.analysis.measures import Analysis
from vjob.reports.load.tables import Job
from vjob.reports.page.html import Page, Part, render, show_table
from vjob.reports.page.run_figure import draw_run
from vjob.reports.page.sections import Table, build_sections
from vjob.reports.page.stage_figures import draw_shares, draw_stages, draw_timers, draw_training
from vjob.reports.page.timeline import build_lanes, build_steps

MOST_CONF = 200_000
MOST_FAILURES = 3
"""That have a button of their own; the selector names all."""

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
        ("table", "morphs", "whole", ""),
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
    presets = _name_steps(job)
    timeline = {
        "lanes": lanes,
        "steps": [{**step.facts, **_find_extras(analysis, presets, step.facts)} for step in steps],
        "presets": [*job.chosen, *_list_failures(presets)[-MOST_FAILURES:]],
        "shown": _choose_shown(job, [step.facts for step in steps]),
    }
    page = Page(
        name=job.sources.name,
        made_at=made_at,
        is_partial=is_partial,
        findings=findings,
        has_timeline=True,
        sections=list(_list_sections(figures, build_sections(job, analysis), analysis)),
        conf=_read_conf(job),
        figures=figures,
        timeline=timeline,
        steps=[step.packed for step in steps],
    )
    return render(page, cdn=cdn)


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
) -> Iterator[tuple[str, list[Part]]]:
    """(title, parts) of those that have any."""
    by_title = {table.title: table for table in tables}
    for title, places in SECTIONS.items():
        parts = []
        for what, name, width, caption in places:
            if what == "figure" and name in figures:
                parts.append(Part(title=caption, figure=f"figure-{name}", width=width))
            elif what == "table" and name in by_title:
                suggestion = analysis.suggestion if name == "stages" else None
                note = f"suggested partition: {suggestion}" if suggestion is not None else ""
                parts.append(show_table(by_title[name], width, note))
        if parts:
            yield title, parts


def _name_steps(job: Job) -> dict[tuple[str, int], list[str]]:
    """What the selector calls a step, beside its number."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, pair in job.chosen.items():
        found.setdefault(pair, []).append(name)
    failed = set(job.exits[job.exits["code"] != 0]["attempt"])
    last = job.events.groupby("attempt")["step"].max()
    for attempt in last.index.intersection(sorted(failed)):
        which = f"the failure of attempt {attempt}" if len(failed) > 1 else "the failure"
        found.setdefault((attempt, int(last[attempt])), []).append(f"last before {which}")
    return found


def _list_failures(names: dict[tuple[str, int], list[str]]) -> list[str]:
    return [name for own in names.values() for name in own if name.startswith("last before")]


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
