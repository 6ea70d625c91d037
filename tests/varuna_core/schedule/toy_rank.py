"""A schedule of a test's own, and a rank that trains with it: `toy_rank.py <folder> <rank> ...`.

One micro-batch at a time goes down the stages and back:

    F0 .. .. B0 F1 .. .. B1
    .. F0 B0 .. .. F1 B1 ..
"""

from __future__ import annotations

from tests.ranks import train_rank
from varuna_core.schedule.actions import Action, Kind, Schedule
from varuna_core.schedule.registry import ScheduleKind, ScheduleRequest, place_stages
from varuna_core.schedule.zero_bubble import place_v


def build_toy(wanted: ScheduleRequest) -> Schedule:
    name = "toy" if wanted.stages_per_rank == 1 else "toy_v"
    placement = place_stages(name, wanted.num_ranks, wanted.stages_per_rank)
    down: list[tuple[Kind, int]] = [("F", stage) for stage in range(len(placement))]
    back: list[tuple[Kind, int]] = [("B", stage) for stage in reversed(range(len(placement)))]
    return Schedule(
        name=name,
        ranks=tuple(
            tuple(
                Action(kind, stage, microbatch)
                for microbatch in range(wanted.num_microbatches)
                for kind, stage in (*down, *back)
                if placement[stage] == rank
            )
            for rank in range(wanted.num_ranks)
        ),
        placement=placement,
        num_microbatches=wanted.num_microbatches,
    )


TOYS = {
    "toy": ScheduleKind(build=build_toy),
    "toy_v": ScheduleKind(
        build=build_toy,
        stages_per_rank=2,
        place=lambda num_ranks, stages_per_rank: place_v(num_ranks),
    ),
}


if __name__ == "__main__":
    from varuna_core.schedule.registry import SCHEDULES

    SCHEDULES.update(TOYS)
    train_rank.main()
