"""The node as checks and ranks see it, and the results of checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, List, Mapping, NamedTuple

from varuna_core.records.plan import ContainerPlan, NodePlan, Plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder


class CheckResult(NamedTuple):
    """One result of a check."""

    status: str
    """ok, warn or fail."""
    text: str


@dataclass
class Facts:
    """Facts that checks learn beside their results; None where they could not."""

    address: str | None = None
    interface: str | None = None
    gpus: int | None = None
    clock_offset_s: float | None = None


@dataclass(frozen=True)
class Site:
    """A node about to run its ranks."""

    plan: Plan
    node: NodePlan
    run: RunFolder
    attempt: AttemptFolder
    master: Master
    host: str
    env: Mapping[str, str]
    """The agent's own environment."""
    stopping: Callable[[], bool]
    """Whether the agent has to end: a long command is not waited for then."""
    facts: Facts = field(default_factory=Facts)
    container: ContainerPlan | None = None
    """The runtime that works here, once it was chosen."""


Checker = Callable[[Site], List[CheckResult]]


@dataclass(frozen=True)
class Master:
    """master.json: where the ranks of an attempt meet."""

    address: str
    port: int
    host: str
    opened: float
    """When it was written; this tells one try of an attempt from the next."""
