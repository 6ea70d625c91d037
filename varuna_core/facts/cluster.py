"""Facts that a scheduler reports: why a job is pending, and which nodes are not healthy.

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
    """The job is held by a user or by the scheduler: it failed to start, or was requeued too
    often."""
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
    """A limit of the account or QOS that running jobs use up."""
    BUDGET = "budget"
    """A limit of the account or QOS that past jobs use up, too."""
    ARRAY_LIMIT = "array-limit"
    # The cluster is not ready for it.
    NODES_DOWN = "nodes-down"
    QUEUE_CLOSED = "queue-closed"
    BURST_BUFFER = "burst-buffer"
    SCHEDULER = "scheduler"
    """The scheduler has not yet considered the job."""
    # It asks for what it cannot get.
    QUEUE_LIMIT = "queue-limit"
    JOB_LIMIT = "job-limit"
    """A limit of the account or QOS for a single job."""
    NOT_PERMITTED = "not-permitted"
    """The account, the QOS or the user may not use the queue."""
    CONSTRAINT = "constraint"
    DEADLINE = "deadline"


class NodeCondition(str, Enum):
    """Conditions of a node that matter to a run on the node."""

    LOST = "lost"
    """The node's processes are gone, or the node is unreachable."""
    DRAINING = "draining"
    """The node accepts no new jobs; its running jobs continue."""
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class NodeState:
    """The state of a node that is not healthy."""

    name: str
    condition: NodeCondition
    word: str
    """The scheduler's own word for the state."""
    reason: str = ""
    """The reason that an administrator or the scheduler gave."""
    by: str = ""
    """User who gave the reason."""
    since: Optional[float] = None
    """Time at which the reason was given."""
