"""Build the page of one job: figures of stages, training and timers, and the layout of its
parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.records.files import read_text
from varuna_core.records.formatting import format_duration
from varuna_core.records.secrets import withhold
from vjob.reports.analysis.accounting import Accounting, describe_class, format_least
from vjob.reports.analysis.findings import OWN_PROGRAMS, Finding
from vjob.reports.analysis.headline import list_facts
from vjob.reports.analysis.measures import Analysis
from vjob.reports.analysis.opening import write_opening
from vjob.reports.load.tables import Job
from vjob.reports.page.figure import (
    BLUE,
    CIVIDIS,
    GREEN,
    GREY,
    LEAN,
    MOST_TICKS,
    ORANGE,
    PINK,
    RED,
    Figure,
    FigureRows,
    draw,
    draw_lines,
    list_cells,
    plain,
    round_all,
    thin,
)
from vjob.reports.page.html import BarPart, Page, PagePart, render, show_table
from vjob.reports.page.run_figure import draw_run
from vjob.reports.page.sections import ReportTable, build_sections, explain_time
from vjob.reports.page.timeline import build_lanes, build_steps

MARGIN = {"l": 70, "r": 20, "t": 50, "b": 50}
"""Margins of a figure, with room for the legend above."""


def draw_stages(job: Job, analysis: Analysis) -> Figure | None:
    if analysis.paces is None:
        return None
    works = analysis.paces.work_s
    stages = [f"stage {stage}" for stage in range(len(works))]
    most = max(works)
    colours = [RED if work == most and len(stages) > 1 else BLUE for work in works]
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": stages,
            "x": round_all(np.array(works)),
            "marker": {"color": colours},
            "name": "work of a step",
            "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>",
        }
    ]
    promised = job.plan.prediction.stage_s if job.plan.prediction is not None else ()
    if len(promised) == len(stages):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "y": stages,
                "x": round_all(np.array(promised)),
                "marker": {
                    "symbol": "line-ns-open",
                    "size": 18,
                    "color": GREY,
                    "line": {"width": 3},
                },
                "name": "predicted by the plan",
                "hovertemplate": "%{y}: %{x:.4g} s promised<extra></extra>",
            }
        )
    return draw(
        data,
        height=int(np.clip(26 * len(stages), 90, 900)) + 100,
        margin=MARGIN,
        xaxis={
            "title": {"text": f"work, median of {analysis.paces.num_steps} steps, s"},
            "rangemode": "tozero",
        },
        yaxis={"autorange": "reversed", "nticks": MOST_TICKS},
        showlegend=len(data) > 1,
    )


def draw_shares(analysis: Analysis) -> Figure | None:
    """Draw the time of a step by stage, as the mean over the stage's ranks."""
    step = analysis.find_step("median")
    if step is None or step.communication.empty:
        return None
    times = analysis.times
    took = times[(times["attempt"] == step.attempt) & (times["step"] == step.step)]["took_s"].max()
    means = step.communication.groupby("stage")[["work_s", "bubble_s", "exposed_s"]].mean()
    rest = (float(took) - means.sum(axis=1)).clip(lower=0) if took == took else 0 * means["work_s"]
    parts = [
        ("work", means["work_s"], BLUE),
        ("waiting for work of other ranks", means["bubble_s"], ORANGE),
        ("communication it waits for", means["exposed_s"], PINK),
        ("the rest of the step", rest, GREY),
    ]
    stages = [f"stage {stage}" for stage in means.index]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": stages,
            "x": round_all(values.to_numpy(dtype=float)),
            "name": name,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: {name} %{{x:.4g}} s<extra></extra>",
        }
        for name, values, colour in parts
    ]
    return draw(
        data,
        height=int(np.clip(26 * len(stages), 90, 900)) + 100,
        margin=MARGIN,
        barmode="stack",
        xaxis={"title": {"text": f"step {step.step}, s"}},
        yaxis={"autorange": "reversed", "nticks": MOST_TICKS},
        showlegend=True,
    )


LEAST_SMOOTHED = 100
"""The number of points from which a running mean of the loss is drawn."""
LOG_BUTTONS: Figure = {
    "type": "buttons",
    "direction": "left",
    "showactive": True,
    "x": 1.0,
    "xanchor": "right",
    "y": 1.0,
    "yanchor": "bottom",
    "pad": {"b": 4},
    "buttons": [
        {"label": kind, "method": "relayout", "args": [{"yaxis.type": kind}]}
        for kind in ("linear", "log")
    ],
}
"""Buttons for the scale of the first row's axis, which shows the loss if there is one."""


def draw_training(analysis: Analysis) -> Figure | None:
    """Draw the curves of the training log by step, with all attempts in one chart."""
    table = analysis.curves.table
    rows = FigureRows()
    losses = [*_draw_losses(table), *_draw_evaluations(analysis)]
    rows.add(200, "loss", LEAN, losses)
    names = (
        ("grad_norm", "gradient norm", BLUE),
        ("loss_scale", "loss scale", GREY),
        ("learning_rate", "learning rate", PINK),
    )
    for name, title, colour in names:
        if name != "loss_scale" or table[name].nunique() > 1:
            lines = draw_lines(table, name, title, colour)
            rows.add(110, title, LEAN, [{**line, "showlegend": False} for line in lines])
    if not rows.rows:
        return None
    buttons: Figure = {"updatemenus": [LOG_BUTTONS]} if losses else {}
    several = len({line["name"] for line in losses}) > 1
    axis = {"title": {"text": "step"}, "zeroline": False}
    return rows.draw(axis, showlegend=several, **buttons)


def _draw_losses(table: pd.DataFrame) -> list[Figure]:
    """Draw the loss of each attempt by step. From LEAST_SMOOTHED lines on, the loss is drawn
    fainter, with its running mean on top."""
    lines = draw_lines(table, "loss", "loss", GREEN)
    width = 2 * (len(table) // LEAST_SMOOTHED) + 3
    if len(table) < LEAST_SMOOTHED:
        return lines
    losses = pd.to_numeric(table["loss"], errors="coerce").groupby(table["attempt"], sort=False)
    means = losses.transform(lambda own: own.rolling(width, center=True, min_periods=1).mean())
    smoothed = draw_lines(table.assign(mean=means), "mean", f"loss, mean of {width} lines", RED)
    return [*({**line, "opacity": 0.45} for line in lines), *smoothed]


def _draw_evaluations(analysis: Analysis) -> list[Figure]:
    """Draw the losses of evaluations under their own names."""
    return [
        line | {"name": f"{split} {metric}"}
        for split, metric, rows in analysis.curves.list_evaluated()
        if "loss" in metric
        for line in draw_lines(
            rows.dropna(subset=["step"]), "value", plain(f"{split} {metric}"), PINK
        )
    ]


def draw_timers(job: Job) -> Figure | None:
    """Draw Megatron's timers for each rank: the mean of all logged steps."""
    table = job.logs["timers_by_rank"]
    if table.empty:
        return None
    means = table.assign(mean_ms=table["sum_ms"] / table["count"])
    wide = means.pivot_table(index="timer", columns="rank", values="mean_ms").sort_index()
    wide = wide.loc[wide.sum(axis=1).sort_values(ascending=False).index][:MOST_TICKS]
    values = np.round(wide.to_numpy(dtype=float), 3)
    data = {
        "type": "heatmap",
        "z": list_cells(values),
        **_place_ranks([int(rank) for rank in wide.columns]),
        "y": [plain(timer) for timer in wide.index],
        "colorscale": CIVIDIS,
        "colorbar": {"thickness": 10, "ticksuffix": " ms", "tickfont": {"size": 10}},
        "hovertemplate": "rank %{x}, %{y}: %{z:.4g} ms<extra></extra>",
    }
    return draw(
        [data],
        height=22 * len(wide) + 80,
        margin={"l": 260, "r": 90, "t": 10, "b": 44},
        xaxis={"title": {"text": "rank"}},
        yaxis={"autorange": "reversed"},
    )


def _place_ranks(ranks: list[int]) -> Figure:
    """Return the horizontal places of the columns in plotly's form: first and distance if the ranks
    are consecutive, else all ranks."""
    is_whole = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    return {"x0": ranks[0], "dx": 1} if is_whole else {"x": ranks}


MOST_LINES = 64
"""The most GPUs or ranks with a line of their own, chosen by the highest memory."""
MOST_NAMED = 12
"""The most GPUs or ranks that are named above the chart."""


def draw_memory(job: Job) -> Figure | None:
    """Draw memory over time: of GPUs by their samples, or of ranks by Megatron's lines."""
    gpus = job.gpus[job.gpus["gpu"] != "cpu"] if len(job.gpus) else job.gpus
    if len(gpus):
        table = gpus.dropna(subset=["time", "memory_used_mb"]).sort_values("time", kind="stable")
        keys, x, y, axis = ["node", "gpu"], "time", "memory_used_mb", "minutes"
        names = "{} GPU {}"
    else:
        table = job.logs["memory"]
        if len(table):
            figures = table[["max_reserved", "reserved", "max_allocated"]].astype(float)
            table = table.assign(used=figures.bfill(axis=1).iloc[:, 0]).dropna(subset=["used"])
        keys, x, y, axis = ["attempt", "rank"], "step", "used", "step"
        names = "attempt {} rank {}" if len(job.sources.attempts) > 1 else "{}rank {}"
    if table.empty or (table.groupby(keys).size() == 1).all():
        return None  # the table says as much
    most = table.groupby(keys)[y].max().nlargest(MOST_LINES).index
    zero = float(table[x].min()) if axis == "minutes" else 0.0
    lines: list[Figure] = []
    for number, (key, own) in enumerate(table.groupby(keys)):
        if key not in most:
            continue
        values = own[y].to_numpy(dtype=float)
        kept = thin(values)
        places = own[x].to_numpy(dtype=float)[kept]
        first = key[0] if axis == "minutes" or len(job.sources.attempts) > 1 else ""
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(kept) < 50 else "lines",
                "x": round_all((places - zero) / 60 if axis == "minutes" else places),
                "y": round_all(values[kept] / 1024),
                "name": plain(names.format(first, key[1])),
                "line": {"width": 1.5, "color": (BLUE, ORANGE, GREEN, RED, PINK)[number % 5]},
                "hovertemplate": "%{fullData.name}: %{y:.4g} GiB<extra></extra>",
            }
        )
    rows = FigureRows()
    rows.add(160, "memory in use, GiB", {**LEAN, "rangemode": "tozero"}, lines)
    title = "minutes since the first sample" if axis == "minutes" else "step"
    showlegend = 1 < len(lines) <= MOST_NAMED
    return rows.draw({"title": {"text": title}, "zeroline": False}, showlegend=showlegend)


MOST_CONF = 200_000
"""Characters of the conf that a page holds."""
MOST_FAILURES = 3
"""The most failed steps with a button of their own; the selector lists all."""
SECTIONS = {
    "The run": (
        ("figure", "run", "whole", "From start to end"),
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
        (
            "figure",
            "memory",
            "whole",
            "Memory of each GPU, or of each rank from its log",
        ),
        ("table", "attempts", "whole", ""),
        ("table", "morphs", "whole", ""),
        ("table", "failed ranks", "whole", ""),
        ("table", "nodes", "whole", ""),
        ("table", "not read", "whole", ""),
    ),
}
"""The parts of each section: kind, name (of a figure, or a table's title), width, and the caption
of a figure."""


def render_page(
    job: Job,
    analysis: Analysis,
    findings: list[Finding],
    *,
    is_partial: bool,
    made_at: str,
) -> str:
    """Render the page of a job as an HTML file."""
    page = build_page(job, analysis, findings, is_partial=is_partial, made_at=made_at)
    return render(page)


def build_page(
    job: Job,
    analysis: Analysis,
    findings: list[Finding],
    *,
    is_partial: bool,
    made_at: str,
) -> Page:
    """Build the content of a job's page, for a file or for a live page."""
    figures = _draw_figures(job, analysis)
    lanes = build_lanes(job, analysis)
    steps = build_steps(job, lanes)
    presets, failures = _name_steps(job)
    timeline = {
        "lanes": lanes,
        "steps": [{**step.facts, **_find_extras(analysis, presets, step.facts)} for step in steps],
        "presets": [*job.chosen, *failures[-MOST_FAILURES:]],
        "shown": _choose_shown(job, [step.facts for step in steps]),
    }
    return Page(
        name=job.sources.name,
        made_at=made_at,
        is_partial=is_partial,
        opening=write_opening(job, analysis, findings),
        facts=list(list_facts(analysis.headline)),
        bar=list_bar(analysis.accounting),
        bar_note=explain_time(analysis.accounting, is_partial=is_partial),
        findings=findings,
        has_timeline=True,
        is_own_program=job.plan.program in OWN_PROGRAMS,
        sections=list(_list_sections(figures, build_sections(job, analysis), analysis)),
        conf=_read_conf(job),
        figures=figures,
        timeline=timeline,
        steps=[step.packed for step in steps],
    )


def list_bar(accounting: Accounting) -> list[BarPart]:
    """Return the classes of time as parts of a bar, scaled so that together they fill its width."""
    shares = accounting.shares
    whole = sum(shares.values()) or 1.0
    return [
        BarPart(
            name=name,
            share=share / whole,
            meaning=describe_class(accounting, name),
            value=f"{format_least(accounting, name)}, {format_duration(accounting.seconds[name])}",
        )
        for name, share in shares.items()
    ]


def _draw_figures(job: Job, analysis: Analysis) -> dict[str, Any]:
    """Draw all figures for which there is data."""
    found = {
        "run": draw_run(job, analysis),
        "stages": draw_stages(job, analysis),
        "shares": draw_shares(analysis),
        "training": draw_training(analysis),
        "timers": draw_timers(job),
        "memory": draw_memory(job),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _list_sections(
    figures: dict[str, Any], tables: list[ReportTable], analysis: Analysis
) -> Iterator[tuple[str, list[PagePart]]]:
    """Yield (title, parts) of the sections that have any."""
    by_title = {table.title: table for table in tables}
    for title, places in SECTIONS.items():
        parts = []
        for what, name, width, caption in places:
            if what == "figure" and name in figures:
                parts.append(PagePart(title=caption, figure=f"figure-{name}", width=width))
            elif what == "table" and name in by_title:
                suggestion = analysis.suggestion if name == "stages" else None
                note = f"suggested partition: {suggestion}" if suggestion is not None else ""
                parts.append(show_table(by_title[name], width, note))
        if parts:
            yield title, parts


def _name_steps(job: Job) -> tuple[dict[tuple[str, int], list[str]], list[str]]:
    """Return the names of steps in the selector, shown beside their numbers, and those of them that
    stand for failures."""
    found: dict[tuple[str, int], list[str]] = {}
    failures = []
    for name, pair in job.chosen.items():
        found.setdefault(pair, []).append(name)
    failed = set(job.exits[job.exits["code"] != 0]["attempt"])
    last = job.events.groupby("attempt")["step"].max()
    for attempt in last.index.intersection(sorted(failed)):
        which = f"the failure of attempt {attempt}" if len(failed) > 1 else "the failure"
        failures.append(f"last before {which}")
        found.setdefault((attempt, int(last[attempt])), []).append(failures[-1])
    return found, failures


def _find_extras(
    analysis: Analysis, names: dict[tuple[str, int], list[str]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the names of a step, and its critical path if it was computed."""
    key = (facts["attempt"], facts["step"])
    paths = [step.path for step in analysis.steps if (step.attempt, step.step) == key]
    path = [[p.rank, p.action] for p in paths[0] if p.what == "work"] if paths else []
    return {"names": names.get(key, []), **({"path": path} if path else {})}


def _choose_shown(job: Job, steps: list[dict[str, Any]]) -> int:
    """Choose the step shown first: the median, which is typical of the job."""
    for number, facts in enumerate(steps):
        if (facts["attempt"], facts["step"]) == job.chosen.get("median"):
            return number
    return 0


def _read_conf(job: Job) -> str:
    if job.sources.run is None:
        return ""
    try:
        text = read_text(job.sources.run.resolved, "replace")
    except OSError:
        return ""
    if len(text) > MOST_CONF:
        text = text[:MOST_CONF].rpartition("\n")[0]  # half a secret may not be known as one
    return withhold(text)
