"""Messages of the state machine: its inputs, its actions, and the rules of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Tuple, Union

from varuna_core.facts.cause import EndCause

DONE, LEFT, FAILED = "done", "left", "failed"
"""How an attempt ended: trained to its last step; saved and left when asked to; anything else."""


MOST_FRUITLESS = 3
"""Attempts in a row without a new checkpoint, where the conf does not say (`cluster.restarts`)."""


@dataclass(frozen=True)
class Rules:
    """Bounds of one run; all times in seconds."""

    min_nodes: int
    expected: int
    """Nodes that the scheduler gave: waited for when a job begins."""
    gather_s: float
    """How long for those; then the run starts with fewer."""
    wait_s: float
    """How long the run may stand still with fewer nodes than it needs."""
    save_s: float
    """For the checkpoint that ranks are asked for, until they are ended without it."""
    stop_s: float
    """For ranks that were told to end, until their node counts as lost."""
    finish_s: float
    """For the other nodes once the ranks of one have ended by themselves; 0 is no limit."""
    may_requeue: bool
    settle_s: float = 3.0
    """For more nodes after one that joined while ranks train: a morph for all of them."""
    most_fruitless: int = MOST_FRUITLESS
    """Attempts in a row without a new checkpoint: one, and its restarts."""
    counts_steps: bool = False
    """Where there is no checkpoint, further steps are progress: those of a script."""


# Inputs. A node is named by seat and key (`orders.name_node`): one that comes back is another one.


@dataclass(frozen=True)
class Joined:
    node: str


@dataclass(frozen=True)
class Lost:
    """Silent, refused by preflight, or replaced by another agent in its seat."""

    node: str
    reason: str
    cause: EndCause = EndCause.NODE_SILENT


@dataclass(frozen=True)
class AskedToLeave:
    node: str
    why: str = ""
    """Where nobody asked for it but the run's own look at its nodes (a slow one)."""


@dataclass(frozen=True)
class RanksEnded:
    """All ranks of this node have ended, well or badly."""

    node: str
    attempt: int


@dataclass(frozen=True)
class RankFailed:
    reason: str
    attempt: int


@dataclass(frozen=True)
class CalledToLeave:
    """Preemption or the time limit is near: save, and come back if the rules allow it."""

    reason: str


@dataclass(frozen=True)
class CalledToEnd:
    """Cancelled, or the time is up."""

    reason: str
    cause: EndCause = EndCause.STOPPED


@dataclass(frozen=True)
class Saved:
    """The newest complete checkpoint whose files are there, as far as anybody looked."""

    iteration: int
    mark: int = -1
    """What counts as progress in its place, where the training's checkpoints are its own."""


@dataclass(frozen=True)
class Judged:
    """The answer to Judge."""

    outcome: str
    code: int
    reason: str
    culprit: str = ""
    """The node on which it failed, where that is one of them."""
    repeats: str = ""
    """Why its failure is that of the attempt before, where that ends the run."""
    is_sure: bool = False
    """The culprit's rank was stopped or dead: once is enough to go on without the node."""
    wants_requeue: bool = False
    """The conf asks for another start of the job after such an end."""
    no_room: str = ""
    """The folder for want of whose room it ended: no fault of the program."""


@dataclass(frozen=True)
class Taken:
    """The number of this attempt belongs to an earlier session, whose manager came late."""

    attempt: int


@dataclass(frozen=True)
class RoomFound:
    """There is room again where the last attempt found none."""


@dataclass(frozen=True)
class Tick:
    """Time passes."""


Input = Union[
    Joined, Lost, AskedToLeave, RanksEnded, RankFailed, CalledToLeave, CalledToEnd, Saved,
    Judged, Taken, RoomFound, Tick,
]  # fmt: skip


# Actions. Each may be done twice: a manager that was killed does those of its state again.


@dataclass(frozen=True)
class Start:
    """Make the plan of this attempt for these nodes, and tell them."""

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
    """None where the state alone is known, after a manager was killed."""


@dataclass(frozen=True)
class Fence:
    """This node takes part in nothing any more."""

    node: str


@dataclass(frozen=True)
class Judge:
    """Look how the attempt ended; the answer is Judged."""

    attempt: int


@dataclass(frozen=True)
class End:
    """Nodes go home, the job ends with this code; with `requeue` it comes back."""

    code: int
    reason: str
    requeue: bool
    cause: EndCause = field(default=EndCause.NOT_MET, compare=False)
    """Of a job none of whose attempts was judged."""
    note: str = field(default="", compare=False)
    """Why there is no other attempt, a clause."""


Action = Union[Start, AskToSave, StopRanks, Fence, Judge, End]
