"""Represent schedules as data: the actions of each rank, in order.

Sends and receives are implicit: a stage sends its activation after `F` or `f`, and its input's
gradient after `B` or `I`. Parsing does not check that a schedule can run; `verify` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

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

_SPELLING = re.compile(r"(\d+)([FfRBIWOL])(\d+)")


class ScheduleError(ValueError):
    """Raised if a schedule cannot be built, parsed or run; names the rank, action and reason."""


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


def parse_action(text: str) -> Action:
    """Parse `0F3` (stage 0, forward, micro-batch 3): torch's format, plus f, R, O and L."""
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text!r} is not an action: expected stage, one of F f R B I W O L, micro-batch, "
            "as in 0F3"
        )
    stage, kind, microbatch = match.groups()
    return Action(cast(Kind, kind), int(stage), int(microbatch))


def render_csv(schedule: Schedule) -> str:
    """Render one line per rank, in the "compute_only" format of `torch.distributed.pipelining`."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """Parse the output of `render_csv`; empty cells (torch's idle steps) are ignored."""
    ranks = [
        tuple(parse_action(cell) for cell in line.split(",") if cell.strip())
        for line in text.splitlines()
    ]
    owner: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, {action}: stage {action.stage} is already on rank "
                    f"{owner[action.stage]}"
                )
    missing = sorted(set(range(max(owner, default=0) + 1)) - set(owner))
    if missing:
        raise ScheduleError(f"no rank has an action of stage {missing[0]}")
    microbatches = [action.microbatch for actions in ranks for action in actions]
    return Schedule(
        name=name,
        ranks=tuple(ranks),
        placement=tuple(owner[stage] for stage in range(len(owner))),
        num_microbatches=max(microbatches) + 1,
    )
