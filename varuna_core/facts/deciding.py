"""`choose_end`: the end of a run, from that of its last attempt and that of its job.

Each sees half. The ranks know that they were told to end, and not why; the scheduler knows that it
ended a job at its limit, and not that a rank had failed before.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import IntEnum
from typing import Optional

from varuna_core.facts.cause import BY_SCHEDULER, OF_NODE, End, EndCause
from varuna_core.facts.known import Sure


class Witness(IntEnum):
    """Witnesses of an end, the one that counts first (docs/causes.md): a later one is heard where
    none before it speaks."""

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
"""In the last words of a rank that lost another one: the engine's own, torch's and gloo's."""
TOLD_SIGNALS = frozenset(("SIGTERM", "SIGINT", "SIGKILL"))
"""Signals of which ranks die as the scheduler ends their job."""
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
"""Causes of a job that takes its ranks with it."""
ECHOES = frozenset(
    (
        EndCause.CANCELLED,
        EndCause.STOPPED,
        EndCause.NODE_LEFT,
        EndCause.UNKNOWN,
        *BY_SCHEDULER,
    )
)
"""Causes of an attempt that tell of somebody who ended it, not of what went wrong in it."""


def has_own_cause(attempt: End) -> bool:
    """True where a rank failed by itself, or a node was seen to be lost.

    Ranks without an exit file prove nothing: whoever the scheduler ends first leaves none.
    """
    if attempt.cause is EndCause.RANK_SIGNAL:
        return attempt.signal not in TOLD_SIGNALS
    if attempt.cause is EndCause.AGENT_DIED:
        return all(one.sure is not Sure.INFERRED for one in attempt.evidence[:1])
    return attempt.cause not in ECHOES


def choose_end(attempt: Optional[End], job: Optional[End]) -> End:
    """The end of a run; UNKNOWN where neither tells."""
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
    """True where a node was lost, and that of the attempt may be the one.

    Its agent left no exits, or a rank there died of SIGKILL, which a dying node sends first.
    """
    if job.cause not in OF_NODE:
        return False
    return attempt.cause is EndCause.AGENT_DIED or attempt.signal == "SIGKILL"
