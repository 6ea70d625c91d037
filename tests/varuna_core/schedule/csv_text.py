"""Schedules as text, a line a rank: the "compute_only" format of `torch.distributed.pipelining`."""

from __future__ import annotations

import re
from typing import cast

from varuna_core.schedule.actions import Action, Kind, Schedule, ScheduleError

_SPELLING = re.compile(r"(\d+)([FfRBIWOL])(\d+)")


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
