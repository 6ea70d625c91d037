"""`End`: why a run, an attempt or a rank ended, who ended it, and the evidence for that.

Sentences about an end are rendered from it (`sentences.py`). Code compares causes, never sentences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Mapping, Optional, Tuple, Type, TypeVar

from varuna_core.facts.known import Evidence, Sure

END_VERSION = 1
"""The version of `End` in files. A reader ignores an end of a later version."""


class Actor(str, Enum):
    """Parties that can end a run, an attempt or a rank."""

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
    """Causes of an end. The values are stored in files and in JSON documents."""

    # It ended well, or never ran.
    COMPLETED = "completed"
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
    ALLOCATION_ENDED = "allocation-ended"
    """The enclosing job, of which this one was a step, ended by itself: its batch script or its
    shell exited."""
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
    SETUP_FAILED = "setup-failed"
    """A line of the conf's `setup` failed on a node."""
    PREFLIGHT = "preflight"
    NOT_MET = "not-met"
    CONTAINER = "container"
    START_FAILED = "start-failed"
    NODE_SILENT = "node-silent"
    AGENT_DIED = "agent-died"
    BATCH_KILLED = "batch-killed"
    NODE_LEFT = "node-left"
    NO_ROOM = "no-room"
    STOPPED = "stopped"
    """The run was asked to end from outside; only the scheduler can know why."""
    # The local supervisor; a list of machines.
    SUPERVISOR_DIED = "supervisor-died"
    SUPERVISOR_NOT_STARTED = "supervisor-not-started"
    MACHINE_UNREACHABLE = "machine-unreachable"
    MACHINE_REBOOTED = "machine-rebooted"
    MACHINE_LIST_EMPTY = "machine-list-empty"
    UNKNOWN = "unknown"


BY_SCHEDULER = frozenset(
    (
        EndCause.CANCELLED,
        EndCause.TIME_LIMIT,
        EndCause.DEADLINE,
        EndCause.PREEMPTED,
        EndCause.REVOKED,
        EndCause.ALLOCATION_ENDED,
    )
)
"""Causes for which a scheduler ends a job that did nothing wrong. Errors of the ranks at that time
are only a consequence."""
OF_RANK = frozenset(
    (
        EndCause.RANK_EXIT,
        EndCause.RANK_EXCEPTION,
        EndCause.RANK_SIGNAL,
        EndCause.OOM_HOST,
        EndCause.HANG,
        EndCause.NOT_A_NUMBER,
    )
)
"""Causes that originate in a rank."""
OF_NODE = frozenset(
    (
        EndCause.NODE_FAIL,
        EndCause.BOOT_FAIL,
        EndCause.NODE_SILENT,
        EndCause.AGENT_DIED,
        EndCause.NODE_LEFT,
        EndCause.MACHINE_UNREACHABLE,
        EndCause.MACHINE_REBOOTED,
    )
)
"""Causes that originate in a node."""


@dataclass(frozen=True)
class End:
    """How a run, an attempt or a rank ended."""

    cause: EndCause
    actor: Actor = Actor.UNKNOWN
    by: str = ""
    """Name of the user who ended it, if the scheduler reports the name."""
    code: Optional[int] = None
    """Exit code of the attempt: that of the culprit, or 128 + signal as in a shell."""
    signal: str = ""
    """Name of the signal that ended it, such as SIGKILL; empty if no signal did."""
    rank: Optional[int] = None
    node: str = ""
    within: str = ""
    """Id of the enclosing job, if the run was a step of it and the enclosing job ended this way."""
    at: Optional[float] = None
    """Time of the end in seconds since the epoch."""
    started: Optional[bool] = None
    """False if it ended before an attempt began; None if that is not known."""
    evidence: Tuple[Evidence, ...] = ()
    version: int = END_VERSION


E = TypeVar("E", bound=Enum)
_FORMER = {"completed-on-cancel": EndCause.CANCELLED}
"""Names of causes in files of earlier versions."""
_KINDS: Mapping[str, Tuple[type, ...]] = {
    "Optional[int]": (int, type(None)),
    "Optional[float]": (int, float, type(None)),
    "Optional[bool]": (bool, type(None)),
    "int": (int,),
    "str": (str,),
}
"""Types that are accepted in a file for each annotation."""


def parse_end(value: Any) -> Optional[End]:
    """Parse an `End` from JSON; None if it is missing, damaged or of a later version.

    Unknown keys are dropped, and unknown words become UNKNOWN.
    """
    if not isinstance(value, dict) or not isinstance(value.get("version"), int):
        return None
    if not 1 <= value["version"] <= END_VERSION:
        return None
    given = {**value, "evidence": value.get("evidence", ())}
    if not isinstance(given["evidence"], (list, tuple)):
        return None
    try:
        return End(
            **{
                **_read_fields(End, given),
                "cause": parse_cause(given.get("cause")),
                "actor": parse_word(Actor, given.get("actor"), Actor.UNKNOWN),
                "evidence": tuple(_parse_evidence(one) for one in given["evidence"]),
            }
        )
    except (TypeError, ValueError):
        return None


def parse_cause(word: Any) -> EndCause:
    """Return the cause with this value; UNKNOWN for any other word."""
    return parse_word(EndCause, _FORMER.get(str(word), word), EndCause.UNKNOWN)


def _parse_evidence(value: Any) -> Evidence:
    if not isinstance(value, dict):
        raise TypeError("a piece of evidence must be an object")
    sure = parse_word(Sure, value.get("sure"), Sure.INFERRED)
    return Evidence(**{**_read_fields(Evidence, value), "sure": sure})


def parse_word(kind: Type[E], word: Any, default: E) -> E:
    """Return the member of an enum with this value; `default` for any other word."""
    try:
        return kind(word)
    except ValueError:
        return default


def _read_fields(kind: Any, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plain fields of a dataclass in `value`; raise TypeError for a wrong type."""
    found = {}
    for one in fields(kind):
        kinds = _KINDS.get(str(one.type))
        if one.name not in value or kinds is None:
            continue
        item = value[one.name]
        is_flag = isinstance(item, bool) and bool not in kinds
        if not isinstance(item, kinds) or is_flag or (_is_huge(item)):
            raise TypeError(f"{one.name} is no {one.type}")
        found[one.name] = item
    return found


def _is_huge(item: Any) -> bool:
    """True for a number that no clock, count or size can have."""
    return isinstance(item, (int, float)) and not abs(item) < 2**63
