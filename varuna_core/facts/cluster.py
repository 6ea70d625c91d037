"""Facts that a scheduler gives: why a job waits, and which nodes are not well.

The rows of `catalogue.slurm.REASONS` give each of Slurm's reasons a `Waiting` and its remedies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class Waiting(str, Enum):
    """Kinds of reasons to wait."""

    # Somebody has to let it go.
    HELD_BY_USER = "held-by-user"
    HELD_BY_ADMIN = "held-by-admin"
    HELD_AFTER_REQUEUE = "held-after-requeue"
    """By somebody, or by the scheduler: it failed to start, or was requeued too often."""
    # Something has to happen first.
    DEPENDENCY = "dependency"
    BEGIN_TIME = "begin-time"
    RESERVATION = "reservation"
    MAINTENANCE = "maintenance"
    # Somebody else has what it needs.
    PRIORITY = "priority"
    RESOURCES = "resources"
    LICENSES = "licenses"
    LIMIT = "limit"
    """A limit of the account or QOS that other jobs use up."""
    BUDGET = "budget"
    """A limit that jobs of the past use up, too."""
    ARRAY_LIMIT = "array-limit"
    # The cluster is not ready for it.
    NODES_DOWN = "nodes-down"
    QUEUE_CLOSED = "queue-closed"
    BURST_BUFFER = "burst-buffer"
    SCHEDULER = "scheduler"
    """The scheduler has yet to look at it."""
    # It asks for what it cannot get.
    QUEUE_LIMIT = "queue-limit"
    JOB_LIMIT = "job-limit"
    """A limit of the account or QOS for single jobs."""
    NOT_PERMITTED = "not-permitted"
    """The account, the QOS or the user may not use the queue."""
    CONSTRAINT = "constraint"
    DEADLINE = "deadline"


class NodeCondition(str, Enum):
    """Conditions of a node that a run on it should know."""

    LOST = "lost"
    """Its processes are gone, or nobody can reach them."""
    DRAINING = "draining"
    """It gets no new job; those that it has go on."""
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class NodeState:
    """One node that is not well."""

    name: str
    condition: NodeCondition
    word: str
    """The scheduler's own."""
    reason: str = ""
    """The admin's, or the scheduler's."""
    by: str = ""
    """User who gave the reason."""
    since: Optional[float] = None
    """Time at which the reason was given."""
