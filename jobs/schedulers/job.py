"""Jobs and nodes in the terms that all schedulers share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from varuna_core.records.plan import GroupPlan


class JobState(Enum):
    """State of a job; an unknown word of the scheduler becomes UNKNOWN and keeps its text."""

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
"""States that a job does not leave by itself."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job, or one component of a het job."""

    id: str
    """As the user types it: 12, 12+1 for a component, 12_3 for an element of an array."""
    state: JobState
    word: str
    """The scheduler's own word."""
    nodes: str = ""
    """Node list in Slurm's spelling."""
    reason: str = ""
    """Why it pends, or how it ended."""
    comment: str = ""
    restarts: int = 0
    exit_code: str = ""
    start: str = ""
    """Start, or expected start, as the scheduler writes it."""
    left_s: float | None = None
    """Until its time limit, when it was asked; None where that is not known."""
    asked: float | None = field(default=None, compare=False)
    """The time for which all this is good; None where the scheduler is this machine."""

    @property
    def leader(self) -> str:
        return self.id.partition("+")[0]

    @property
    def component(self) -> int:
        number = self.id.partition("+")[2]
        return int(number) if number.isdigit() else 0


@dataclass(frozen=True, kw_only=True)
class After:
    """Jobs that a job waits for, by id; all of them."""

    started: tuple[str, ...] = ()
    """They must have begun."""
    succeeded: tuple[str, ...] = ()
    """They must have ended well; where one has not, the job is cancelled."""
    ended: tuple[str, ...] = ()
    """They must be over."""


NOTHING = After()


@dataclass(frozen=True, kw_only=True)
class IdleNode:
    """An idle node in one queue."""

    name: str
    queue: str
    is_default: bool
    """The queue is the one of jobs that name none."""
    gpus: tuple[tuple[str, int], ...]
    """Type, perhaps empty, and number."""
    cpus: int
    memory_mb: int


def list_fitting(
    nodes: Sequence[IdleNode], group: GroupPlan, exclude: Collection[str] = ()
) -> list[str]:
    """Names of the nodes that a job for nodes like the group's may get."""
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
