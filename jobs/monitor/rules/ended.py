"""Rules for a job that is over: DONE, or DEAD with its cause; and for what nobody runs any more."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.training_log import parse_phase
from vjob.jobs.monitor.log_lines.errors import find_row, first_root, is_kind
from vjob.jobs.monitor.model.snapshot import Line, Snapshot
from vjob.jobs.monitor.model.verdict import Health, Verdict
from vjob.jobs.monitor.rules.base import (
    OVER_WORDS,
    advise,
    find_failed,
    find_life,
    is_over,
    join,
    node_of_rank,
    say_step,
)
from vjob.jobs.monitor.rules.causes import find_cause, say_root
from vjob.jobs.monitor.rules.pace import job_limit_s

OLD_S = 1800.0
"""A job that nobody runs, as far as can be told, is dead after so long a silence."""
TRAINING_DONE = "after training is done"


def done(snapshot: Snapshot) -> Verdict | None:
    """Over and well: ranks exited 0, or the logs say that the last step was done."""
    if is_over(snapshot):
        is_done = _ended_well(snapshot)
    else:
        is_done = not snapshot.scheduler.jobs and _said_done(snapshot)
    if not is_done:
        return None
    short = is_short(snapshot)
    how = snapshot.message or (snapshot.outcome.reason if snapshot.outcome else "")
    return Verdict(
        health=Health.DONE,
        rule="done",
        reason=join([_say_end(snapshot), how], ": "),
        facts=("it stopped before its last step",) if short else (),
        advice=advise(snapshot, "report JOB"),
    )


def _say_end(snapshot: Snapshot) -> str:
    """A job that tells of no steps has none to be counted."""
    after = "" if snapshot.progress is None else f" after {say_step(snapshot)}"
    return f"it ended well{after}"


def dead(snapshot: Snapshot) -> Verdict | None:
    if not is_over(snapshot):
        return None
    cause = find_cause(snapshot)
    row = find_row(cause.line.kind) if cause.line is not None else None
    remedy = cause.remedy or (row.remedy if row is not None else "")
    return Verdict(
        health=Health.DEAD,
        rule="dead",
        reason=cause.reason,
        evidence=_evidence(snapshot, cause.line),
        facts=_facts(snapshot),
        advice=join([remedy, advise(snapshot, "logs JOB --errors", "report JOB")], "; "),
        node=cause.node,
        rank=cause.rank,
    )


def abandoned(snapshot: Snapshot) -> Verdict | None:
    """Nobody is known to run it, and it has been silent for long: a folder of old logs."""
    if is_over(snapshot) or snapshot.record_state == "intent":
        return None
    if snapshot.scheduler.jobs or snapshot.scheduler.problem:
        return None
    life = find_life(snapshot)
    silence = snapshot.now - life if life is not None else None
    if silence is None or silence <= max(OLD_S, job_limit_s(snapshot)):
        return None
    root = first_root(snapshot.errors)
    stopped = f"no sign of life for {format_duration(silence)}, it stopped at {say_step(snapshot)}"
    if root is None and not is_short(snapshot):
        return Verdict(
            health=Health.UNKNOWN,
            rule="abandoned",
            reason=f"{stopped}; nothing tells how it ended",
            advice=advise(snapshot, "logs JOB"),
        )
    row = find_row(root.kind) if root is not None else None
    said = f"{say_root(root)}; {stopped}" if root is not None else stopped
    return Verdict(
        health=Health.DEAD,
        rule="abandoned",
        reason=said,
        evidence=_evidence(snapshot, root),
        advice=join([row.remedy if row else "", advise(snapshot, "logs JOB --errors")], "; "),
        node=root.node if root is not None else "",
        rank=root.rank if root is not None else None,
    )


def is_short(snapshot: Snapshot) -> bool:
    """It is known to lack steps."""
    progress = snapshot.progress
    return bool(progress and progress.num_steps and progress.step < progress.num_steps)


def _ended_well(snapshot: Snapshot) -> bool:
    jobs = snapshot.scheduler.jobs
    if snapshot.outcome is not None and snapshot.outcome.code != 0:
        return False
    if snapshot.outcome is None and find_failed(snapshot) is not None:
        return False
    if jobs and all(row.state in OVER_WORDS for row in jobs):
        is_completed = all(row.state == "COMPLETED" for row in jobs)
        return is_completed or (snapshot.outcome is not None and not is_short(snapshot))
    if snapshot.record_state == "ended" and snapshot.record_verdict:
        return snapshot.record_verdict == "COMPLETED"
    return snapshot.outcome is not None


def _said_done(snapshot: Snapshot) -> bool:
    progress = snapshot.progress
    if progress is not None and progress.num_steps and progress.step >= progress.num_steps:
        return True
    for node in snapshot.nodes:
        for text in node.out:
            phase = parse_phase(text)
            if phase is not None and phase[0].startswith(TRAINING_DONE):
                return True
    return False


def _evidence(snapshot: Snapshot, first: Line | None) -> tuple[Line, ...]:
    """The telling line, and the fallout beside it."""
    lines: Sequence[Line] = snapshot.errors
    others = [line for line in lines if line is not first and is_kind(line, "fallout")]
    return (*((first,) if first is not None else ()), *others[:2])


def _facts(snapshot: Snapshot) -> tuple[str, ...]:
    facts = []
    if snapshot.progress is not None:
        facts.append(f"it came to {say_step(snapshot)}")
    if snapshot.checkpoint_step is not None:
        facts.append(f"the last checkpoint is of step {snapshot.checkpoint_step}")
    if snapshot.outcome is not None and snapshot.outcome.culprit_rank is not None:
        where = node_of_rank(snapshot, snapshot.outcome.culprit_rank)
        code = snapshot.outcome.code
        facts.append(f"exit code {code}" + (f", first on {where}" if where else ""))
    return tuple(facts)
