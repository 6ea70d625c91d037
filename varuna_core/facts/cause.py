"""`End`: why a run, an attempt or a rank ended, who ended it, and the evidence for that.

Sentences about an end are rendered from it (`sentences.py`). Code compares causes, never sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional, Tuple

from varuna_core.facts.known import Evidence

END_VERSION = 1
"""The version of `End` in files; a reader takes a later one as missing."""


class Actor(str, Enum):
    """Who ended it."""

    USER = "user"
    VJOB = "vjob"
    ADMIN = "admin"
    SCHEDULER = "scheduler"
    SUPERVISOR = "supervisor"
    AGENT = "agent"
    RANK = "rank"
    NODE = "node"
    UNKNOWN = "unknown"


class EndCause(str, Enum):
    """Why it ended. The values stand in files and in JSON documents."""

    # It ended well, or never ran.
    COMPLETED = "completed"
    COMPLETED_ON_CANCEL = "completed-on-cancel"
    REFUSED = "refused"
    SUBMIT_LOST = "submit-lost"
    FORGOTTEN = "forgotten"
    DEPENDENCY_FAILED = "dependency-failed"
    # The scheduler's last word.
    CANCELLED = "cancelled"
    TIME_LIMIT = "time-limit"
    DEADLINE = "deadline"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    REVOKED = "revoked"
    NODE_FAIL = "node-fail"
    BOOT_FAIL = "boot-fail"
    LAUNCH_FAILED = "launch-failed"
    NO_OUTPUT = "no-output"
    OOM_JOB = "oom-job"
    # A rank.
    RANK_EXIT = "rank-exit"
    RANK_EXCEPTION = "rank-exception"
    RANK_SIGNAL = "rank-signal"
    OOM_HOST = "oom-host"
    HANG = "hang"
    NOT_A_NUMBER = "not-a-number"
    # The agents.
    PREFLIGHT = "preflight"
    NOT_MET = "not-met"
    CONTAINER = "container"
    START_FAILED = "start-failed"
    NODE_SILENT = "node-silent"
    AGENT_DIED = "agent-died"
    BATCH_KILLED = "batch-killed"
    NODE_LEFT = "node-left"
    NO_ROOM = "no-room"
    # The local supervisor; a list of machines.
    SUPERVISOR_DIED = "supervisor-died"
    SUPERVISOR_NOT_STARTED = "supervisor-not-started"
    MACHINE_UNREACHABLE = "machine-unreachable"
    MACHINE_REBOOTED = "machine-rebooted"
    MACHINE_LIST_EMPTY = "machine-list-empty"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class End:
    """How something ended."""

    cause: EndCause
    actor: Actor = Actor.UNKNOWN
    by: str = ""
    """Name of the user who ended it, where the scheduler tells."""
    code: Optional[int] = None
    """Exit code, or 128 + signal as a shell says it."""
    signal: str = ""
    """SIGKILL and the like; empty where no signal ended it."""
    rank: Optional[int] = None
    node: str = ""
    at: Optional[float] = None
    """Seconds since the epoch."""
    evidence: Tuple[Evidence, ...] = ()
    version: int = END_VERSION
