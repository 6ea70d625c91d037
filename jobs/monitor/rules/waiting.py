"""Rules for a job that waits: refused, pending, suspended, requeued, morphing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varuna_core.facts.catalogue.known_line import Fate, KnownLine
from varuna_core.facts.catalogue.remedies import do
from varuna_core.facts.finding import Finding
from varuna_core.facts.known import NotKnown
from varuna_core.facts.remedy import Action, Remedy, Target
from varuna_core.records.files import describe_room
from vjob.jobs.monitor.model.snapshot import Health, JobRow, Snapshot, Verdict
from vjob.jobs.monitor.rules.base import (
    CANCEL,
    RUNNING,
    cancel,
    conclude,
    is_between,
    is_coming_again,
    is_over,
    rows_in,
    show,
)
from vjob.jobs.schedulers.reasons import find_reason

ORPHAN_S = 600.0
"""Seconds after which a submit without a job counts as interrupted."""
FRESH_S = 120.0
"""Most seconds until the scheduler shows a new job."""
RECENT_S = 5.0
"""Age in seconds above which the advice to act on a job says how old the scheduler's answer is."""
NO_START = NotKnown("the scheduler gives no expected start time yet")
DEPENDENCY = "Dependency"
"""The catalogue's row for a job that waits for other jobs."""
WAIT = Remedy(Action.WAIT)
SHOW_START = Remedy(
    Action.INSPECT, Target.EXPECTED_START, detail="for the start that the scheduler expects"
)
RESUBMIT = Remedy(Action.RESUBMIT)
SETTLED = (Action.RELEASE, Action.ASK_ADMIN, Action.CANCEL)
"""Remedies after which a job that never starts need not be submitted again, or that include a
submit of their own."""


def refused(snapshot: Snapshot) -> Verdict | None:
    if snapshot.record_state != "refused":
        return None
    said = snapshot.message or NotKnown("the scheduler's message was not kept")
    fix = do("fix what the message names and submit again")
    return conclude(Health.REFUSED, "refused", {"said": said}, remedies=[fix])


def submitting(snapshot: Snapshot) -> Verdict | None:
    """Return PENDING during a submit and shortly after, when the scheduler may not show the job
    yet; UNKNOWN if the submit was interrupted."""
    if snapshot.scheduler.jobs or snapshot.attempt is not None:
        return None
    age = snapshot.now - snapshot.submitted if snapshot.submitted is not None else 0.0
    values = {"age_s": age, "state": snapshot.record_state, "is_cut_off": False}
    if snapshot.record_state == "submitted" and age < FRESH_S:
        return conclude(Health.PENDING, "submitting", values)
    if snapshot.record_state != "intent":
        return None
    if age > ORPHAN_S:
        return conclude(
            Health.UNKNOWN,
            "submitting",
            {**values, "is_cut_off": True},
            remedies=[do("`vjob list` finds the job if it exists; otherwise submit again")],
        )
    return conclude(Health.PENDING, "submitting", values)


def never_starts(snapshot: Snapshot) -> Verdict | None:
    for row in rows_in(snapshot, ("PENDING",)):
        known = find_reason(row.reason)
        if known is not None and known.fate is Fate.NEVER:
            return conclude(
                Health.PENDING,
                "never starts",
                {
                    "job": row.id,
                    "reason": row.reason,
                    "meaning_of_reason": known.meaning,
                    "waiting": row.waiting,
                    **_age_values(snapshot),
                },
                remedies=_mend(known),
                never_starts=True,
                details=_list_details(snapshot),
            )
    return None


def _mend(known: KnownLine) -> tuple[Remedy, ...]:
    """Return the remedies for a reason to wait; if they change the job's request, also cancel the
    job first and submit it again afterwards."""
    if any(one.action in SETTLED and not one.instead for one in known.remedies):
        return known.remedies
    return (CANCEL, *known.remedies, RESUBMIT)


def _age_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the age of an answer of the scheduler that may be out of date."""
    age_s = snapshot.scheduler.age_s
    return {"answer_age_s": age_s} if age_s > RECENT_S else {}


def requeued(snapshot: Snapshot) -> Verdict | None:
    if is_between(snapshot):
        values: dict[str, Any] = {"state": "starts"}
        if snapshot.outcome is not None and snapshot.restarts:
            values = {
                "state": "restarts",
                "number": snapshot.restarts,
                "most": snapshot.max_restarts,
                "after": snapshot.outcome.reason,
            }
        return conclude(Health.REQUEUED, "requeued", values)
    if is_coming_again(snapshot) and not is_over(snapshot):
        said = str((snapshot.stop or {}).get("reason"))
        return conclude(Health.REQUEUED, "requeued", {"state": "saved", "said": said})
    rows = rows_in(snapshot, ("PENDING", "REQUEUED"))
    if not rows or rows_in(snapshot, RUNNING) or is_over(snapshot):
        return None
    if not any(row.state == "REQUEUED" or row.restarts for row in rows) and not snapshot.earlier:
        return None
    times = max(max(row.restarts for row in rows), len(snapshot.earlier), 1)
    unknown = NotKnown("no earlier attempt recorded how it ended")
    return conclude(
        Health.REQUEUED,
        "requeued",
        {
            "state": "waits",
            "times": times,
            "after": snapshot.earlier[-1].reason if snapshot.earlier else unknown,
            "cause": rows[0].earlier[-1] if rows[0].earlier else NotKnown("accounting has none"),
            **_wait_values(snapshot, rows[0]),
        },
        details=_list_details(snapshot),
        remedies=show(snapshot, Target.ERRORS),
    )


def pending(snapshot: Snapshot) -> Verdict | None:
    """Return PENDING if a job is waiting, also if only some jobs of a split run have started, whose
    ranks wait for the others."""
    rows = rows_in(snapshot, ("PENDING", "REQUEUED"))
    if not rows or is_over(snapshot) or snapshot.went_at is not None:
        return None
    row = rows[0]
    return conclude(
        Health.PENDING,
        "pending",
        {
            "job": row.id,
            "group": row.group,
            "num_waiting": len(rows_in(snapshot, RUNNING)),
            **_wait_values(snapshot, row),
        },
        details=_list_details(snapshot),
        remedies=_list_waits(snapshot, row),
    )


def suspended(snapshot: Snapshot) -> Verdict | None:
    rows = rows_in(snapshot, ("SUSPENDED",))
    if not rows or is_over(snapshot):
        return None
    resume = do(f"wait, or `scontrol resume {rows[0].id}` where that is allowed")
    values = {"job": rows[0].id, **_age_values(snapshot)}
    return conclude(Health.PENDING, "suspended", values, remedies=[resume])


def no_room(snapshot: Snapshot) -> Verdict | None:
    """Return FAILING if no attempt runs because the disk is still full."""
    folder = snapshot.waits_for_room
    if not folder or is_over(snapshot):
        return None
    return conclude(
        Health.FAILING,
        "no room",
        {"folder": folder, "room": describe_room(Path(folder))},
        remedies=[
            Remedy(Action.MAKE_ROOM, detail="on that disk, then the next attempt starts"),
            *cancel(snapshot),
        ],
    )


def morphing(snapshot: Snapshot) -> Verdict | None:
    if not snapshot.morph or is_over(snapshot):
        return None
    if rows_in(snapshot, ("PENDING", "REQUEUED")) and not rows_in(snapshot, RUNNING):
        return None  # it comes back once the scheduler starts it
    return conclude(Health.MORPHING, "morphing", {"change": snapshot.morph})


def _waits_for_runs(row: JobRow) -> bool:
    known = find_reason(row.reason)
    return known is not None and known.name == DEPENDENCY


def _wait_values(snapshot: Snapshot, row: JobRow) -> dict[str, Any]:
    """Return the reason for a wait, its meaning, and the start that the scheduler expects."""
    known = find_reason(row.reason)
    is_chain = _waits_for_runs(row)
    return {
        "reason": row.reason or NotKnown("the scheduler gives no reason"),
        "meaning_of_reason": known.meaning if known is not None else "",
        "after_well": list(snapshot.after) if is_chain else [],
        "after_any": list(snapshot.after_any) if is_chain else [],
        "dependency": row.dependency,
        "waiting": row.waiting,
        "start": row.start or NO_START,
    }


def _list_waits(snapshot: Snapshot, row: JobRow) -> Sequence[Remedy]:
    before = (*snapshot.after, *snapshot.after_any)
    if _waits_for_runs(row) and before:
        return WAIT, do(f"vjob status {before[0]}")
    known = find_reason(row.reason)
    more = known.remedies if known is not None else ()
    return (WAIT, *more) if row.start else (WAIT, *more, SHOW_START)


def _list_details(snapshot: Snapshot) -> tuple[Finding, ...]:
    if snapshot.submitted is None:
        return ()
    return (Finding("submitted", values={"age_s": snapshot.now - snapshot.submitted}),)
