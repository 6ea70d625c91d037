"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

import pandas as pd

from reports.analysis import Analysis
from reports.finding import Finding
from reports.load import Job

WIDTH = 100
MOST_LINES = 12
"""Rows of a table, at its start and end together."""


def render_text(job: Job, analysis: Analysis, findings: list[Finding], *, is_partial: bool) -> str:
    """All sections that have something to say; control characters of logs do not get through."""
    lines: list[str] = [f"report of {job.sources.name}"]
    if is_partial:
        lines.append("the job has not ended: this is what is there so far")
    sections = (
        ("findings", _render_findings(findings)),
        ("job", _render_facts(job)),
        ("steps", _render_steps(job, analysis)),
        ("pipeline", _render_pipeline(analysis)),
        ("stages", _render_stages(analysis)),
        ("training", _render_training(job)),
        ("memory", _render_memory(analysis)),
        ("attempts", _render_attempts(analysis)),
        ("not read", (f"{name}: {why}" for name, why in job.skipped.items())),
    )
    for title, content in sections:
        body = list(content)
        if body:
            lines += ["", title.upper(), *(f"  {line}" for line in body)]
    return "".join(_clean(line) + "\n" for line in lines)


def _clean(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in line)


def _render_findings(findings: list[Finding]) -> Iterator[str]:
    for number, finding in enumerate(findings, start=1):
        yield f"{number}. {finding.sentence}"
        yield f"   from: {finding.evidence}"
        if finding.key:
            yield f"   conf: {finding.key}"


def _render_facts(job: Job) -> Iterator[str]:
    for key, value in job.job_info.items():
        yield f"{key}: {value}"
    for key in ("name", "layout", "pipeline", "data", "tensor", "partition", "stage_map"):
        if job.facts.get(key) not in (None, ""):
            yield f"{key}: {str(job.facts[key])[:200]}"
    ranks = {(trace.attempt, trace.rank) for trace in job.traces.ranks if trace.has_header}
    hosts = {trace.host for trace in job.traces.ranks if trace.host}
    nodes = hosts or {node for attempt in job.sources.attempts for node, _ in attempt.logs}
    yield f"nodes: {len(nodes)}; traces: {len(ranks)}"


def _render_steps(job: Job, analysis: Analysis) -> Iterator[str]:
    iterations = job.logs["iterations"]
    if not iterations.empty:
        timed = iterations.dropna(subset=["time_ms"]).drop_duplicates(["attempt", "step"])
        rows = [
            f"iteration {int(step)} : {time_ms / 1000:.4f} s"
            for step, time_ms in timed[["step", "time_ms"]].itertuples(index=False)
        ]
        yield from _shorten(rows)
    times = analysis.times
    if len(times) and not job.traces.steps.empty:
        later = times[times.duplicated("attempt")]
        took = (later if len(later) else times)["took_s"]
        yield (
            f"traced: {len(times)} steps, median {took.median():.4f} s, "
            f"{took.min():.4f} to {took.max():.4f} s"
        )


def _render_pipeline(analysis: Analysis) -> Iterator[str]:
    if not analysis.steps:
        return
    yield f"{'step':>12} {'slowest s':>11} {'idle':>7} {'ideal':>7} {'even':>7}"
    for step in analysis.steps:
        if not step.bubbles:
            continue
        names = ("measured", "ideal", "ideal_even")
        means = [sum(getattr(b, name) for b in step.bubbles) / len(step.bubbles) for name in names]
        slowest = max(step.bubbles, key=lambda bubble: bubble.makespan_s)
        figures = " ".join(f"{100 * share:6.1f}%" for share in means)
        replicas = f"  {len(step.bubbles)} replicas" if len(step.bubbles) > 1 else ""
        name = f"{step.name} {step.step}"
        yield f"{name:>12} {slowest.makespan_s:11.4f} {figures}{replicas}"
    if len(analysis.bubbles) > 1:
        share = 100 * analysis.bubbles["bubble_share"]
        yield f"all steps: idle {share.median():.1f}% in the median, at most {share.max():.1f}%"


def _render_stages(analysis: Analysis) -> Iterator[str]:
    step = analysis.find_step("median")
    if step is None or not step.stage_work_s:
        return
    most = max(step.stage_work_s) or 1.0
    path = {stage: 0.0 for stage in range(len(step.stage_work_s))}
    for piece in step.path:
        if piece.what == "work" and piece.stage in path:
            path[piece.stage] += piece.seconds
    length = sum(piece.seconds for piece in step.path) or 1.0
    yield f"{'stage':>5} {'layers':>6} {'work s':>9} {'on path':>8}"
    for stage, work in enumerate(step.stage_work_s):
        has_layers = len(analysis.partition) == len(step.stage_work_s)
        layers = str(analysis.partition[stage]) if has_layers else "-"
        bar = "#" * round(40 * work / most)
        yield f"{stage:5d} {layers:>6} {work:9.4f} {100 * path[stage] / length:7.1f}% {bar}"
    if analysis.suggestion is not None:
        yield f"suggested partition: {analysis.suggestion}"


def _render_training(job: Job) -> Iterator[str]:
    table = job.logs["iterations"]
    if table.empty:
        return
    names = ["step", "loss", "grad_norm", "loss_scale", "learning_rate", "skipped", "nan"]
    rows = table.drop_duplicates(["attempt", "step"])[names]
    yield " ".join(f"{name:>13}" for name in names)
    yield from _shorten(
        [" ".join(f"{_show(value):>13}" for value in row) for row in rows.itertuples(index=False)]
    )


def _render_memory(analysis: Analysis) -> Iterator[str]:
    rows = [
        f"{who}: {used:.0f}" + (f" of {total:.0f} MB" if total == total else " MB")
        for who, used, total in analysis.memory.itertuples(index=False)
    ]
    yield from _shorten(rows)


def _render_attempts(analysis: Analysis) -> Iterator[str]:
    for attempt in analysis.goodput.attempts:
        if attempt.started is None and attempt.first_step is None:
            continue
        words = [f"attempt {attempt.label or '-'}:"]
        if attempt.started is not None:
            begun = datetime.fromtimestamp(attempt.started, timezone.utc)
            words.append(f"{begun:%Y-%m-%d %H:%M:%S} UTC")
        if attempt.started is not None and attempt.ended is not None:
            words.append(f"for {attempt.ended - attempt.started:.1f} s,")
        if attempt.first_step is not None:
            words.append(f"steps {attempt.first_step} to {attempt.last_step},")
            words.append(f"{attempt.steps_s:.1f} s of steps")
        if attempt.repeated_s:
            words.append(f"({attempt.repeated_s:.1f} s done again later)")
        if attempt.outcome:
            words.append(f"- {attempt.outcome}")
        yield " ".join(words)


def _shorten(rows: list[str]) -> Iterator[str]:
    """The first and last rows of a long table."""
    if len(rows) <= MOST_LINES:
        yield from rows
        return
    half = MOST_LINES // 2
    yield from rows[:half]
    yield f"... {len(rows) - 2 * half} more"
    yield from rows[-half:]


def _show(value: object) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
