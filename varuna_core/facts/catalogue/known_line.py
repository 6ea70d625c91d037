"""`KnownLine`: one row of the catalogue of messages.

A line is the cause of an end only if it has the right scope and stream, stands near the end of the
rank that failed first, and nothing that succeeded came after it. Otherwise it is a warning.
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
    """The scheduler and its steps, in the logs of a job."""
    CONTAINER = "container"
    """A container runtime, before the ranks start."""
    SSH = "ssh"
    SUBMIT = "submit"
    """The scheduler's command, as it refuses a job."""
    PENDING = "pending"
    """The scheduler's reason for a job that waits, or ended before its script began."""


class Stream(str, Enum):
    """Streams on which a known line counts."""

    STDERR = "stderr"
    STDOUT = "stdout"
    ANY = "any"


class Proof(str, Enum):
    """Strength of a known line as evidence."""

    CAUSE = "cause"
    """It may be why the rank ended."""
    FALLOUT = "fallout"
    """It tells of a failure elsewhere; the cause only where there is nothing else."""
    WARNING = "warning"
    """Worth showing; not a failure."""
    IGNORE = "ignore"
    """It looks like a failure and is none."""


class Fate(str, Enum):
    """Future of a job that waits for one of its scheduler's reasons."""

    PASSES = "passes"
    """Time, other jobs or an admin end it; the job then starts as it is."""
    NEVER = "never"
    """The job, or what it asks for, has to be changed first."""
    ENDED = "ended"
    """No reason to wait: how a job ended, kept by the scheduler in the same field."""


TEARDOWN_S = 900.0
"""A process that an error has ended may wait so long for its peers before it exits: NCCL's watchdog
gives them up to ten minutes."""


@dataclass(frozen=True)
class KnownLine:
    """A message that is known, what it proves, and what to do about it."""

    name: str
    """Unique within its scope."""
    pattern: str
    """Regular expression that is searched for in one line, cut at 4 kB."""
    scope: Scope
    stream: Stream = Stream.ANY
    proof: Proof = Proof.CAUSE
    cause: Optional[EndCause] = None
    """The cause that it stands for; None where it says only how the program failed."""
    meaning: str = ""
    """A clause that explains the message, where the message does not say it itself."""
    remedies: Tuple[Remedy, ...] = ()
    only: Tuple[str, ...] = ()
    """Container runtimes, schedulers or accelerators that it is about; empty for all."""
    within_s: float = 60.0
    """Longest time between the line and the end that it may explain, where it has a time."""
    first_failed_only: bool = True
    """It counts as a cause only on the rank that failed first."""
    fatal: bool = False
    """The process that this befell cannot go on."""
    fate: Optional[Fate] = None
    """Set for the scheduler's reasons."""
    waits: Optional[Waiting] = None
    """Set for its reasons to wait."""
    before: str = ""
    """The row of ours that a plug-in's row comes before; else it comes after all that
    explain something."""

    def explain(self, context: Context, job: str = "") -> str:
        """The meaning and the remedies in the words of a context."""
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
    """One row of a table; an error that ends its process may stand long before the end."""
    if more.get("fatal"):
        more.setdefault("within_s", TEARDOWN_S)
    return KnownLine(name, pattern, scope, proof=proof, meaning=meaning, remedies=remedies, **more)
