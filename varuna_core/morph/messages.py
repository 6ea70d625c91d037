"""Messages of the state machine: its inputs, its actions, and the limits of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Tuple, Union

from varuna_core.facts.cause import EndCause

DONE, LEFT, FAILED = "done", "left", "failed"
"""How an attempt ended: trained to its last step; saved and left when asked to; anything else."""


MOST_FRUITLESS = 3
"""Default of `cluster.restarts`: attempts in a row without a new checkpoint."""


@dataclass(frozen=True)
class Rules:
    """Limits of one run; all times are seconds."""

    min_nodes: int
    expected: int
    """Nodes that the scheduler gave, which are waited for when a job begins."""
    gather_s: float
    """Seconds to wait for expected nodes before the run starts with fewer."""
    wait_s: float
    """Seconds for which the run may stand still with fewer nodes than it needs."""
    save_s: float
    """Seconds to wait for a requested checkpoint before ranks are ended without it."""
    stop_s: float
    """Seconds to wait for ranks that were asked to end before their node counts as lost."""
    finish_s: float
    """Seconds to wait for other nodes after the ranks of one node have ended by themselves; 0 means
    no limit."""
    may_requeue: bool
    settle_s: float = 3.0
    """Seconds to wait for more nodes after one has joined during training, so that one morph
    includes all of them."""
    most_fruitless: int = MOST_FRUITLESS
    """Limit of attempts in a row without a new checkpoint, the first one included."""
    counts_steps: bool = False
    """True if further steps of a script count as progress, since the script's checkpoints are not
    known."""


# Inputs. A node is named by seat and key (`orders.name_node`): one that comes back is another one.
# What may happen to thousands of nodes at once is one input for all of them.


@dataclass(frozen=True)
class Joined:
    nodes: Tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    """Input of the state machine: a node was silent, refused by preflight, or replaced by another
    agent in its seat."""

    node: str
    reason: str
    cause: EndCause = EndCause.NODE_SILENT


@dataclass(frozen=True)
class AskedToLeave:
    node: str
    why: str = ""
    """Reason for the request if it comes from the run itself, such as a slow node; empty if a
    person made it."""


@dataclass(frozen=True)
class RanksEnded:
    """Input of the state machine: all ranks of these nodes have ended, well or badly."""

    nodes: Tuple[str, ...]
    attempt: int


@dataclass(frozen=True)
class RankFailed:
    reason: str
    attempt: int


@dataclass(frozen=True)
class CalledToLeave:
    """Input of the state machine: preemption or the time limit is near, so the ranks must save, and
    the job is requeued if the rules allow it."""

    reason: str


@dataclass(frozen=True)
class CalledToEnd:
    """Input of the state machine: the run was cancelled, or its time is up."""

    reason: str
    cause: EndCause = EndCause.STOPPED


@dataclass(frozen=True)
class Saved:
    """Input of the state machine: the newest known complete checkpoint whose files exist."""

    iteration: int
    mark: int = -1
    """Progress of a training with its own checkpoints."""


@dataclass(frozen=True)
class Judged:
    """Input of the state machine: how the attempt ended, as determined by the action Judge."""

    outcome: str
    code: int
    reason: str
    culprit: str = ""
    """The node that is at fault for the end of the attempt; empty if no single node is."""
    repeats: str = ""
    """Why the failure repeats that of the attempt before, if that ends the run."""
    is_sure: bool = False
    """True if the culprit's rank was stopped or dead: one failure is enough to skip the node."""
    wants_requeue: bool = False
    """True if the conf asks for a requeue of the job after such an end."""
    no_room: str = ""
    """The folder whose lack of space ended the attempt, which is not the program's fault."""


@dataclass(frozen=True)
class Taken:
    """Input of the state machine: the number of the attempt is already taken by an earlier session,
    whose manager was late."""

    attempt: int


@dataclass(frozen=True)
class RoomFound:
    """Input of the state machine: the folder whose lack of disk space ended the last attempt has
    space again."""


@dataclass(frozen=True)
class Tick:
    """Input of the state machine without content: time has passed."""


Input = Union[
    Joined, Lost, AskedToLeave, RanksEnded, RankFailed, CalledToLeave, CalledToEnd, Saved,
    Judged, Taken, RoomFound, Tick,
]  # fmt: skip


# Actions. Each may be done twice: a manager that was killed does those of its state again.


@dataclass(frozen=True)
class Start:
    """Action of the state machine: build the plan of an attempt for these nodes, and send the
    plan."""

    attempt: int
    nodes: Tuple[str, ...]


@dataclass(frozen=True)
class AskToSave:
    attempt: int


@dataclass(frozen=True)
class StopRanks:
    attempt: int
    reason: str
    cause: Optional[EndCause] = field(default=None, compare=False)
    """The cause; None if only the state is known, after a manager was killed."""


@dataclass(frozen=True)
class Fence:
    """Action of the state machine: exclude a node from all later jobs and attempts."""

    node: str


@dataclass(frozen=True)
class Judge:
    """Action of the state machine: determine how the attempt ended; the result comes back as the
    input Judged."""

    attempt: int


@dataclass(frozen=True)
class End:
    """Action of the state machine: release the nodes and end the job with this code, or requeue the
    job (`requeue`)."""

    code: int
    reason: str
    requeue: bool
    cause: EndCause = field(default=EndCause.NOT_MET, compare=False)
    """Cause of the end, for a job none of whose attempts was judged."""
    note: str = field(default="", compare=False)
    """A clause that says why there is no further attempt."""


Action = Union[Start, AskToSave, StopRanks, Fence, Judge, End]
