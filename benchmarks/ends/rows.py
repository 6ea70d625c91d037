"""`Row`: one staged end, what is left of it, and what vjob is to say.

Times are seconds relative to the end of the job, so most are negative.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.ends.errors import Wish
from varuna_core.facts.cause import Actor, EndCause

NODES = ("n1", "n2")
"""The two nodes of a row that is not of this machine; each has one rank."""


HERE = os.uname().nodename.partition(".")[0]
"""The node of a row of this machine."""


class Place(str, Enum):
    """Kinds of jobs."""

    LOCAL = "local"
    LAB = "Slurm"
    MACHINES = "machines"
    ALLOCATION = "inside a job"
    FOREIGN = "foreign job"
    BARE = "bare folder"


@dataclass(frozen=True)
class Left:
    """Exit of one rank, as its agent records it."""

    rank: int
    code: int
    """`Popen.returncode`: negative for a signal."""
    at: float = -0.5
    stopped: bool = False
    """Its agent ended it."""
    raised: str = ""
    """The exception in its error file."""


@dataclass(frozen=True)
class Said:
    """Lines of one rank, or of the batch script where there is no rank."""

    text: str
    rank: int | None = 0
    stream: str = "err"
    at: float = -1.0


@dataclass(frozen=True)
class Stop:
    """stop.json: who asked the attempt to end."""

    kind: str
    code: int
    reason: str
    node: str | None = None
    rank: int | None = None
    cause: EndCause | None = None


@dataclass(frozen=True)
class Job:
    """The scheduler's last word."""

    word: str
    code: str = "0:0"
    reason: str = "None"
    by: str = ""
    """Number of the user that accounting names as the one who cancelled it."""
    restarts: int = 0
    within: str = ""
    """Slurm's word for the job around it, of a run that used an allocation."""
    has_supervisor: bool = True
    """False where a local supervisor was killed, or never wrote its state."""


STEPS = tuple(
    Said(f"step {step}/9 loss {3 / step:.2f}", out, "out", -20.0 + 4 * step)
    for step in range(1, 4)
    for out in (0, 1)
)


@dataclass(frozen=True)
class Scene:
    """Files and scheduler answers that an ended job leaves."""

    job: Job
    exits: tuple[Left, ...] = ()
    said: tuple[Said, ...] = STEPS
    stop: Stop | None = None
    status: int | None = None
    """srun's exit code where the batch script lived to judge the attempt."""
    reports: tuple[int, ...] = (0, 1)
    """Nodes that reported themselves ready."""
    failed_check: tuple[str, str] | None = None
    """Name and text of a check that failed on the last of these nodes."""
    went: bool = True
    """The ranks were told to start."""
    started: bool = True
    """An attempt began."""
    is_cancelled: bool = False
    """`vjob cancel` was called."""
    awaited: str = ""
    """Last state of a run that it had to wait for."""
    container: str = ""
    """Runtime of its container."""
    forgotten: bool = False
    """The scheduler knows the job no more."""
    earlier: tuple[Said, ...] = ()
    """Lines of an attempt before this one."""
    files: dict[str, str] = field(default_factory=dict)
    """Log files of a bare folder, or of a job that vjob did not submit, by name."""
    err_is_older: bool = False
    """Their files of stderr were written for the last time a minute before the others."""
    age_s: float = 30.0
    """Age of the end."""


@dataclass(frozen=True)
class Want:
    """The facts that vjob is to state."""

    cause: EndCause | None
    """None where nothing may be said to have ended it badly, or nothing is known to be over."""
    actor: Actor | None = None
    """None where the row is not about it."""
    rank: int | None = None
    node: str = ""
    health: str = "DEAD"
    remedies: tuple[Wish, ...] = ()
    """Kinds of remedies that must be there."""
    never: tuple[Wish, ...] = ()
    """Kinds that must not."""
    silent: str = ""
    """Words that must not stand in the main sentence or in the advice."""


@dataclass(frozen=True)
class Row:
    """One end."""

    name: str
    place: Place
    scene: Scene | None
    want: Want
    program: str = ""
    """Text of a program that is really run, in the place of a scene."""
    num_ranks: int = 1
    """Ranks that run the program."""

    @property
    def title(self) -> str:
        return f"{self.place.value}: {self.name}"
