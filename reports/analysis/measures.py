"""Every figure of the report, computed once from the tables and without side effects."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from varuna_core.records.logs.trace import COMPUTE
from vjob.reports.analysis.balance import (
    Straggler,
    Suggestion,
    find_stragglers,
    parse_partition,
    suggest_partition,
)
from vjob.reports.analysis.idle_time import Bubbles, compare_bubbles, measure_communication
from vjob.reports.analysis.pipeline import PathPart, Pipeline, find_critical_path, observe
from vjob.reports.analysis.step_times import (
    Goodput,
    Outlier,
    build_step_times,
    find_outliers,
    measure_bubbles,
    measure_goodput,
)
from vjob.reports.load.tables import Job

MOST_STAGES = 10_000
"""A number beyond is none of a stage."""


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """One step of which the events were read."""

    name: str
    """first, median, slowest or last."""
    attempt: str
    step: int
    pipelines: tuple[Pipeline, ...]
    """Those of the replicas that can be put together."""
    bubbles: tuple[Bubbles, ...]
    path: tuple[PathPart, ...]
    """The critical path of the replica that took longest."""
    communication: pd.DataFrame
    stage_work_s: tuple[float, ...]
    """Work of each stage, the mean over its ranks."""
    trouble: str
    """Why pipelines or bubbles are missing."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What the training log says of the training itself."""

    table: pd.DataFrame
    """A row a line: step, loss, grad_norm, loss_scale, learning_rate, skipped, nan."""
    skipped: int
    nan: int


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All findings' figures."""

    times: pd.DataFrame
    """Step times (reports/analysis/step_times.py)."""
    bubbles: pd.DataFrame
    """Of every step."""
    steps: tuple[StepAnalysis, ...]
    outliers: tuple[Outlier, ...]
    stragglers: tuple[Straggler, ...]
    partition: tuple[int, ...]
    """Of the attempt that the median step is of."""
    suggestion: Suggestion | None
    goodput: Goodput
    curves: Curves
    memory: pd.DataFrame
    """The most of each rank and each GPU: who, used_mb, total_mb (NaN is not known)."""
    missing_ranks: tuple[int, ...]
    """Ranks of the plan that wrote no trace, where others did."""

    def find_step(self, name: str) -> StepAnalysis | None:
        return next((step for step in self.steps if step.name == name), None)


def analyse(job: Job) -> Analysis:
    """Everything at once; what there is no data for is empty or None."""
    times = whole = build_step_times(job.traces.steps, job.logs["iterations"])
    if job.traces.is_sample:  # only the log has all steps
        whole = build_step_times(job.traces.steps.iloc[:0], job.logs["iterations"])
        times = whole if len(whole) else times
    looked_at = {pair: _analyse_step(job, *pair) for pair in set(job.chosen.values())}
    steps = tuple(replace(looked_at[pair], name=name) for name, pair in job.chosen.items())
    median = next((step for step in steps if step.name == "median"), None)
    partition = parse_partition(job.find_partition(median.attempt if median else ""))
    labels = [attempt.label for attempt in job.sources.attempts]
    return Analysis(
        times=times,
        bubbles=measure_bubbles(job.traces.steps),
        steps=steps,
        outliers=tuple(find_outliers(times, job.traces.steps)),
        stragglers=tuple(find_stragglers(job.traces.steps, list_ranks(job))),
        partition=partition,
        suggestion=suggest_partition(partition, median.stage_work_s) if median else None,
        goodput=measure_goodput(
            whole,
            job.logs["iterations"],
            job.traces.zero_ns / 1e9,
            job.exits,
            job.history,
            job.outcomes,
            labels,
        ),
        curves=_build_curves(job.logs["iterations"]),
        memory=_find_memory(job),
        missing_ranks=_find_missing(job),
    )


def list_ranks(job: Job) -> pd.DataFrame:
    """Who wrote traces, a row a file."""
    names = ["attempt", "rank", "stage", "replica", "host", "device", "residual_ns"]
    rows = [
        {
            "attempt": trace.attempt,
            "rank": trace.rank,
            "stage": trace.stages[0],
            "replica": trace.replica,
            "host": trace.host,
            "device": trace.device,
            "residual_ns": trace.residual_ns,
            "num_events": trace.num_events,
        }
        for trace in job.traces.ranks
        if trace.has_header
    ]
    return pd.DataFrame(rows, columns=[*names, "num_events"])


def _analyse_step(job: Job, attempt: str, step: int) -> StepAnalysis:
    events = job.events[(job.events["attempt"] == attempt) & (job.events["step"] == step)]
    pipelines: list[Pipeline] = []
    bubbles: list[Bubbles] = []
    troubles: dict[int, str] = {}
    for replica, pipeline in observe(events):
        if isinstance(pipeline, str):
            troubles[replica] = pipeline
        else:
            pipelines.append(pipeline)
    for pipeline, compared in zip(pipelines, compare_bubbles(pipelines), strict=True):
        if isinstance(compared, str):
            troubles[pipeline.replica] = compared
        else:
            bubbles.append(compared)
    slowest = max(pipelines, key=lambda item: item.makespan, default=None)
    work = events[events["kind"].isin(COMPUTE) & events["stage"].between(0, MOST_STAGES)]
    work = work.assign(work_s=work["end_s"] - work["ready_s"])
    by_rank = work.groupby(["stage", "rank"])["work_s"].sum()
    by_stage = by_rank.groupby("stage").mean()
    if len(by_stage):  # a stage of which no rank wrote did nothing that is known
        by_stage = by_stage.reindex(range(int(by_stage.index.max()) + 1), fill_value=0.0)
    return StepAnalysis(
        name="",
        attempt=attempt,
        step=step,
        pipelines=tuple(pipelines),
        bubbles=tuple(bubbles),
        path=tuple(find_critical_path(slowest)) if slowest is not None else (),
        communication=measure_communication(events, pipelines),
        stage_work_s=tuple(float(seconds) for seconds in by_stage),
        trouble=f"replica {min(troubles)}: {troubles[min(troubles)]}" if troubles else "",
    )


def _build_curves(iterations: pd.DataFrame) -> Curves:
    names = ["attempt", "step", "loss", "grad_norm", "loss_scale", "learning_rate", "skipped"]
    if iterations.empty:
        return Curves(table=pd.DataFrame(columns=[*names, "nan"]), skipped=0, nan=0)
    table = iterations.drop_duplicates(["attempt", "step"])[[*names, "nan"]]
    numbers = [pd.to_numeric(table[name], errors="coerce") for name in ("skipped", "nan")]
    skipped, nan = (int(min(column.sum(), 2**53)) for column in numbers)
    return Curves(table=table.reset_index(drop=True), skipped=skipped, nan=nan)


def _find_memory(job: Job) -> pd.DataFrame:
    rows: list[dict[str, object]] = []
    memory = job.logs["memory"]
    if not memory.empty:
        figures = memory[["max_reserved", "reserved", "max_allocated"]].bfill(axis=1).iloc[:, 0]
        most = figures.astype(float).groupby(memory["rank"].astype(float)).max().dropna()
        rows += [{"who": f"rank {int(rank)}", "used_mb": used} for rank, used in most.items()]
    if not job.gpus.empty:
        gpus = job.gpus[job.gpus["gpu"] != "cpu"].dropna(subset=["memory_used_mb"])
        both = gpus.groupby(["node", "gpu"])[["memory_used_mb", "memory_total_mb"]].max()
        rows += [
            {"who": f"{node} GPU {gpu}", "used_mb": used, "total_mb": total}
            for (node, gpu), used, total in both.itertuples()
        ]
    table = pd.DataFrame(rows, columns=["who", "used_mb", "total_mb"])
    return table.astype({"used_mb": float, "total_mb": float})


def _find_missing(job: Job) -> tuple[int, ...]:
    seen = {trace.rank for trace in job.traces.ranks if trace.has_header}
    if not seen or job.plan.world is None or job.traces.is_sample:
        return ()
    return tuple(rank for rank in range(min(job.plan.world, 1 << 20)) if rank not in seen)
