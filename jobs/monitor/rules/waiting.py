"""Rules for a job that waits: refused, pending, suspended, requeued, morphing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varuna_core.records.files import describe_room
from varuna_core.records.formatting import format_duration
from vjob.jobs.monitor.model.snapshot import Health, JobRow, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    RUNNING,
    advise,
    context_of_job,
    format_names,
    is_between,
    is_coming_again,
    is_over,
    rows_in,
)
from vjob.jobs.schedulers.job import SchedulerJob, parse_name
from vjob.jobs.schedulers.reasons import explain_reason, find_reason

ORPHAN_S = 600.0
"""A submit that left no job after so long was cut off."""
FRESH_S = 120.0
"""The scheduler shows a job after so long at the latest."""


def refused(snapshot: Snapshot) -> Verdict | None:
    if snapshot.record_state != "refused":
        return None
    return Verdict(
        health=Health.REFUSED,
        rule="refused",
        reason=f"it was not submitted: {snapshot.message or 'the scheduler refused it'}",
        advice="fix what the message names and submit again",
    )


def submitting(snapshot: Snapshot) -> Verdict | None:
    """Also just after: the scheduler may not show the job yet."""
    if snapshot.scheduler.jobs or snapshot.attempt is not None:
        return None
    age = snapshot.now - snapshot.submitted if snapshot.submitted is not None else 0.0
    if snapshot.record_state == "submitted" and age < FRESH_S:
        return Verdict(health=Health.PENDING, rule="submitting", reason="it was submitted just now")
    if snapshot.record_state != "intent":
        return None
    if age > ORPHAN_S:
        return Verdict(
            health=Health.UNKNOWN,
            rule="submitting",
            reason=f"its submit began {format_duration(age)} ago and left no job",
            advice="vjob list adopts a job that there is; else submit again",
        )
    return Verdict(health=Health.PENDING, rule="submitting", reason="it is being submitted")


def never_starts(snapshot: Snapshot) -> Verdict | None:
    why = explain_reason(
        [build_info(row) for row in rows_in(snapshot, ("PENDING",))], context_of_job(snapshot)
    )
    if not why:
        return None
    return Verdict(
        health=Health.PENDING,
        rule="never starts",
        reason=why,
        advice=advise(snapshot, "cancel JOB") + ", fix the conf, and submit again",
        never_starts=True,
        facts=_facts(snapshot),
    )


def requeued(snapshot: Snapshot) -> Verdict | None:
    if is_between(snapshot):
        reason = "the scheduler started it again, its next attempt is about to begin"
        if snapshot.outcome is not None and snapshot.restarts:
            number = f"{snapshot.restarts} of {snapshot.max_restarts}"
            reason = f"it starts again in a moment, restart {number}, after: "
            reason += snapshot.outcome.reason
        return Verdict(health=Health.REQUEUED, rule="requeued", reason=reason)
    if is_coming_again(snapshot) and not is_over(snapshot):
        return Verdict(
            health=Health.REQUEUED,
            rule="requeued",
            reason=str((snapshot.stop or {}).get("reason")),
        )
    rows = rows_in(snapshot, ("PENDING", "REQUEUED"))
    if not rows or rows_in(snapshot, RUNNING) or is_over(snapshot):
        return None
    if not any(row.state == "REQUEUED" or row.restarts for row in rows) and not snapshot.earlier:
        return None
    times = max(max(row.restarts for row in rows), len(snapshot.earlier), 1)
    last = snapshot.earlier[-1].reason if snapshot.earlier else ""
    why = f", after: {last}" if last else ""
    waits = _format_wait(snapshot, rows[0])
    return Verdict(
        health=Health.REQUEUED,
        rule="requeued",
        reason=f"it waits to start again, requeued {times} time(s){why}; {waits}",
        facts=_facts(snapshot),
        advice=advise(snapshot, "logs JOB --errors"),
    )


def pending(snapshot: Snapshot) -> Verdict | None:
    """Also where only some jobs of a split run started: their ranks wait for the others."""
    rows = rows_in(snapshot, ("PENDING", "REQUEUED"))
    if not rows or is_over(snapshot) or snapshot.went_at is not None:
        return None
    row = rows[0]
    whose = f" (group {row.group})" if row.group else ""
    others = len(rows_in(snapshot, RUNNING))
    beside = f"; {others} other job(s) of the run wait for it" if others else ""
    start = f", expected to start {row.start}" if row.start else ""
    return Verdict(
        health=Health.PENDING,
        rule="pending",
        reason=f"job {row.id}{whose} pends: {_format_wait(snapshot, row)}{start}{beside}",
        facts=_facts(snapshot),
        advice=_advise_wait(snapshot, row),
    )


def suspended(snapshot: Snapshot) -> Verdict | None:
    rows = rows_in(snapshot, ("SUSPENDED",))
    if not rows or is_over(snapshot):
        return None
    return Verdict(
        health=Health.PENDING,
        rule="suspended",
        reason=f"job {rows[0].id} is suspended by the scheduler or an admin",
        advice=f"wait, or `scontrol resume {rows[0].id}` where that is allowed",
    )


def no_room(snapshot: Snapshot) -> Verdict | None:
    """No attempt runs: the last one ended for want of room, and there is none yet."""
    folder = snapshot.waits_for_room
    if not folder or is_over(snapshot):
        return None
    room = describe_room(Path(folder))
    return Verdict(
        health=Health.FAILING,
        rule="no room",
        reason=f"waiting for room in {folder}" + (f": {room}" if room else ""),
        advice="make room there, and the next attempt starts; " + advise(snapshot, "cancel JOB"),
    )


def morphing(snapshot: Snapshot) -> Verdict | None:
    if not snapshot.morph or is_over(snapshot):
        return None
    if rows_in(snapshot, ("PENDING", "REQUEUED")) and not rows_in(snapshot, RUNNING):
        return None  # it comes back once the scheduler starts it
    return Verdict(
        health=Health.MORPHING,
        rule="morphing",
        reason=f"it goes from {snapshot.morph} and takes up its last checkpoint there",
    )


def _format_wait(snapshot: Snapshot, row: JobRow) -> str:
    if row.reason == "Dependency" and (snapshot.after or snapshot.after_any):
        return f"{row.reason}: it waits for {format_chain(snapshot.after, snapshot.after_any)}"
    known = find_reason(row.reason)
    if known is None:
        return row.reason or "the scheduler gives no reason"
    is_requeued = row.reason == "BeginTime" and (row.restarts or snapshot.earlier)
    more = ", which Slurm sets some two minutes after a requeue" if is_requeued else ""
    return f"{row.reason}: {known.explain(context_of_job(snapshot), row.id)}{more}"


def _advise_wait(snapshot: Snapshot, row: JobRow) -> str:
    before = (*snapshot.after, *snapshot.after_any)
    if row.reason == "Dependency" and before:
        return f"wait; vjob status {before[0]}"
    return "wait; `squeue --start` tells more"


def format_chain(after: Sequence[str], after_any: Sequence[str]) -> str:
    """`a to end well, and for b to end`, of runs that must be over first."""
    parts = [f"{format_names(after)} to end well"] if after else []
    parts += [f"{format_names(after_any)} to end"] if after_any else []
    return ", and for ".join(parts)


def _facts(snapshot: Snapshot) -> tuple[str, ...]:
    if snapshot.submitted is None:
        return ()
    return (f"submitted {format_duration(snapshot.now - snapshot.submitted)} ago",)


def build_info(row: JobRow) -> SchedulerJob:
    """The row as jobs/schedulers/reasons.py wants it."""
    code, _, number = row.exit_code.partition(":")
    return SchedulerJob(
        id=row.id,
        state=parse_name(row.state),
        native_word=row.word or row.state,
        reason_text=row.reason,
        code=int(code) if code.isdigit() else None,
        signal=int(number) if number.isdigit() else None,
    )
