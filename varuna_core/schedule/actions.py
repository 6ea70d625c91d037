"""Represent schedules as data: the actions of each rank, in order.

Sends and receives are implicit: a stage sends its activation after `F` or `f`, and its input's
gradient after `B` or `I`. Nothing here checks that a schedule can run; `verify` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "f", "R", "B", "I", "W", "O", "L"]
"""F forward, keeping its graph; f forward, keeping only its inputs; R recompute the graph of an f;
B backward for inputs and weights; I backward for inputs; W backward for weights; O offload a graph
from device memory; L load it back."""

FORWARDS = ("F", "f")
"""Actions whose activation is sent."""
BACKWARDS = ("B", "I")
"""Actions whose gradient is sent."""
COPIES: tuple[Kind, ...] = ("O", "L")
"""Actions that copy a graph and compute nothing."""


class ScheduleError(ValueError):
    """Raised if a schedule cannot be built or run; names the rank, action and reason."""


@dataclass(frozen=True, slots=True)
class Action:
    """A unit of a rank's work: one kind of action for one micro-batch on one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every rank in one step."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    """The actions of each rank, in order."""
    placement: tuple[int, ...]
    """The rank of each stage, by stage."""
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_stages} stages on {self.num_ranks} ranks, "
            f"{self.num_microbatches} micro-batches"
        )
