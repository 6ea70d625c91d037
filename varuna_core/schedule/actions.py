"""Schedules as data: the actions of each rank, in order.

Sends and receives are not spelled: a stage sends its activation after `F` or `f` and the gradient
of its input after `B` or `I`. A schedule is not trusted because it parses: `verify` says whether it
is one.
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
"""What makes an activation to send."""
BACKWARDS = ("B", "I")
"""What makes a gradient to send."""
COPIES: tuple[Kind, ...] = ("O", "L")
"""What moves a graph and computes nothing."""

_SPELLING = re.compile(r"(\d+)([FfRBIWOL])(\d+)")


class ScheduleError(ValueError):
    """A schedule that cannot be made, read or run; the message names rank, action and reason."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank."""

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
    """`0F3`: stage 0, forward of micro-batch 3. Torch's spelling; f, R, O and L are ours."""
    match = _SPELLING.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text!r} is no action: expected stage, one of F f R B I W O L, micro-batch, as in 0F3"
        )
    stage, kind, microbatch = match.groups()
    return Action(cast(Kind, kind), int(stage), int(microbatch))


def render_csv(schedule: Schedule) -> str:
    """One line a rank, as `torch.distributed.pipelining` loads it ("compute_only")."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def parse_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of `render_csv`; empty cells (torch's idle steps) are dropped."""
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
