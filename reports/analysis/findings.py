"""The figures as sentences: a number, its evidence, and the conf key that changes it.

The most expensive first, by the part of the time that each is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from vjob.reports.analysis.measures import Analysis, StepAnalysis
from vjob.reports.load.tables import Job


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence of the report."""

    weight: float
    """The part of the time that it is about; 1 and more for what must be read first."""
    sentence: str
    evidence: str
    """Where the number comes from."""
    key: str
    """The conf key to change; empty where no key helps."""


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def in_units(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


OWN_PROGRAMS = ("script", "function", "deepspeed")
OWN_TRACE = "a script writes one by varuna_core.trace, or by torch.profiler (docs/script.md)"
DOUBTFUL_NS = 1_000_000
"""Clocks that agree to within less are good enough."""


def list_gaps(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Missing traces and details, doubtful clocks, files that were not read whole."""
    is_own = job.plan.program in OWN_PROGRAMS  # the conf's keys for traces do not reach it
    if not job.traces.ranks and len(job.events):
        yield Finding(
            weight=0.0,
            sentence="No rank wrote a trace: events are the calls of Megatron's timers, which wait "
            "for the GPU at every call and so slow a step down.",
            evidence="start and end lists of the log; times are those of the nodes' own clocks",
            key="profile.timeline",
        )
    elif not job.traces.ranks:
        yield Finding(
            weight=0.0,
            sentence="No rank wrote a trace: bubbles, stages and stragglers are not known.",
            evidence=f"no trace/<rank>.jsonl{f'; {OWN_TRACE}' if is_own else ''}",
            key="" if is_own else "profile.timeline",
        )
    elif not analysis.steps:
        yield Finding(
            weight=0.0,
            sentence="The traces hold no details of any step.",
            evidence="step totals only" + ("; trace.start(every=1) for all" if is_own else ""),
            key="" if is_own else "train.log_every",
        )
    for step in analysis.steps[:1]:
        if step.trouble and _is_pipeline(job) and not job.traces.is_sample:
            yield Finding(
                weight=0.0,
                sentence=f"Step {step.step} cannot be put together: {step.trouble}.",
                evidence="its events",
                key="",
            )
    if analysis.missing_ranks:
        missing = ", ".join(map(str, analysis.missing_ranks[:8]))
        more = len(analysis.missing_ranks) - 8
        yield Finding(
            weight=1.0,
            sentence=f"Rank{'s' if len(analysis.missing_ranks) > 1 else ''} {missing}"
            + (f" and {more} more" if more > 0 else "")
            + " wrote no trace.",
            evidence="plan.json has more ranks than trace/",
            key="",
        )
    shifted = [trace for trace in job.traces.ranks if trace.shifted_ns]
    if shifted:
        worst = max(shifted, key=lambda trace: abs(trace.shifted_ns))
        yield Finding(
            weight=0.4,
            sentence=f"The clock of {worst.host or f'rank {worst.rank}'} is wrong by "
            f"{in_units(abs(worst.shifted_ns) / 1e9)}; times were put right by the steps' ends.",
            evidence=f"{len(shifted)} traces without measured offsets",
            key="",
        )
    hosts = {trace.host for trace in job.traces.ranks if trace.has_header}
    residuals = [trace.residual_ns for trace in job.traces.ranks if trace.has_header and trace.rank]
    known = [residual for residual in residuals if residual is not None]
    if len(hosts) > 1 and len(known) < len(residuals):  # rank 0's is what the others' are held to
        yield Finding(
            weight=0.3,
            sentence="The nodes' clocks were not held against each other: times across nodes are "
            "as good as the nodes' own clocks.",
            evidence="traces without offsets",
            key="",
        )
    elif known and max(known) > DOUBTFUL_NS:
        yield Finding(
            weight=0.1,
            sentence=f"Clocks of nodes agree to within {in_units(max(known) / 1e9)}.",
            evidence="the worst of the offsets in the traces",
            key="",
        )
    if job.skipped:
        yield Finding(
            weight=0.0,
            sentence=f"{len(job.skipped)} file{'s were' if len(job.skipped) > 1 else ' was'} not "
            "read whole.",
            evidence="; ".join(f"{name}: {why}" for name, why in list(job.skipped.items())[:5]),
            key="",
        )


MUCH_BUBBLE = 0.05
"""A bubble this much above its ideal is worth a sentence; so is this part of the time elsewhere."""
TIGHT = 0.92
"""Memory in use beyond this part may not fit the next batch."""
MOST_STRAGGLERS = 5


def find_all(job: Job, analysis: Analysis) -> list[Finding]:
    """All that is worth saying."""
    found = [finding for make in MAKERS for finding in make(job, analysis)]
    return sorted(found, key=lambda finding: -finding.weight)


def _on_pipeline(job: Job, analysis: Analysis) -> Iterator[Finding]:
    step = analysis.find_step("median")
    if step is None or not step.bubbles or len(step.stage_work_s) < 2:
        return
    count = len(step.bubbles)
    measured = sum(bubble.measured for bubble in step.bubbles) / count
    ideal = sum(bubble.ideal for bubble in step.bubbles) / count
    even = sum(bubble.ideal_even for bubble in step.bubbles) / count
    where = f"step {step.step}, the median of those with details"
    pipeline = step.pipelines[0]
    many = pipeline.schedule.num_microbatches
    yield Finding(
        weight=measured,
        sentence=(
            f"Ranks idle {percent(measured)} of a step's pipeline; the same order takes "
            f"{percent(ideal)} with these stage times and free messages, and {percent(even)} "
            "with equal stages."
        ),
        evidence=f"{where}: {many} micro-batches, {len(step.stage_work_s)} stages",
        key="train.global_batch_size or parallel.schedule" if even > MUCH_BUBBLE else "",
    )
    slowest = max(range(len(step.stage_work_s)), key=step.stage_work_s.__getitem__)
    mean = sum(step.stage_work_s) / len(step.stage_work_s)
    on_path: Counter[int] = Counter()
    for piece in step.path:
        if piece.what == "work":
            on_path[piece.stage] += piece.seconds  # type: ignore[assignment]  # seconds, not counts
    length = sum(piece.seconds for piece in step.path)
    if length and mean:
        share = on_path[slowest] / length
        above = step.stage_work_s[slowest] / mean - 1
        yield Finding(
            weight=above if above > 0.02 else 0.0,
            sentence=(
                f"Stage {slowest} sets the pace: it works {in_units(step.stage_work_s[slowest])} a "
                f"step, {percent(above)} more than the mean stage, and is {percent(share)} of "
                "the critical path."
            ),
            evidence=f"{where}: {len(step.path)} pieces on the path",
            key="parallel.partition" if above > MUCH_BUBBLE and _is_asked(job, analysis) else "",
        )


def _is_asked(job: Job, analysis: Analysis) -> bool:
    """Whether it is the conf's layout that was looked at, not one that nodes were lost for."""
    asked, found = job.plan.pipeline, len(analysis.partition)
    return asked is None or not found or asked == found


def _on_balance(job: Job, analysis: Analysis) -> Iterator[Finding]:
    found = analysis.suggestion
    if found is None or found.gain < 0.02:
        return
    now = "-".join(map(str, analysis.partition))
    yield Finding(
        weight=found.gain,
        sentence=(
            f"With the partition {found} in place of {now} the slowest stage would take "
            f"{in_units(found.slowest_then_s)} instead of {in_units(found.slowest_now_s)} a step, "
            f"{percent(found.gain)} less."
        ),
        evidence="layers taken as alike, each at what it costs on its stage now",
        key=f"parallel.partition: {found}" if _is_asked(job, analysis) else "",
    )


def _on_communication(job: Job, analysis: Analysis) -> Iterator[Finding]:
    step = analysis.find_step("median")
    if step is None or step.communication.empty:
        return
    took = _get_time(job, analysis, step)
    table = step.communication
    exposed, hidden = float(table["exposed_s"].mean()), float(table["overlapped_s"].mean())
    if not took or exposed / took < 0.005:
        return
    worst = table.loc[table["exposed_s"].idxmax()]
    total = exposed + hidden
    yield Finding(
        weight=exposed / took,
        sentence=(
            f"Communication holds up a rank for {in_units(exposed)} of a step "
            f"({percent(exposed / took)}); work hides {percent(hidden / total)} of all. "
            f"Rank {int(worst['rank'])} waits longest, {in_units(float(worst['exposed_s']))}."
        ),
        evidence=f"step {step.step}: messages under way, sends and all-reduces, without bubbles",
        key="parallel.order or train.micro_batch_size"
        if exposed / took > MUCH_BUBBLE and _is_pipeline(job)
        else "",
    )


def _is_pipeline(job: Job) -> bool:
    """False for a script without a pipeline: the layout's keys have no effect on it."""
    return job.plan.program not in OWN_PROGRAMS or (job.plan.pipeline or 1) > 1


def _get_time(job: Job, analysis: Analysis, step: StepAnalysis) -> float:
    times = job.traces.steps if job.traces.is_sample else analysis.times
    own = times[(times["attempt"] == step.attempt) & (times["step"] == step.step)]["took_s"]
    return float(own.max()) if len(own) else 0.0


def _on_stragglers(job: Job, analysis: Analysis) -> Iterator[Finding]:
    for found in analysis.stragglers[:MOST_STRAGGLERS]:
        plural = "s" if found.num_peers > 1 else ""
        yield Finding(
            weight=found.ratio - 1,
            sentence=(
                f"Rank {found.rank} on {found.host or 'an unknown node'} takes {found.ratio:.2f} "
                f"times as long as its {found.num_peers} peer{plural} of stage {found.stage}, in "
                f"{percent(found.share_of_steps)} of "
                f"{f'{found.num_steps} steps in a row' if found.num_steps else 'the steps'}."
            ),
            evidence=f"attempt {found.attempt or '-'}: work of a step, same stage, same GPU",
            key=f"cluster.exclude: [{found.host}]" if found.host else "cluster.exclude",
        )
    more = len(analysis.stragglers) - MOST_STRAGGLERS
    if more > 0:
        yield Finding(weight=0.0, sentence=f"{more} more ranks lag.", evidence="as above", key="")


def _on_outliers(job: Job, analysis: Analysis) -> Iterator[Finding]:
    if not analysis.outliers:
        return
    total = float(analysis.times["took_s"].sum())
    excess = sum(found.took_s - found.median_s for found in analysis.outliers)
    worst = analysis.outliers[0]
    cause = f", most of it {worst.kind} of rank {worst.rank}" if worst.kind else ""
    count = len(analysis.outliers)
    yield Finding(
        weight=excess / total if total else 0.0,
        sentence=(
            f"{count} step{'s stand' if count > 1 else ' stands'} out; the slowest, step "
            f"{worst.step}, took {in_units(worst.took_s)} against a median of "
            f"{in_units(worst.median_s)}{cause}."
        ),
        evidence="steps " + ", ".join(str(found.step) for found in analysis.outliers),
        key={"checkpoint": "train.checkpoint.every", "data": "data"}.get(worst.kind, ""),
    )


def _on_training(job: Job, analysis: Analysis) -> Iterator[Finding]:
    curves = analysis.curves
    table = curves.table
    loss = pd.to_numeric(table["loss"], errors="coerce") if len(table) else table["loss"]
    if curves.nan or (len(loss) and not loss.dropna().empty and loss.isin([float("inf")]).any()):
        yield Finding(
            weight=2.0,
            sentence=f"The loss was not a number in {curves.nan} iterations.",
            evidence="number of nan iterations in the log",
            key="train.optimizer.lr or train.precision",
        )
    steps = int(table["step"].max()) if len(table) else 0
    if curves.skipped and steps:
        share = min(1.0, curves.skipped / steps)
        yield Finding(
            weight=share,
            sentence=f"{curves.skipped} of {steps} steps were skipped ({percent(share)}): "
            "gradients overflowed.",
            evidence="number of skipped iterations in the log",
            key="train.loss_scale or train.precision" if share > 0.02 else "",
        )
    known = loss.dropna()
    if len(known) > 1:
        first, last = float(known.iloc[0]), float(known.iloc[-1])
        yield Finding(
            weight=0.0,
            sentence=f"The loss went from {first:.4g} to {last:.4g}, at best {known.min():.4g}.",
            evidence=f"{len(known)} lines of the log",
            key="",
        )


def _on_memory(job: Job, analysis: Analysis) -> Iterator[Finding]:
    table = analysis.memory
    if table.empty:
        return
    worst = table.loc[table["used_mb"].idxmax()]
    share = worst["used_mb"] / worst["total_mb"] if worst["total_mb"] else float("nan")
    of = f" of {worst['total_mb']:.0f}" if share == share else ""
    least = float(table["used_mb"].min())
    yield Finding(
        weight=0.5 if share > TIGHT else 0.0,
        sentence=f"{worst['who']} holds most: {worst['used_mb']:.0f}{of} MB; the least is "
        f"{least:.0f} MB.",
        evidence=f"{len(table)} ranks and GPUs, by the log and by the samples",
        key="parallel.recompute or train.micro_batch_size" if share > TIGHT else "",
    )


def _on_goodput(job: Job, analysis: Analysis) -> Iterator[Finding]:
    goodput = analysis.goodput
    if goodput.wall_s is not None and not goodput.knows_steps:
        yield _explain_no_steps(job, analysis, goodput.wall_s)
    if goodput.share is None or goodput.wall_s is None:
        return
    repeated = sum(attempt.repeated_s for attempt in goodput.attempts)
    restarts = len(goodput.attempts) - 1
    sentence = (
        f"{percent(goodput.share)} of {in_units(goodput.wall_s)} was useful steps"
        f" ({in_units(goodput.useful_s)})"
    )
    if restarts:
        sentence += (
            f"; {restarts} restart{'s' if restarts > 1 else ''} cost {in_units(repeated)} of steps "
            f"done again and {in_units(goodput.between_s)} between attempts"
        )
    yield Finding(
        weight=1 - goodput.share,
        sentence=sentence + ".",
        evidence=f"{restarts + 1} attempt{'s' if restarts else ''}, first start to last end",
        key="train.checkpoint.every" if repeated > MUCH_BUBBLE * goodput.wall_s else "",
    )


def _explain_no_steps(job: Job, analysis: Analysis, wall_s: float) -> Finding:
    """A finding for runs whose steps, or the times of these, are not known."""
    many = len(analysis.goodput.attempts)
    ran = f"The run took {in_units(wall_s)}" + (f" in {many} attempts" if many > 1 else "")
    failed = len(job.exits) and int((job.exits["code"].astype(float) != 0).sum())
    if len(job.exits):
        ranks = f"{len(job.exits)} rank{'s' if len(job.exits) > 1 else ''}"
        ran += f"; {ranks} ended, " + (f"{failed} of them badly" if failed else "all of them well")
    table = analysis.curves.table
    if len(table):
        what = f"the last step that lines tell of is {int(table['step'].max())}, and no line or "
        what += "time of writing tells how long one took"
    else:
        what = "no line of its logs was understood as a step, so nothing is said about steps"
    return Finding(
        weight=0.0,
        sentence=f"{ran}; {what}.",
        evidence="exit/<rank>.json, and the logs of the nodes",
        key="progress" if job.plan.program in OWN_PROGRAMS and not len(table) else "",
    )


def _on_prediction(job: Job, analysis: Analysis) -> Iterator[Finding]:
    promised = job.plan.prediction
    later = analysis.times[analysis.times.duplicated("attempt")]
    if promised is None or not promised.step_s or later.empty:
        return
    median = float(later["took_s"].median())
    ratio = median / promised.step_s
    yield Finding(
        weight=abs(ratio - 1) if abs(ratio - 1) > MUCH_BUBBLE else 0.0,
        sentence=f"A step takes {in_units(median)}; the plan promised {in_units(promised.step_s)} "
        f"({ratio:.2f} times).",
        evidence=f"median of {len(later)} steps against plan.json",
        key="",
    )


MAKERS = (
    _on_pipeline,
    _on_balance,
    _on_communication,
    _on_stragglers,
    _on_outliers,
    _on_training,
    _on_memory,
    _on_goodput,
    _on_prediction,
    list_gaps,
)
"""Every function that yields findings, in no certain order: their weights sort them."""
