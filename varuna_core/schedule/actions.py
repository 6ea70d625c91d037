"""Represent schedules as data: the actions of each rank, in order.

Sends and receives are implicit: a stage sends its activation after `F` or `f` and the gradient of
its input after `B` or `I`. Parsing does not check that a schedule can run; `verify` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["F", "f", "R", "B", "I", "W", "O", "L"]
"""F forward, keeping its graph; f forward, keeping only its inputs; R recompute the graph of an f;
B backward of both gradients; I gradient of the inputs; W gradient of the weights; O copy a graph
out of the device's memory; L load it again."""

FORWARDS = ("F", "f")
"""Actions that make an activation to send."""
BACKWARDS = ("B", "I")
"""Actions that make a gradient to send."""
COPIES: tuple[Kind, ...] = ("O", "L")
"""Actions that move a graph and compute nothing."""

_SPELLING = re.compile(r"(\d+)([FfRBIWOL])(\d+)")


class ScheduleError(ValueError):
    """Raised for a schedule that cannot be made, read or run; names rank, action and reason."""


@dataclass(frozen=True, slots=True)
class Action:
    """A piece of a rank's work: a kind of action for a micro-batch on a stage."""

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
    """The rank of each stage."""
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
    """Parse `0F3` (stage 0, forward, micro-batch 3): torch's spelling, with f, R, O and L added."""
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action: expected stage, one of F f R B I W O L, micro-batch, as in 0F3"
        )
    stage, kind, microbatch = match.groups()
    return Action(cast(Kind, kind), int(stage), int(microbatch))


def render_csv(schedule: Schedule) -> str:
    """Render a line for each rank, as `torch.distributed.pipelining` loads ("compute_only")."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """Parse the output of `render_csv`; empty cells (torch's idle steps) are dropped."""
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
