"""`choose_end`: derive the end of a run from the ends of its last attempt and of its job.

Each of them knows only half. The ranks know that they were asked to end, but not why; the scheduler
knows that it ended a job at its limit, but not that a rank had failed before.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import IntEnum
from typing import Optional

from varuna_core.facts.cause import BY_SCHEDULER, OF_NODE, End, EndCause
from varuna_core.facts.known import Sure


class Witness(IntEnum):
    """Witnesses of an end, in order of precedence (docs/causes.md): a later witness counts only if
    no earlier one has reported."""

    OUTSIDE = 1
    RANK = 2
    NODE = 3
    JOB = 4
    LINE = 5
    SCRIPT = 6
    RECORD = 7


FALLOUT = re.compile(
    r"\b(RankFailed|ChannelClosed|Dist(Network|Store|Backend)?Error|BrokenPipeError"
    r"|ConnectionError|Connection(Reset|Refused|Aborted)Error)\b"
    r"|[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe"
)
"""Words in the last line of a rank that lost a peer: errors of the engine, of torch and of gloo."""
TOLD_SIGNALS = frozenset(("SIGTERM", "SIGINT", "SIGKILL"))
"""Signals by which ranks are killed when the scheduler ends their job."""
LOST_HOST = frozenset(
    (
        EndCause.NODE_FAIL,
        EndCause.BOOT_FAIL,
        EndCause.SUPERVISOR_DIED,
        EndCause.OOM_JOB,
        EndCause.LAUNCH_FAILED,
        EndCause.NO_OUTPUT,
        EndCause.BATCH_KILLED,
    )
)
"""Causes of a job's end that take its ranks down with it."""
ECHOES = frozenset(
    (
        EndCause.CANCELLED,
        EndCause.STOPPED,
        EndCause.NODE_LEFT,
        EndCause.UNKNOWN,
        *BY_SCHEDULER,
    )
)
"""Causes of an attempt's end that say only that something ended it, not what went wrong in it."""


def has_own_cause(attempt: End) -> bool:
    """True if a rank failed by itself, or if a node was seen to be lost.

    Ranks without an exit file prove nothing: the ranks that the scheduler kills first leave none,
    either.
    """
    if attempt.cause is EndCause.RANK_SIGNAL:
        return attempt.signal not in TOLD_SIGNALS
    if attempt.cause is EndCause.AGENT_DIED:
        return all(one.sure is not Sure.INFERRED for one in attempt.evidence[:1])
    return attempt.cause not in ECHOES


def choose_end(attempt: Optional[End], job: Optional[End]) -> End:
    """Return the end of a run; UNKNOWN if neither the attempt nor the job has one."""
    if attempt is None or job is None:
        return attempt or job or End(EndCause.UNKNOWN)
    if job.cause is EndCause.OOM_JOB and attempt.signal == "SIGKILL":
        return replace(attempt, cause=EndCause.OOM_HOST, evidence=attempt.evidence + job.evidence)
    ends_ranks = job.cause in BY_SCHEDULER or job.cause in LOST_HOST
    if not ends_ranks or has_own_cause(attempt):
        return attempt
    # The first witness of the job comes first; what the ranks left stands behind it.
    return replace(
        job,
        code=attempt.code if job.code is None else job.code,
        node=job.node or (attempt.node if _may_name_node(attempt, job) else ""),
        at=job.at or attempt.at,
        started=True,
        evidence=job.evidence + attempt.evidence,
    )


def _may_name_node(attempt: End, job: End) -> bool:
    """True if the job lost a node, and the node that the attempt names may be that node.

    It may be if its agent left no exits, or if a rank died of SIGKILL, which a dying node sends.
    """
    if job.cause not in OF_NODE:
        return False
    return attempt.cause is EndCause.AGENT_DIED or attempt.signal == "SIGKILL"
