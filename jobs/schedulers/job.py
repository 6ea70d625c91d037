"""Types of jobs and nodes that all schedulers share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from varuna_core.facts.cause import EndCause
from varuna_core.facts.known import Known, NotKnown, Value
from varuna_core.records.files import as_whole
from varuna_core.records.plan import GroupPlan


class JobState(Enum):
    """State of a job. An unknown state becomes UNKNOWN; `native_word` keeps its text."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    REQUEUED = "REQUEUED"
    PREEMPTED = "PREEMPTED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"


def parse_name(word: str) -> JobState:
    """Return the state with this name; UNKNOWN for any other word."""
    try:
        return JobState(word)
    except ValueError:
        return JobState.UNKNOWN


OVER = frozenset(
    {
        JobState.PREEMPTED,
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
    }
)
"""Final states: a job does not leave them by itself."""


RUNS = (JobState.RUNNING, JobState.COMPLETING)
NOT_ASKED = NotKnown("the scheduler was not asked for the time limit")
END_CAUSES: Mapping[JobState, EndCause] = {
    JobState.PREEMPTED: EndCause.PREEMPTED,
    JobState.COMPLETED: EndCause.COMPLETED,
    JobState.CANCELLED: EndCause.CANCELLED,
    JobState.TIMEOUT: EndCause.TIME_LIMIT,
    JobState.NODE_FAIL: EndCause.NODE_FAIL,
    JobState.OUT_OF_MEMORY: EndCause.OOM_JOB,
    JobState.BOOT_FAIL: EndCause.BOOT_FAIL,
    JobState.DEADLINE: EndCause.DEADLINE,
}
"""The end cause that each final state implies. FAILED implies none: it says only that some program
exited with an error."""


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """One job, or one component of a het job, as its scheduler reports it."""

    id: str
    """The id as the user types it: 12, 12+1 for a component, 12_3 for an array task."""
    state: JobState
    native_word: str
    """The scheduler's own word for the state."""
    nodes: tuple[str, ...] = ()
    reason_text: str = ""
    """The reason why the job is pending or ended, as the scheduler writes it."""
    comment: str = ""
    """The text that was given to the job when it was submitted."""
    restarts: int = 0
    code: int | None = None
    """Exit code of the batch script."""
    signal: int | None = None
    """The signal that ended the batch script; 0 if the scheduler reports that none did."""
    start: float | None = None
    """Start, or expected start, in seconds since the epoch."""
    left: Known[float] = NOT_ASKED
    """Seconds until the time limit, at the time `asked`."""
    time_limit: Known[float] = NOT_ASKED
    """The job's present time limit in seconds, which may differ from the one at submission."""
    ends: float | None = None
    """Time at which the job ended or the scheduler is going to end it."""
    preempted: float | None = None
    """Time at which the scheduler began to take the job's nodes for another job. The job has a
    grace time from then on."""
    dependency: str = ""
    """Jobs that this job waits for, as the scheduler writes them."""
    end_cause: EndCause | None = None
    """Why the job ended, according to the scheduler; None while the job is not over, or if a
    program of the job failed by itself."""
    within: str = ""
    """The enclosing job, if this one was a step and ended because the enclosing job did; then
    `end_cause` describes the end of the enclosing job."""
    asked: float | None = field(default=None, compare=False)
    """Time as of which these fields are true; None if the scheduler is this machine."""

    @property
    def leader(self) -> str:
        return self.id.partition("+")[0]

    @property
    def component(self) -> int:
        number = self.id.partition("+")[2]
        return as_whole(number) or 0

    @property
    def limit(self) -> Known[float]:
        """The time limit in seconds, as the scheduler reports it, including an administrator's
        changes. If not reported, it is the time since the start plus the time left, rounded to a
        minute."""
        if isinstance(self.time_limit, Value) or isinstance(self.left, NotKnown):
            return self.time_limit
        if self.start is None or self.asked is None or self.state not in RUNS:
            return NotKnown("the job is not running")
        whole_s = self.asked - self.start + self.left.value
        return Value(60.0 * round(whole_s / 60), self.left.evidence)

    @property
    def exit_text(self) -> str:
        """Exit code and signal, such as `1:0`; empty if the scheduler has not reported them."""
        return "" if self.code is None else f"{self.code}:{self.signal or 0}"


@dataclass(frozen=True, kw_only=True)
class After:
    """Ids of the jobs that a job waits for; it starts once all conditions hold."""

    started: tuple[str, ...] = ()
    """Jobs that must have begun."""
    succeeded: tuple[str, ...] = ()
    """Jobs that must have succeeded; if one of them fails, the waiting job is cancelled."""
    ended: tuple[str, ...] = ()
    """Jobs that must have ended, in any way."""


NOTHING = After()


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """A scheduler's estimate of when a job would start, made without submitting the job."""

    text: str
    """The estimate in the scheduler's own words."""
    is_read: bool = False
    """True if the text could be parsed into the fields below."""
    start: float | None = None
    """Start in seconds since the epoch; None if the text has no time."""
    nodes: tuple[str, ...] = ()
    num_cpus: int | None = None
    queue: str = ""

    def as_json(self) -> dict[str, Any]:
        if not self.is_read:
            return {"text": self.text}
        return {
            "start": self.start,
            "num_cpus": self.num_cpus,
            "nodes": list(self.nodes),
            "queue": self.queue,
            "text": self.text,
        }


@dataclass(frozen=True, kw_only=True)
class IdleNode:
    """An idle node in one queue."""

    name: str
    queue: str
    is_default: bool
    """True if the queue is the default queue."""
    gpus: tuple[tuple[str, int], ...]
    """Pairs of GPU type, which may be empty, and number."""
    cpus: int
    memory_mb: int


def list_fitting(
    nodes: Sequence[IdleNode], group: GroupPlan, exclude: Collection[str] = ()
) -> list[str]:
    """Return the names of idle nodes that fit a job for the group's kind of node."""
    names = []
    for node in nodes:
        is_in = node.is_default if group.queue is None else node.queue in group.queue.split(",")
        if is_in and node.name not in exclude and _has_all(node, group):
            names.append(node.name)
    return list(dict.fromkeys(names))


def _has_all(node: IdleNode, group: GroupPlan) -> bool:
    wanted = (group.gpu_type or "").lower()
    gpus = sum(count for kind, count in node.gpus if wanted in ("", kind.lower()))
    return (
        gpus >= group.gpus
        and node.cpus >= (group.cpus or 1)
        and node.memory_mb >= 1024 * (group.memory_gb or 0)
    )
