"""A schedule by its name, or the best there is for given costs and memory (`auto`)."""

from __future__ import annotations

from typing import Literal, get_args

from varuna_core.schedule.actions import Schedule, ScheduleError
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.generators import (
    build_gpipe,
    build_interleaved,
    build_one_f_one_b,
    build_varuna,
)
from varuna_core.schedule.recompute import Memory, Recompute, apply_recompute, measure_memory
from varuna_core.schedule.simulate import simulate
from varuna_core.schedule.zero_bubble import build_zbv, build_zero_bubble

Name = Literal["gpipe", "1f1b", "varuna", "zero_bubble", "interleaved", "zbv", "auto"]


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 1,
    costs: Costs | None = None,
    recompute: Recompute = "none",
    memory: Memory | None = None,
) -> Schedule:
    """The schedule `name`, recomputing as asked (varuna always does: `none` is `full` to it).

    Costs are those of all stages, even if not given. With `memory`, what does not fit is refused.
    """
    num_stages = num_ranks * stages_per_rank
    if name not in get_args(Name):
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(get_args(Name))}")
    costs = costs or build_even_costs(num_stages)
    if costs.num_stages != num_stages:
        raise ScheduleError(f"{name}: costs of {costs.num_stages} stages, {num_stages} expected")
    if name == "auto":
        return _find_best(num_ranks, num_microbatches, stages_per_rank, costs, recompute, memory)
    if name == "zbv" and stages_per_rank != 2:
        raise ScheduleError(f"zbv has 2 stages a rank, not {stages_per_rank}")
    if name not in ("interleaved", "zbv") and stages_per_rank != 1:
        raise ScheduleError(f"{name} has one stage a rank, not {stages_per_rank}")
    if name == "varuna":
        wanted: Recompute = "full" if recompute == "none" else recompute
        schedule = build_varuna(num_ranks, num_microbatches, costs, recompute=wanted, memory=memory)
    elif name == "gpipe":
        schedule = build_gpipe(num_ranks, num_microbatches)
    elif name == "1f1b":
        schedule = build_one_f_one_b(num_ranks, num_microbatches)
    elif name == "interleaved":
        schedule = build_interleaved(num_ranks, num_microbatches, stages_per_rank)
    else:
        build = build_zbv if name == "zbv" else build_zero_bubble
        bound = None if memory is None or recompute != "none" else _count_graphs(memory)
        if bound is not None:
            bound = max(stages_per_rank, min(bound, num_ranks * stages_per_rank))
        schedule = build(num_ranks, num_microbatches, costs, bound)
    if name != "varuna":
        schedule = apply_recompute(schedule, recompute, memory)
    if memory is not None:
        _check_fits(schedule, memory)
    return schedule


def _find_best(
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int,
    costs: Costs,
    recompute: Recompute,
    memory: Memory | None,
) -> Schedule:
    """The shortest as simulated of those that fit."""
    names = {1: ["zero_bubble", "1f1b", "gpipe"], 2: ["zbv", "interleaved"]}
    found: list[Schedule] = []
    reasons = []
    ways: list[Recompute] = [recompute]
    if recompute == "auto":
        ways.append("none")  # a schedule made for little memory may beat one made to fit
    attempts = [(name, way) for name in names.get(stages_per_rank, ["interleaved"]) for way in ways]
    if recompute != "none" and stages_per_rank == 1:
        attempts.append(("varuna", recompute))
    for name, way in attempts:
        try:
            found.append(
                build_schedule(
                    name,
                    num_ranks,
                    num_microbatches,
                    stages_per_rank=stages_per_rank,
                    costs=costs,
                    recompute=way,
                    memory=memory,
                )
            )
        except ScheduleError as error:
            reasons.append(f"{name}: {error}")
    if not found:
        raise ScheduleError("no schedule fits; " + "; ".join(reasons))
    return min(found, key=lambda schedule: simulate(schedule, costs).makespan)


def _count_graphs(memory: Memory) -> int:
    """Graphs of the largest stage that fit on the smallest rank."""
    largest = max(memory.graphs)
    return int(min(memory.limits) // largest) if largest else len(memory.graphs)


def _check_fits(schedule: Schedule, memory: Memory) -> None:
    for rank, held in enumerate(measure_memory(schedule, memory)):
        if held > memory.limits[rank]:
            raise ScheduleError(
                f"rank {rank}: {schedule.name} holds {held:g} at once, the limit is "
                f"{memory.limits[rank]:g}; recompute: auto makes it fit if anything does"
            )
