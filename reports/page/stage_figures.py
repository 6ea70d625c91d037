"""Figures of a step by stages, of the training by steps, and of a log's timers by ranks."""

from __future__ import annotations

import numpy as np

from vjob.reports.analysis.measures import Analysis
from vjob.reports.load.tables import Job
from vjob.reports.page.figure import (
    BLUE,
    GREEN,
    GREY,
    LEAN,
    MOST_TICKS,
    ORANGE,
    PINK,
    RED,
    Figure,
    Rows,
    draw,
    draw_lines,
    list_cells,
    plain,
    round_all,
)

MARGIN = {"l": 70, "r": 20, "t": 50, "b": 50}
"""Above is the legend."""


def draw_stages(job: Job, analysis: Analysis) -> Figure | None:
    step = analysis.find_step("median")
    if step is None or not step.stage_work_s:
        return None
    stages = [f"stage {stage}" for stage in range(len(step.stage_work_s))]
    most = max(step.stage_work_s)
    colours = [RED if work == most and len(stages) > 1 else BLUE for work in step.stage_work_s]
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": stages,
            "x": round_all(np.array(step.stage_work_s)),
            "marker": {"color": colours},
            "name": "work of a step",
            "hovertemplate": "%{y}: %{x:.4g} s<extra></extra>",
        }
    ]
    promised = job.prediction.stage_s if job.prediction is not None else ()
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
                "name": "promised by the plan",
                "hovertemplate": "%{y}: %{x:.4g} s promised<extra></extra>",
            }
        )
    return draw(
        data,
        height=int(np.clip(26 * len(stages), 90, 900)) + 100,
        margin=MARGIN,
        xaxis={"title": {"text": f"work in step {step.step}, s"}, "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "nticks": MOST_TICKS},
        showlegend=len(data) > 1,
    )


def draw_shares(analysis: Analysis) -> Figure | None:
    """Where a step goes, stage by stage: the mean over its ranks."""
    step = analysis.find_step("median")
    if step is None or step.communication.empty:
        return None
    times = analysis.times
    took = times[(times["attempt"] == step.attempt) & (times["step"] == step.step)]["took_s"].max()
    means = step.communication.groupby("stage")[["work_s", "bubble_s", "exposed_s"]].mean()
    rest = (float(took) - means.sum(axis=1)).clip(lower=0) if took == took else 0 * means["work_s"]
    parts = [
        ("work", means["work_s"], BLUE),
        ("waiting for work of others", means["bubble_s"], ORANGE),
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


def draw_training(analysis: Analysis) -> Figure | None:
    """What the log says of the training, step by step, attempts over each other."""
    table = analysis.curves.table
    rows = Rows()
    names = (
        ("loss", "loss", GREEN),
        ("grad_norm", "gradient norm", BLUE),
        ("loss_scale", "loss scale", GREY),
        ("learning_rate", "learning rate", PINK),
    )
    for name, title, colour in names:
        rows.add(110, title, LEAN, draw_lines(table, name, title, colour))
    return rows.draw({"title": {"text": "step"}, "zeroline": False}) if rows.rows else None


def draw_timers(job: Job) -> Figure | None:
    """Megatron's timers, rank by rank: the mean of all logged steps."""
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
        "x": [int(rank) for rank in wide.columns],
        "y": [plain(timer) for timer in wide.index],
        "colorscale": "Cividis",
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
