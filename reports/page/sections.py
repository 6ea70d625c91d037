"""Build the report's tables, which the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import pandas as pd

from varuna_core.facts.known import value_of
from varuna_core.records.formatting import (
    format_duration,
    format_seconds,
    format_share,
    join_numbers,
)
from varuna_core.records.record import MORPH_PARTS, read_morph_parts, read_pause_s
from vjob.reports.analysis.accounting import TOLERANCE, Accounting
from vjob.reports.analysis.measures import Analysis, list_ranks
from vjob.reports.analysis.step_times import drop_first
from vjob.reports.load.tables import Job

QUIET = {"loss_scale": 1, "skipped": 0, "nan": 0}
"""Columns of training lines, each with a value that is not worth showing if the column has no
other."""
OF_ONE_RANK = {*(("layout", "single"), ("pipeline", "1"), ("data", "1"), ("tensor", "1"))}
"""Facts of a plan that are not worth showing, since they say only that there is one rank, stage or
replica."""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table as text cells; numbers are aligned to the right."""

    title: str
    columns: tuple[str, ...]
    """Column names; empty for a table of name and value pairs."""
    rows: Sequence[tuple[str, ...]]
    shares: tuple[float, ...] = ()
    """The share of each row, drawn as a bar beside it."""


def build_sections(job: Job, analysis: Analysis) -> list[ReportTable]:
    tables = (
        _list_facts(job, analysis.headline.nodes),
        _list_iterations(job, analysis),
        _list_pipelines(analysis),
        _list_stages(job, analysis),
        _list_training(analysis),
        _list_memory(analysis),
        _list_nodes(job),
        _list_attempts(analysis),
        _list_morphs(job),
        _list_failures(job),
        _list_skipped(job),
    )
    return [_drop_empty(table) for table in tables if table.rows]


def _drop_empty(table: ReportTable) -> ReportTable:
    """Drop the columns in which no row has anything."""
    kept = [at for at, cells in enumerate(zip(*table.rows, strict=True)) if set(cells) - {"", "-"}]
    rows = [tuple(row[at] for at in kept) for row in table.rows]
    return replace(table, columns=tuple(table.columns[at] for at in kept), rows=rows)


def shorten(rows: Sequence[tuple[str, ...]], most: int) -> tuple[list[tuple[str, ...]], int]:
    """Return a long table's first and last rows, and the number of rows between them."""
    if len(rows) <= most:
        return list(rows), 0
    half = most // 2
    return [*rows[:half], *rows[-half:]], len(rows) - 2 * half


def explain_time(found: Accounting, *, is_partial: bool) -> str:
    """Explain what the shares of time refer to, and how certain they are."""
    ranks = f"{found.rows['rank'].nunique()} rank{'s' if found.rows['rank'].nunique() != 1 else ''}"
    end = "last moment that is known of each rank" if is_partial else "end"
    text = f"Shares of {format_duration(found.total_s)} of {ranks}, from the submit to the {end}"
    if not found.is_split:
        text += "; without traces a step's time is not divided into computing and waiting"
    if found.overlap > TOLERANCE:
        why = "traces or clocks are wrong" if found.is_split else "steps are known from log lines"
        text += f"; {format_share(found.overlap)} is counted twice: {why}"
    return text + "."


def _is_flat(name: str, value: str) -> bool:
    """Return True for the stage map of a job with one stage, which only lists its ranks."""
    return name == "stage_map" and value.count(";") == 1


def _list_facts(job: Job, num_nodes: int) -> ReportTable:
    rows = list(job.job_info.items())
    rows += [pair for pair in job.plan.shown if pair not in OF_ONE_RANK and not _is_flat(*pair)]
    for partition in dict.fromkeys(job.chosen_partitions.values()):
        rows.append(("partition", f"{partition} segments, chosen by Varuna"))
    ranks = {(trace.attempt, trace.rank) for trace in job.traces.ranks if trace.has_header}
    groups = job.plan.nodes
    is_alone = len(groups) == 1 and groups[0].count == 1
    for one in groups:
        label = "ranks" if is_alone else f"group {one.name}".strip()
        count = str(one.ranks) if is_alone else f"{one.count} x {one.ranks} ranks"
        rows.append((label, ", ".join(filter(None, (count, one.gpu_type, one.queue)))))
    rows.append(("nodes", str(num_nodes)))
    rows += [("traces", str(len(ranks)))] if ranks else []
    rows += [("commit", job.commit)] if job.commit else []
    return ReportTable(title="job", columns=("", ""), rows=rows)


def _list_iterations(job: Job, analysis: Analysis) -> ReportTable:
    """Build the table of step times, from the traces or else from the log."""
    times = analysis.times
    timed = times[["step", "took_s", "count"]]
    if job.traces.is_log and job.logs["iterations"].empty:
        timed = timed.iloc[:0]  # a profiler's steps are longer than others
    rows = [_show_time(*row) for row in timed.itertuples(index=False)]
    if rows and not times["is_told"].all():
        how = "times at which lines were written, which include all that was done between two lines"
        rows.append(("by the", how))
    if job.traces.is_log:
        took_s = job.traces.steps.groupby(["attempt", "step"])["took_s"].max()
        rows += [("profiled steps", str(len(took_s)))]
        span = "from a rank's first call to its last"
        rows += [("profiled, median", f"{took_s.median():.4f} s, {span}")] if len(took_s) else []
    elif len(times) and not job.traces.steps.empty:
        later = drop_first(times)
        took = later["took_s"]
        rows += [
            ("traced steps", str(len(times))),
            ("median", f"{took.median():.4f} s"),
            ("fastest", f"{took.min():.4f} s"),
            ("slowest", f"{took.max():.4f} s, step {int(later['step'][took.idxmax()])}"),
        ]
    return ReportTable(title="steps", columns=("", ""), rows=rows)


def _show_time(step: float, took_s: float, count: float) -> tuple[str, str]:
    """Format the time of a step, or the mean of the steps since an earlier line."""
    if count == 1:
        return f"step {int(step)}", f"{took_s:.4f} s"
    return f"{int(count)} steps up to {int(step)}", f"mean {took_s:.4f} s"


def _list_pipelines(analysis: Analysis) -> ReportTable:
    rows = []
    for step in analysis.steps:
        if not step.bubbles:
            continue
        names = ("measured", "ideal", "ideal_even")
        means = [sum(getattr(b, name) for b in step.bubbles) / len(step.bubbles) for name in names]
        slowest = max(step.bubbles, key=lambda bubble: bubble.makespan_s)
        figures = [f"{100 * share:.1f} %" for share in means]
        which = f"{step.name} {step.step}"
        rows.append((which, f"{slowest.makespan_s:.4f}", *figures, str(len(step.bubbles))))
    if rows and len(analysis.bubbles) > 1:
        share = 100 * analysis.bubbles["bubble_share"]
        rows.append(("all, median", "", f"{share.median():.1f} %", "", "", ""))
        rows.append(("all, worst", "", f"{share.max():.1f} %", "", "", ""))
    columns = ("detailed step", "pipeline s", "idle", "ideal", "even", "replicas")
    return ReportTable(title="pipeline", columns=columns, rows=rows)


def _list_stages(job: Job, analysis: Analysis) -> ReportTable:
    parts = "segments" if job.chosen_partitions else "layers"
    columns = ("stage", parts, "work s", "on path")
    step, paces = analysis.find_step("median"), analysis.paces
    if step is None or paces is None:
        return ReportTable(title="stages", columns=columns, rows=[])
    most = max(paces.work_s) or 1.0
    path = {stage: 0.0 for stage in range(len(paces.work_s))}
    for piece in step.path:
        if piece.what == "work" and piece.stage in path:
            path[piece.stage] += piece.seconds
    length = sum(piece.seconds for piece in step.path) or 1.0
    has_layers = len(analysis.partition) == len(paces.work_s)
    rows = [
        (
            str(stage),
            str(analysis.partition[stage]) if has_layers else "-",
            f"{work:.4f}",
            f"{100 * path[stage] / length:.1f} %",
        )
        for stage, work in enumerate(paces.work_s)
    ]
    shares = tuple(work / most for work in paces.work_s)
    return ReportTable(title="stages", columns=columns, rows=rows, shares=shares)


def _list_training(analysis: Analysis) -> ReportTable:
    names = ("step", "loss", "grad_norm", "loss_scale", "learning_rate", "skipped", "nan")
    table = analysis.curves.table[list(names)].dropna(axis="columns", how="all")
    quiet = [name for name in QUIET if name in table and (table[name] == QUIET[name]).all()]
    table = table.drop(columns=quiet)
    rows = [tuple(map(_show, row)) for row in table.itertuples(index=False)]
    has_values = len(table.columns) > 1  # beside the steps
    return ReportTable(
        title="training", columns=tuple(table.columns), rows=rows if has_values else ()
    )


def _list_memory(analysis: Analysis) -> ReportTable:
    rows = [
        (who, f"{used:.0f} of {total:.0f} MB" if total == total else f"{used:.0f} MB")
        for who, used, total in analysis.memory.itertuples(index=False)
    ]
    return ReportTable(title="memory", columns=("", ""), rows=rows)


def _list_nodes(job: Job) -> ReportTable:
    """Build the table of nodes with traces: their ranks, and how well their clocks are known."""
    rows = []
    for host, own in list_ranks(job).groupby("host", sort=False):
        doubt = own["residual_ns"].dropna()
        rows.append(
            (
                str(host) or "-",
                _join_ranges(own["rank"]),
                _join_ranges(own["stage"]),
                ", ".join(sorted({str(device) for device in own["device"] if device})) or "-",
                format_seconds(float(doubt.max()) / 1e9) if len(doubt) else "-",
            )
        )
    columns = ("node", "ranks", "stages", "device", "clock within")
    return ReportTable(title="nodes", columns=columns, rows=rows)


def _list_attempts(analysis: Analysis) -> ReportTable:
    rows = []
    for attempt in analysis.goodput.attempts:
        is_known = attempt.first_step is not None or attempt.steps.is_counted
        if attempt.started is None and not is_known:
            continue
        begun = took = "-"
        if attempt.started is not None:
            at = datetime.fromtimestamp(attempt.started, timezone.utc)
            begun = f"{at:%Y-%m-%d %H:%M:%S}"
            took = f"{attempt.ended - attempt.started:.1f}" if attempt.ended is not None else "-"
        first = attempt.first_step
        if attempt.origin is not None and not attempt.origin.doubt:
            first = attempt.origin.step
        steps = f"{first} to {attempt.last_step}"
        if attempt.steps.is_counted:
            counted: int | None = value_of(attempt.steps.step)
            steps = f"{counted} counted"
        rows.append(
            (
                attempt.label or "-",
                begun,
                took,
                steps if is_known else "not known",
                f"{attempt.steps_s:.1f}" if attempt.steps_s else "-",
                f"{attempt.repeated_s:.1f}" if attempt.steps_s else "-",
                attempt.outcome or "-",
            )
        )
    columns = ("attempt", "began (UTC)", "took s", "steps", "in steps s", "done again s", "end")
    return ReportTable(title="attempts", columns=columns, rows=rows)


def _list_morphs(job: Job) -> ReportTable:
    """Build the table of layout changes and what each part of a change cost."""
    events = [event for event in job.history if event.get("kind") == "morph"]
    rows = []
    for event in events:
        parts, pause_s = read_morph_parts(event), read_pause_s(event)
        rows.append(
            (
                f"{event.get('from', '?')} to {event.get('to', '?')}",
                "-" if pause_s is None else f"{pause_s:.1f}",
                *(f"{parts[name]:.2f}" if name in parts else "-" for name in MORPH_PARTS),
                str(event.get("reason", ""))[:200],
            )
        )
    names = (f"{name[:-2].replace('_', ' ')} s" for name in MORPH_PARTS)
    return ReportTable(title="morphs", columns=("layout", "pause s", *names, "why"), rows=rows)


def _list_failures(job: Job) -> ReportTable:
    """Build the table of ranks that failed by themselves, with the last error that each wrote."""
    rows = []
    for row in job.exits.to_dict("records"):
        if row["stopped"] or (row["code"] == 0 and not row["signal"]):
            continue
        code = f"signal {row['signal']}" if row["signal"] else f"exit {row['code']}"
        who = f"rank {row['rank']}"
        error = str(row["exception"] or row["last_error"] or "")  # lines may follow an exception's
        rows.append((str(row["attempt"]), who, str(row["node"]), code, error))
    columns = ("attempt", "", "node", "ended", "last error")
    return ReportTable(title="failed ranks", columns=columns, rows=rows)


def _list_skipped(job: Job) -> ReportTable:
    return ReportTable(title="not read", columns=("file", "what"), rows=list(job.skipped.items()))


def _join_ranges(numbers: Iterable[int]) -> str:
    """Join numbers as ranges: `0-3 8`."""
    text = join_numbers((int(number) for number in numbers), " ")
    return text if len(text) < 80 else text[:77] + "..."


def _show(value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
