"""Compute every figure of the report once from the tables, without side effects."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import pandas as pd

from varuna_core.facts.known import Evidence, Known, NotKnown, Sure, Value, value_of
from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.trace import COMPUTE
from varuna_core.records.record import CLOCK_SET
from vjob.reports.analysis.accounting import (
    WAITS,
    Accounting,
    account,
    compute_late,
    divide_start,
    list_attempts,
    name_class,
)
from vjob.reports.analysis.balance import (
    StagePaces,
    Straggler,
    Suggestion,
    find_stragglers,
    measure_stage_paces,
    suggest_partition,
)
from vjob.reports.analysis.headline import (
    STEP_LINES,
    Headline,
    count_head,
    find_num_steps,
    goes_on,
    summarise,
)
from vjob.reports.analysis.idle_time import Bubbles, compare_bubbles, measure_communication
from vjob.reports.analysis.pipeline import (
    PathPart,
    Pipeline,
    find_critical_path,
    list_waits,
    observe,
)
from vjob.reports.analysis.readings import LOG, TRACE, to_spans
from vjob.reports.analysis.step_times import (
    Goodput,
    Outlier,
    build_step_times,
    find_outliers,
    measure_bubbles,
    measure_goodput,
)
from vjob.reports.load.tables import Job
from vjob.reports.load.trace_file import RankTrace
from vjob.reports.load.trace_reader import ClockConflict

MOST_STAGES = 10_000
"""Stage numbers above this are read as errors."""


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """One step whose events were read."""

    name: str
    """Why the step was chosen: first, median, slowest or last."""
    attempt: str
    step: int
    pipelines: tuple[Pipeline, ...]
    """The pipelines of those replicas whose events fit together."""
    bubbles: tuple[Bubbles, ...]
    path: tuple[PathPart, ...]
    """The critical path of the slowest replica."""
    communication: pd.DataFrame
    trouble: str
    """The reason why pipelines or bubbles are missing."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves from the training log: loss, learning rate, norms."""

    table: pd.DataFrame
    """A row for each log line: step, loss, grad_norm, loss_scale, learning_rate, skipped, nan."""
    skipped: int
    nan: int
    """Steps whose loss was not a number; of a log that does not count them, the lines that print
    such a loss."""
    first_nan: int | None
    """The first step at which a line printed a loss that is not a number; None if the lines count
    all such steps, as Megatron's do."""
    evaluations: pd.DataFrame
    """Metrics of evaluations, one a row: step (or epoch, by `unit`), split (val, test, dev),
    metric, value. The step is NaN if it is not known, and that of an earlier line without
    `is_own`."""

    def list_evaluated(self) -> list[tuple[str, str, pd.DataFrame]]:
        """Return for each split its name, the name of its loss (or of another metric if it has
        none), and its rows. The split `train` has losses of epochs and evaluations on the training
        data: it is left out where steps have losses."""
        found = []
        has_losses = bool(self.table["loss"].notna().any())
        for split, own in self.evaluations.groupby("split", sort=False):
            names = list(dict.fromkeys(own["metric"]))
            metric = min(names, key=lambda name: (name != "loss", "loss" not in name))
            rows = own[own["metric"] == metric]
            if len(rows) and not (split == "train" and has_losses):
                found.append((str(split), metric, rows.reset_index(drop=True)))
        return found


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The figures that all findings rest on."""

    times: pd.DataFrame
    """Times of the steps, with the columns of step_times.build_step_times."""
    bubbles: pd.DataFrame
    """Makespan and bubble of each step."""
    steps: tuple[StepAnalysis, ...]
    outliers: tuple[Outlier, ...]
    stragglers: tuple[Straggler, ...]
    partition: tuple[int, ...]
    """Layers of each stage in the attempt of the median step."""
    paces: StagePaces | None
    """The paces of the stages in the attempt of the median step; None if they are not known."""
    suggestion: Suggestion | None
    goodput: Goodput
    accounting: Accounting
    """The seconds of every rank, by class of time."""
    headline: Headline
    curves: Curves
    memory: pd.DataFrame
    """The highest memory use of each rank and GPU: who, used_mb, total_mb (NaN if not known)."""
    missing_ranks: tuple[int, ...]
    """Ranks of the plan without a trace, in a run in which other ranks wrote traces."""

    @property
    def stepping_s(self) -> float:
        """Rank-seconds within steps; 0 means not known."""
        hours = self.headline.rank_hours
        if isinstance(hours, Value) and hours.evidence[0].source == STEP_LINES:
            return 3600 * hours.value
        return self.accounting.stepping_s

    def find_step(self, name: str) -> StepAnalysis | None:
        return next((step for step in self.steps if step.name == name), None)


def analyse(job: Job) -> Analysis:
    """Compute all figures; those without data are empty or None."""
    labels = [attempt.label for attempt in job.sources.attempts]
    failed = _list_failed(job)
    cut = {*failed, *labels[:-1]}
    set_s = [number for event in job.history if (number := _read_clock_step(event))]
    iterations = _drop_jumps(job.logs["iterations"], set_s)
    times = whole = build_step_times(job.traces.steps, iterations, cut)
    if job.traces.is_log:  # only the log has all steps
        whole = build_step_times(job.traces.steps.iloc[:0], iterations)
        times = whole if len(whole) else times
    works = [table for table in (job.traces.steps, job.traces.works) if len(table)]
    stragglers = find_stragglers(pd.concat(works), list_ranks(job)) if works else []
    slow = {(found.attempt, found.rank) for found in stragglers}
    looked_at = {pair: _analyse_step(job, *pair) for pair in set(job.chosen.values())}
    steps = tuple(replace(looked_at[pair], name=name) for name, pair in job.chosen.items())
    median = next((step for step in steps if step.name == "median"), None)
    found = job.find_partition(median.attempt if median else "")
    partition = () if found is None else found.counts
    paces = _measure_paces(job, works, median.attempt, slow) if median else None
    goodput = measure_goodput(
        whole,
        iterations,
        job.traces.zero_ns / 1e9,
        job.exits,
        job.history,
        job.outcomes,
        labels,
        LOG if job.traces.is_log or job.traces.steps.empty else TRACE,
        to_spans(job.logs["spans"]),
        value_of(find_num_steps(job)),
        job.counts,
        job.logs["evaluations"],
        _find_present(job),
    )
    if set_s:
        way = "back" if set_s[0] < 0 else "forward"
        text = f"the clock was set {way} by {format_duration(abs(set_s[0]))}"
        spans = tuple(replace(span, ended=None) for span in goodput.attempts)
        goodput = replace(goodput, attempts=spans, wall_s=None, clock=f"{text} in the run")
    # A line of a log is about several steps, and calls are of single ones.
    traced = job.traces.steps.iloc[: None if not job.traces.is_log else 0]
    outliers = find_outliers(times, traced, job.logs["evaluations"], goodput.slowdown)
    bubbles = measure_bubbles(job.traces.steps)
    accounting = _account(job, goodput, list(looked_at.values()), failed)
    return Analysis(
        times=times,
        bubbles=bubbles,
        steps=steps,
        outliers=tuple(outliers),
        stragglers=tuple(stragglers),
        partition=partition,
        paces=paces,
        suggestion=_suggest(job, partition, paces) if paces and paces.is_known else None,
        goodput=goodput,
        accounting=accounting,
        headline=summarise(job, accounting, goodput, times, _measure_idle(bubbles, median)),
        curves=_build_curves(job.logs["iterations"], job.logs["evaluations"]),
        memory=_read_memory(job),
        missing_ranks=_find_missing(job),
    )


def _find_present(job: Job) -> float | None:
    """Return the moment up to which a run that has not ended counts: the present if its ranks hang,
    else inf, which stands for its last step. Return None for other jobs."""
    if job.state is None or not goes_on(job):
        return None
    return job.state.at if any(one.until is None for one in job.hangs.values()) else inf


def _read_clock_step(event: Mapping[str, Any]) -> float:
    """Return the seconds by which a clock was set; 0 if the event is of another kind."""
    by = event.get("by") if event.get("kind") == CLOCK_SET else 0.0
    return float(by) if isinstance(by, (int, float)) and abs(by) < inf else 0.0


def _drop_jumps(iterations: pd.DataFrame, set_s: Sequence[float]) -> pd.DataFrame:
    """Remove the times of lines between which the clock was set forward."""
    jumps = [1000 * by for by in set_s if by > 0]
    if not jumps or "timed" not in iterations:
        return iterations
    is_jump = iterations["timed"].notna() & (
        iterations["time_ms"] * iterations["timed"] >= min(jumps)
    )
    return iterations.assign(time_ms=iterations["time_ms"].mask(is_jump))


def _measure_idle(bubbles: pd.DataFrame, median: StepAnalysis | None) -> Known[float]:
    """Return the idle share: the median of traced steps, or else that of the detailed step."""
    shares = bubbles["bubble_share"].dropna()
    if len(shares):
        return Value(float(shares.median()), (Evidence("trace", Sure.MEASURED, seen=len(shares)),))
    found = [one.measured for one in median.bubbles] if median is not None else []
    if found:
        proof = Evidence(f"step {median.step}" if median else "", Sure.MEASURED, seen=1)
        return Value(sum(found) / len(found), (proof,))
    return NotKnown("no trace and no timer shows how long stages worked in a step")


def _list_failed(job: Job) -> list[str]:
    """Return the labels of attempts that did not end well."""
    failed = {str(label) for label in job.exits[job.exits["code"] != 0]["attempt"]}
    ends = [event for event in job.history if event.get("kind") == "ended" and event.get("code")]
    return sorted(failed | {str(event.get("attempt", "")) for event in ends})


def _account(
    job: Job, goodput: Goodput, looked_at: Sequence[StepAnalysis], failed: Sequence[str]
) -> Accounting:
    labels = [span.label for span in goodput.attempts]
    written = job.logs["spans"].groupby("attempt")["last_s"].max().dropna()
    spans = {  # who goes on has come as far as the last line
        span.label: (span.started, _find_latest(span.ended, written.get(span.label)))
        for span in goodput.attempts
    }
    has_traces = not job.traces.is_log
    traces = [trace for trace in job.traces.ranks if trace.has_header] if has_traces else []
    steps = job.traces.steps if has_traces else job.traces.steps.iloc[:0]
    ranks: dict[str, set[int]] = {label: set() for label in labels}
    for attempt, rank in job.exits[["attempt", "rank"]].itertuples(index=False):
        if isinstance(rank, int):
            ranks[attempt].add(rank)
    for trace in traces:
        ranks[trace.attempt].add(trace.rank)
    is_fixed = not any(event.get("kind") == "morph" for event in job.history)
    for label, own in ranks.items():  # who was killed with its node left nothing
        world = job.worlds.get(label) or (job.plan.world or 1 if is_fixed or not own else 0)
        own |= set(range(min(world, MOST_RANKS)))
    all_ranks = {label: sorted(own) for label, own in ranks.items()}
    attempts = list_attempts(job.history, labels, spans, all_ranks, failed)
    if goodput.clock:
        attempts = []
    zero_s = job.traces.zero_ns / 1e9
    log_lines = _list_log_lines(job)
    found = account(
        attempts,
        steps.assign(begin_s=steps["begin_s"] + zero_s),
        _list_after(traces),
        _measure_waits(job, looked_at),
        {one.label: one.readings for one in goodput.attempts if one.readings is not None},
        log_lines,
        {
            one.label: max(min(hang.until or one.ended, one.ended) - hang.since, 0.0)
            for one in attempts
            for hang in [job.hangs.get(one.label)]
            if hang is not None
        },
    )
    begun = {
        (attempt, rank): float(started)
        for attempt, rank, started in job.exits[["attempt", "rank", "started"]].itertuples(
            index=False
        )
        if isinstance(rank, int) and isinstance(started, (int, float))
    }
    opened = {(trace.attempt, trace.rank): trace.origin / 1e9 for trace in traces}
    return replace(
        found,
        start=divide_start(found, begun, opened),
        was_cancelled=job.state is not None and job.state.word == "CANCELLED",
    )


def _find_latest(*numbers: float | None) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


MOST_RANKS = 1 << 16
"""Plans with more ranks than this are not believed."""


def _list_after(traces: Sequence[RankTrace]) -> pd.DataFrame:
    """Return attempt, rank and the seconds by class that each rank spent after its last step."""
    rows = []
    for trace in traces:
        row: dict[str, Any] = {"attempt": trace.attempt, "rank": trace.rank}
        for kind, seconds in trace.after_s.items():
            row[name_class(kind)] = row.get(name_class(kind), 0.0) + seconds
        rows += [row] if len(row) > 2 else []
    table = pd.DataFrame(rows, columns=None if rows else ["attempt", "rank"])
    return table.groupby(["attempt", "rank"]).sum().reset_index() if rows else table


def _measure_waits(job: Job, looked_at: Sequence[StepAnalysis]) -> pd.DataFrame:
    """Return the waits of the ranks in detailed steps, with the columns accounting.WAITS."""
    tables = []
    for step in looked_at:
        waits = list_waits(list(step.pipelines)).groupby("rank")[["bubble_s", "transfer_s"]].sum()
        found = step.communication[["rank", "exposed_s", "overlapped_s"]]
        found = found.join(waits, on="rank").fillna({"bubble_s": 0.0, "transfer_s": 0.0})
        found["exposed_s"] -= found[
            "transfer_s"
        ]  # the waits for messages have a place of their own
        tables.append(found.assign(attempt=step.attempt))
    pairs = {(step.attempt, step.step) for step in looked_at}
    keys = pd.Series(
        list(zip(job.events["attempt"], job.events["step"], strict=True)), dtype=object
    )
    tables.append(compute_late(job.events[keys.isin(pairs).to_numpy(dtype=bool)]))
    table = pd.concat([table.reindex(columns=list(WAITS)) for table in tables])
    seconds = {name: float for name in WAITS if name.endswith("_s")}
    return table.fillna(dict.fromkeys(seconds, 0.0)).astype(seconds)


def _list_log_lines(job: Job) -> pd.DataFrame:
    """Return attempt, step, took_s (may be missing) and count of each log line about steps."""
    lines = job.logs["iterations"]
    times = build_step_times(job.traces.steps.iloc[:0], lines)[
        ["attempt", "step", "took_s", "count"]
    ]
    if lines.empty:
        return times
    others = lines[lines["time_ms"].isna()][["attempt", "step"]]
    return pd.concat([times, others.assign(took_s=float("nan"), count=1)], ignore_index=True)


def _measure_paces(
    job: Job, works: Sequence[pd.DataFrame], attempt: str, slow: Collection[tuple[str, int]]
) -> StagePaces | None:
    """Measure the stages' paces, from all steps if each rank has one stage, else from the detailed
    steps alone."""
    table = job.events[(job.events["attempt"] == attempt) & job.events["kind"].isin(COMPUTE)]
    if works and (table.empty or table.groupby("rank")["stage"].nunique().max() == 1):
        table = pd.concat(works)
    else:
        table = table.assign(work_s=table["end_s"] - table["ready_s"])
        table = table.groupby(["attempt", "step", "stage", "rank"])["work_s"].sum().reset_index()
    table = table[(table["attempt"] == attempt) & table["stage"].between(0, MOST_STAGES)]
    return measure_stage_paces(table, {rank for label, rank in slow if label == attempt})


def _suggest(job: Job, partition: Sequence[int], paces: StagePaces) -> Suggestion | None:
    """Suggest a partition if its numbers are known to count like layers: those of a built-in
    program or of Megatron. The segments of a user's model may be unlike each other."""
    promised = job.plan.prediction
    if promised is not None and promised.covers(len(paces.work_s)):
        return None
    if job.training is not None:
        return suggest_partition(partition, paces.work_s, count_head(job.training))
    if job.traces.is_log:  # the timers of Megatron
        return suggest_partition(partition, paces.work_s, None)
    return None


def list_ranks(job: Job) -> pd.DataFrame:
    """Return the ranks that wrote traces, one row for each trace."""
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
    conflict = find_conflict(job, attempt, step)
    pipelines: list[Pipeline] = []
    bubbles: list[Bubbles] = []
    troubles: dict[int, str] = {}
    for replica, pipeline in observe(events if conflict is None else events.iloc[:0]):
        if isinstance(pipeline, str):
            troubles[replica] = pipeline
        else:
            pipelines.append(pipeline)
    for pipeline, compared in zip(pipelines, compare_bubbles(pipelines), strict=True):
        if isinstance(compared, str):
            troubles[pipeline.replica] = compared
        else:
            bubbles.append(compared)
    last = max(pipelines, key=lambda item: item.makespan, default=None)
    return StepAnalysis(
        name="",
        attempt=attempt,
        step=step,
        pipelines=tuple(pipelines),
        bubbles=tuple(bubbles),
        path=tuple(find_critical_path(last)) if last is not None else (),
        communication=measure_communication(events, pipelines),
        trouble=f"replica {min(troubles)}: {troubles[min(troubles)]}" if troubles else "",
    )


def find_conflict(job: Job, attempt: str, step: int) -> ClockConflict | None:
    """Return the contradiction between clocks that affects a step; None if there is none."""
    return next(
        (
            one
            for one in job.traces.conflicts
            if one.attempt == attempt and one.first <= step <= one.last
        ),
        None,
    )


def _build_curves(iterations: pd.DataFrame, evaluations: pd.DataFrame) -> Curves:
    names = ["attempt", "step", "loss", "grad_norm", "loss_scale", "learning_rate", "skipped"]
    if iterations.empty:
        table = pd.DataFrame(columns=[*names, "nan"])
        return Curves(table=table, skipped=0, nan=0, first_nan=None, evaluations=evaluations)
    table = iterations.drop_duplicates(["attempt", "step"])[[*names, "nan"]]
    numbers = [pd.to_numeric(table[name], errors="coerce") for name in ("skipped", "nan", "loss")]
    is_infinite = np.isinf(numbers[2]) & ~(numbers[0] > 0)
    numbers[1] = numbers[1].fillna(0).clip(lower=is_infinite.astype(float))
    skipped, nan = (int(min(column.sum(), 2**53)) for column in numbers[:2])
    printed = table.loc[(numbers[1] > 0) & numbers[0].isna(), "step"]
    table = table.reset_index(drop=True)
    first = int(printed.min()) if len(printed) else None
    return Curves(table=table, skipped=skipped, nan=nan, first_nan=first, evaluations=evaluations)


def _read_memory(job: Job) -> pd.DataFrame:
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
    if not seen or job.plan.world is None or job.traces.is_log:
        return ()
    return tuple(rank for rank in range(min(job.plan.world, 1 << 20)) if rank not in seen)
