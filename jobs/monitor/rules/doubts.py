"""Reasons why a known line of a log cannot be what ended the job.

A program may catch an exception and print it, a rank may report the failure of another rank, and an
hour-old line did not end the job. Such a line is shown, but not as the cause, and its remedy is not
given (docs/facts.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from varuna_core.facts.catalogue.known_line import KnownLine, Proof, Scope
from varuna_core.records.exits import BY_EXCEPTION, RankExit
from vjob.jobs.monitor.log_lines.errors import find_row
from vjob.jobs.monitor.log_lines.raised import may_have_ended
from vjob.jobs.monitor.model.snapshot import Line, Snapshot
from vjob.jobs.monitor.rules.base import find_failed
from vjob.jobs.monitor.rules.pace import find_pace_s, find_step_at
from vjob.jobs.schedulers.job import JobState

CLOCKS_S = 5.0
"""Seconds by which the clocks of two nodes may differ."""


class Doubt(str, Enum):
    """Reasons why a line is not the cause of an end."""

    OTHER_RANK = "other-rank"
    """The line's rank did not fail, or failed after another rank."""
    CAUGHT = "caught"
    """The line reports an exception that did not end its process: the process exited with another
    code, a later exception ended it, or the exception was in another thread."""
    OLD = "old"
    """The line was written too long before the end."""
    WENT_ON = "went-on"
    """Steps were done after the line."""


def weigh_lines(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with a doubt on each line that cannot be the cause of the job's end."""
    lines = tuple(_weigh(line, snapshot) for line in snapshot.errors)
    fatal = snapshot.fatal
    if fatal is not None and _weigh(fatal, snapshot).doubt:
        fatal = None
    return replace(snapshot, errors=lines, fatal=fatal)


def _weigh(line: Line, snapshot: Snapshot) -> Line:
    row = find_row(line.kind)
    if row is None or row.proof not in (Proof.CAUSE, Proof.FALLOUT):
        return line
    exits = {rank.rank: rank.exit for rank in snapshot.ranks if rank.exit is not None}
    doubt = _find_doubt(line, row, exits, snapshot)
    return line if doubt is None else replace(line, doubt=doubt.value)


def _find_doubt(
    line: Line, row: KnownLine, exits: Mapping[int, RankExit], snapshot: Snapshot
) -> Doubt | None:
    own = exits.get(line.rank) if line.rank is not None else None
    if row.scope is not Scope.RANK:  # of the kernel or the scheduler, whoever's log has it
        is_old = own is not None and line.last_at is not None
        is_old = is_old and own.ended - line.last_at > row.within_s  # type: ignore[union-attr, operator]
        return Doubt.OLD if is_old else None
    first = find_failed(snapshot)
    if own is not None and row.first_failed_only and not _failed_first(own, first):
        return Doubt.OTHER_RANK
    lives = own is None and bool(snapshot.ranks)  # then how it ends is still open
    if not (lives and line.raised == "printed") and not may_have_ended(
        line, own, _find_code(snapshot)
    ):
        return Doubt.CAUGHT
    if line.last_at is None:
        is_open = own is None and not _is_reported(line, snapshot)
        return Doubt.WENT_ON if line.is_before_steps and is_open else None
    if own is not None and own.ended - line.last_at > row.within_s:
        return Doubt.OLD
    return Doubt.WENT_ON if went_on(line, snapshot, own) else None


def _is_reported(line: Line, snapshot: Snapshot) -> bool:
    """Return True if the line is the last exception of its rank, and a launcher (or srun, for a
    task) reports that this rank ended by an exception; later steps are then from other ranks."""
    failed = [one for one in snapshot.reported_exits if one.code == BY_EXCEPTION]
    is_named = any(line.rank in (one.rank, one.task) for one in failed)
    return is_named and line.rank is not None and line.raised == "last"


def _failed_first(own: RankExit, first: RankExit | None) -> bool:
    """Return True for a rank that failed by itself, and not later than the first failed rank;
    clocks of two nodes may differ by CLOCKS_S."""
    if first is not None and own.rank == first.rank:
        return True
    if own.stopped or own.code == 0:
        return False
    if first is None:
        return True
    return own.ended <= first.ended + (0.0 if own.node == first.node else CLOCKS_S)


def _find_code(snapshot: Snapshot) -> int | None:
    """Return the exit code of a job whose ranks left no exits; None if not known."""
    jobs = snapshot.scheduler.jobs
    if len(jobs) != 1 or snapshot.ranks:
        return None
    if jobs[0].state == JobState.COMPLETED.value:
        return 0
    return jobs[0].code if jobs[0].state == JobState.FAILED.value else None


def went_on(line: Line, snapshot: Snapshot, own: RankExit | None = None) -> bool:
    """Return True if a step was done that can only have begun after the line was written; steps
    after the exit `own` of the line's rank belong to other ranks and do not count.

    Without the agent's time of the line, or times of steps, only the last step is compared.
    """
    until = math.inf if own is None else own.ended + CLOCKS_S
    points = snapshot.progress.points[-MOST_POINTS:] if snapshot.progress is not None else ()
    usual = find_pace_s(snapshot) or 0.0
    steps = [(point.at, point.step_s or usual) for point in points if point.at is not None]
    if line.last_at is not None and steps:
        return any(line.last_at + 1.0 + 2.0 * took < at <= until for at, took in steps)
    times = [at for at in (line.at, line.last_at, line.written_by) if at is not None]
    step_at = find_step_at(snapshot)
    return bool(times) and step_at is not None and min(times) + CLOCKS_S < step_at <= until


MOST_POINTS = 50
"""Number of last steps that are examined."""
