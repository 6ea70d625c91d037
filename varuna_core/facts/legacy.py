"""Find how a run ended from the run folder of an earlier version. Only this module matches English
sentences.

Such folders have no `end` in record.json and no end.json. The first of these that settles the cause
is used: an `end`, the kind of stop, exit code 112 or 113 and the culprit, the scheduler's word,
cancel events, and the beginnings of messages. If none does, the cause is UNKNOWN. Nothing in the
folder is changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping, Optional, Sequence

from varuna_core.facts.cause import Actor, End, EndCause, parse_end
from varuna_core.facts.deciding import choose_end, has_own_cause
from varuna_core.facts.known import Evidence, Sure
from varuna_core.facts.sentences import LAST_LINE

SOURCE = "legacy"
NOT_READY = 112
NODE_LOST = 113
HAS_LEFT = "has left: its job ends, or somebody ended its agent"
BY_SCHEDULER = "from the scheduler (cancel or time limit)"
WORDS: Mapping[str, EndCause] = {
    "COMPLETED": EndCause.COMPLETED,
    "CANCELLED": EndCause.CANCELLED,
    "TIMEOUT": EndCause.TIME_LIMIT,
    "DEADLINE": EndCause.DEADLINE,
    "PREEMPTED": EndCause.PREEMPTED,
    "NODE_FAIL": EndCause.NODE_FAIL,
    "BOOT_FAIL": EndCause.BOOT_FAIL,
    "OUT_OF_MEMORY": EndCause.OOM_JOB,
}
"""The scheduler's words as records store them in `verdict`, and their causes."""
SUPERVISED = ("local", "ssh")
"""Schedulers whose jobs are reported to have lost a node when their supervisor was killed."""
BEGINNINGS: Mapping[str, EndCause] = {
    "never started: ": EndCause.DEPENDENCY_FAILED,
    "the supervisor of this job was killed": EndCause.SUPERVISOR_DIED,
    "its supervisor did not start": EndCause.SUPERVISOR_NOT_STARTED,
    "RaisedSignal:53": EndCause.NO_OUTPUT,
    "JobLaunchFailure": EndCause.LAUNCH_FAILED,
    "launch failed": EndCause.LAUNCH_FAILED,
    "the batch script was ended by ": EndCause.BATCH_KILLED,
    "the time limit was reached": EndCause.TIME_LIMIT,
    "preempted": EndCause.PREEMPTED,
    "cancelled": EndCause.CANCELLED,
    "slurm has forgotten the job": EndCause.FORGOTTEN,
    "local has forgotten the job": EndCause.FORGOTTEN,
    "ssh has forgotten the job": EndCause.FORGOTTEN,
}
"""Beginnings of the messages of ended runs, and the causes that they stand for."""


def read_stop_cause(stop: Mapping[str, Any]) -> Optional[EndCause]:
    """Return the cause that only an old stop.json's reason gives; None if its kind is enough."""
    said = str(stop.get("reason"))
    if stop.get("kind") != "lost":
        return None
    if BY_SCHEDULER in said:
        return EndCause.STOPPED
    return EndCause.NODE_LEFT if HAS_LEFT in said else None


def read_attempt_end(outcome: Mapping[str, Any], stop: Optional[End]) -> End:
    """Return the end of an attempt from its outcome.json and, if it has one, its stop.json."""
    code, reason = int(outcome["code"]), str(outcome["reason"])
    rank, node = outcome.get("culprit_rank"), str(outcome.get("culprit_node") or "")
    signal = str(outcome.get("culprit_signal") or "")
    witness = Evidence(SOURCE, Sure.INFERRED, text=reason)
    end = End(EndCause.UNKNOWN, code=code, node=node, at=outcome.get("ended"), evidence=(witness,))
    if code == 0:
        is_requeue = stop is not None and stop.cause is EndCause.REQUEUED
        cause = EndCause.REQUEUED if is_requeue else EndCause.COMPLETED
        return replace(end, cause=cause, actor=Actor.RANK)
    if rank is not None and code != NODE_LOST:
        cause = EndCause.RANK_SIGNAL if signal else EndCause.RANK_EXIT
        actor = Actor.UNKNOWN if signal else Actor.RANK
        how = f"was ended by {signal}" if signal else f"exited {code}"
        last = reason.partition(f" {how}: ")[2]
        return replace(
            end,
            cause=cause,
            actor=actor,
            signal=signal,
            rank=rank,
            evidence=(witness, Evidence(LAST_LINE, Sure.INFERRED, text=last)),
        )
    if rank is not None:
        is_seen = stop is not None and has_own_cause(stop)
        cause = EndCause.NODE_SILENT if is_seen else EndCause.AGENT_DIED
        return replace(end, cause=cause, actor=Actor.NODE)
    if stop is not None:
        return replace(end, cause=stop.cause, actor=stop.actor, by=stop.by, node=node or stop.node)
    if code == NOT_READY:
        return replace(end, cause=EndCause.NOT_MET, actor=Actor.AGENT)
    return end


def read_end(
    record: Mapping[str, Any],
    outcome: Optional[Mapping[str, Any]],
    stop: Optional[End],
    events: Sequence[Mapping[str, Any]],
) -> Optional[End]:
    """Return the end of a run from its record.json; None if the record mentions no end."""
    written = parse_end(record.get("end"))
    if written is not None:
        return written
    message, state = str(record.get("message") or ""), record.get("state")
    witness = (Evidence(SOURCE, Sure.INFERRED, text=message),)
    if state == "refused":
        is_lost = message.startswith("the submit was cut off")
        return End(EndCause.SUBMIT_LOST if is_lost else EndCause.REFUSED, evidence=witness)
    if state != "ended":
        return None
    attempt = None if outcome is None else read_attempt_end(outcome, stop)
    job = _read_job(record, message, events, is_started=attempt is not None)
    end = choose_end(attempt, job)
    if end.cause is EndCause.UNKNOWN and not end.evidence:
        return replace(end, evidence=witness)
    is_asked = any(event.get("kind") == "cancel-asked" for event in events)
    if end.cause is EndCause.COMPLETED and is_asked:
        return replace(end, cause=EndCause.CANCELLED, actor=Actor.VJOB)
    return end


def _read_job(
    record: Mapping[str, Any],
    message: str,
    events: Sequence[Mapping[str, Any]],
    *,
    is_started: bool,
) -> Optional[End]:
    """Return the end by the scheduler's last word on the job, if the record has it."""
    cause = WORDS.get(str(record.get("verdict")))
    said = next((BEGINNINGS[x] for x in BEGINNINGS if message.startswith(x)), None)
    if cause is EndCause.NODE_FAIL and record.get("scheduler") in SUPERVISED:
        cause = EndCause.SUPERVISOR_DIED
    if cause is None or (cause is EndCause.CANCELLED and said is EndCause.DEPENDENCY_FAILED):
        cause = said
    if cause is None or cause is EndCause.COMPLETED:
        return None
    evidence = Evidence(SOURCE, Sure.INFERRED, text=str(record.get("verdict") or ""))
    end = End(cause, Actor.SCHEDULER, evidence=(evidence,), started=is_started or None)
    if cause is EndCause.DEPENDENCY_FAILED:
        run = message.partition(": ")[2].partition(",")[0]
        return replace(end, by=run)
    if cause is EndCause.SUPERVISOR_DIED:
        return replace(end, actor=Actor.UNKNOWN)
    if cause is not EndCause.CANCELLED:
        return end
    is_asked = any(event.get("kind") == "cancel-asked" for event in events)
    by = message.partition(" by ")[2].partition(" before ")[0]
    if is_asked or message.startswith("cancelled with vjob cancel"):
        return replace(end, actor=Actor.VJOB)
    if not by:
        return replace(end, actor=Actor.UNKNOWN)
    return replace(end, actor=Actor.ADMIN if by == "root" else Actor.USER, by=by)
