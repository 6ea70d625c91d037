"""`KnownLine`: one row of the catalogue of messages.

A known line is the cause of an end only if it has the right scope and stream, is near the end of
the output of the rank that failed first, and is not followed by a line that shows success.
Otherwise it is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional, Tuple

from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import Waiting
from varuna_core.facts.remedy import Context, Remedy, explain


class Scope(str, Enum):
    """Writers of known lines."""

    RANK = "rank"
    NODE = "node"
    """The kernel or a driver of a node."""
    SCHEDULER = "scheduler"
    """Lines of the scheduler and of its steps in the logs of a job."""
    CONTAINER = "container"
    """A container runtime, before the ranks start."""
    SSH = "ssh"
    SUBMIT = "submit"
    """The scheduler's submit command when it rejects a job."""
    PENDING = "pending"
    """The scheduler's reason why a job is pending, or ended before its batch script started."""


class Stream(str, Enum):
    """Streams on which a known line counts."""

    STDERR = "stderr"
    STDOUT = "stdout"
    ANY = "any"


class Proof(str, Enum):
    """How strongly a known log line proves a cause."""

    CAUSE = "cause"
    """The line may be the cause of the rank's end."""
    FALLOUT = "fallout"
    """The line reports a failure elsewhere; it is the cause only if nothing better is found."""
    WARNING = "warning"
    """The line is worth showing but is not a failure."""
    IGNORE = "ignore"
    """The line looks like a failure but is not one."""


class Fate(str, Enum):
    """The outlook of a pending job, by the scheduler's reason."""

    PASSES = "passes"
    """The reason goes away by itself, or an admin removes it; the job then starts unchanged."""
    NEVER = "never"
    """The job cannot start until the job or its request is changed."""
    ENDED = "ended"
    """The job has already ended; the scheduler stores the end in the same field as pending
    reasons."""


TEARDOWN_S = 900.0
"""Longest time for which a process that failed may wait for its peers before it exits: NCCL's
watchdog waits for up to ten minutes."""


@dataclass(frozen=True)
class KnownLine:
    """A known message, what it proves, and what to do about it."""

    name: str
    """Name of the row, unique within its scope."""
    pattern: str
    """Regular expression that is searched for in a single line, truncated to 4 kB."""
    scope: Scope
    stream: Stream = Stream.ANY
    proof: Proof = Proof.CAUSE
    cause: Optional[EndCause] = None
    """The cause that the line stands for; None if the line only says how the program failed."""
    meaning: str = ""
    """A clause that explains the message; empty if the message explains itself."""
    remedies: Tuple[Remedy, ...] = ()
    only: Tuple[str, ...] = ()
    """Container runtimes, schedulers or accelerators to which the row applies; empty for all."""
    within_s: float = 60.0
    """Maximum time between the line and an end that it may explain, if the line has a time."""
    first_failed_only: bool = True
    """True if the line counts as a cause only on the rank that failed first."""
    fatal: bool = False
    """True if the affected process cannot continue."""
    fate: Optional[Fate] = None
    """Set only for the scheduler's pending reasons."""
    waits: Optional[Waiting] = None
    """Set only for the scheduler's reasons for which a job waits."""
    is_provisional: bool = False
    """True for a pending reason that the scheduler may replace by a more exact one as soon as it
    considers the job."""
    before: str = ""
    """The row of ours that a plug-in's row comes before; else it comes after all that
    explain something."""

    def explain(self, context: Context, job: str = "") -> str:
        """Return the meaning and the remedies as text, in the words of a context."""
        return explain(self.meaning, self.remedies, context, job)


def make_row(
    scope: Scope,
    proof: Proof,
    name: str,
    pattern: str,
    meaning: str = "",
    *remedies: Remedy,
    **more: Any,
) -> KnownLine:
    """Build one row of a table. If its error ends the process (`fatal`), the line may be printed
    long before the end, up to TEARDOWN_S."""
    if more.get("fatal"):
        more.setdefault("within_s", TEARDOWN_S)
    return KnownLine(name, pattern, scope, proof=proof, meaning=meaning, remedies=remedies, **more)
