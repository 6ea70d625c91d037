"""What is not known of a job, and why: silence must not be taken for health."""

from __future__ import annotations

from collections.abc import Iterator

from vjob.reports.analysis.finding import Finding, in_units
from vjob.reports.analysis.measures import Analysis
from vjob.reports.load.tables import Job

DOUBTFUL_NS = 1_000_000
"""Clocks that agree to within less are good enough."""


def list_gaps(job: Job, analysis: Analysis) -> Iterator[Finding]:
    """Missing traces and details, doubtful clocks, files that were not read whole."""
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
            evidence="no trace/<rank>.jsonl",
            key="profile.timeline",
        )
    elif not analysis.steps:
        yield Finding(
            weight=0.0,
            sentence="The traces hold no details of any step.",
            evidence="step totals only",
            key="train.log_every",
        )
    for step in analysis.steps[:1]:
        if step.trouble:
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
