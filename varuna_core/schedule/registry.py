"""List the schedules by the names that a conf uses, and build them.

To add a schedule, write a function that builds it and add a row to `SCHEDULES`. The conf, the
runtime, the stage map and the planner read this table; only the conf's `Literal`
(jobs/conf/schema.py), which type checkers read, repeats the names, as a test checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from varuna_core.facts.partition import Partition
from varuna_core.schedule.actions import Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.generators import (
    build_gpipe,
    build_interleaved,
    build_one_f_one_b,
    build_varuna,
    place_in_rounds,
)
from varuna_core.schedule.recompute import Memory, Recompute, apply_recompute, measure_memory
from varuna_core.schedule.zero_bubble import build_zbv, build_zero_bubble, place_v

AUTO = "auto"
"""Name of the automatic choice: the shortest schedule, in simulation, that fits in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """Sizes, costs and memory limits for which to build a schedule."""

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int
    costs: Costs
    """Costs of actions on all stages."""
    recompute: Recompute
    memory: Memory | None

    @property
    def max_graphs(self) -> int | None:
        """Return the number of graphs that fit on the smallest rank; None if there is no limit."""
        if self.memory is None or self.recompute != "none":
            return None
        return max(self.stages_per_rank, _count_graphs(self.memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """A kind of schedule, with the properties that other parts need."""

    build: Callable[[ScheduleRequest], Schedule]
    stages_per_rank: int | None = 1
    """Number of stages on each rank; None if the schedule supports any number."""
    place: Callable[[int, int], tuple[int, ...]] = place_in_rounds
    """Function that maps the numbers of ranks and of stages per rank to the rank of each stage."""
    splits_backward: bool = False
    """True if weight gradients may be postponed, with `I` and `W` instead of `B`."""
    recomputes: bool = False
    """True if `build` always adds recomputes; recompute `none` then means `full`."""
    runs_ahead: bool = False
    """True if a rank that waits for a gradient may run its next forward early."""
    gradients_last: bool = False
    """True if all forwards of all stages come before any backward."""
    count_ahead: Callable[[int, int], int] | None = None
    """Function that maps the numbers of later stages and of micro-batches to a stage's forwards
    before its first backward, after which forwards and backwards alternate. None if the order
    differs or depends on costs; the planner then builds the schedule to find out."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(
        build=lambda wanted: build_gpipe(wanted.num_ranks, wanted.num_microbatches),
        gradients_last=True,
        count_ahead=lambda behind, microbatches: microbatches,
    ),
    "1f1b": ScheduleKind(
        build=lambda wanted: build_one_f_one_b(wanted.num_ranks, wanted.num_microbatches),
        count_ahead=lambda behind, microbatches: behind + 1,
    ),
    "varuna": ScheduleKind(
        build=lambda wanted: build_varuna(
            wanted.num_ranks,
            wanted.num_microbatches,
            wanted.costs,
            recompute=wanted.recompute,
            memory=wanted.memory,
        ),
        recomputes=True,
        runs_ahead=True,
        count_ahead=lambda behind, microbatches: behind + 1 + (behind > 0),
    ),
    "zero_bubble": ScheduleKind(
        build=lambda wanted: build_zero_bubble(
            wanted.num_ranks,
            wanted.num_microbatches,
            wanted.costs,
            wanted.max_graphs,
            recompute=wanted.recompute,
            memory=wanted.memory,
        ),
        splits_backward=True,
    ),
    "interleaved": ScheduleKind(
        build=lambda wanted: build_interleaved(
            wanted.num_ranks, wanted.num_microbatches, wanted.stages_per_rank
        ),
        stages_per_rank=None,
    ),
    "zbv": ScheduleKind(
        build=lambda wanted: build_zbv(
            wanted.num_ranks,
            wanted.num_microbatches,
            wanted.costs,
            wanted.max_graphs,
            recompute=wanted.recompute,
            memory=wanted.memory,
        ),
        stages_per_rank=2,
        place=lambda num_ranks, stages_per_rank: place_v(num_ranks),
        splits_backward=True,
    ),
}


def has_one_stage_a_rank(name: str) -> bool:
    """Return True for schedules with one stage per rank, and for `auto` by default."""
    return name == AUTO or SCHEDULES[name].stages_per_rank == 1


def may_split_backward(name: str) -> bool:
    """Return True for schedules that may postpone weight gradients, and for `auto`."""
    return name == AUTO or SCHEDULES[name].splits_backward


def count_stages(schedule: str, stages_per_rank: int) -> int:
    """Return the number of stages of each rank, which some schedules fix themselves."""
    if stages_per_rank < 1:
        raise ValueError(f"stages_per_rank {stages_per_rank} must be 1 or more")
    own = None if schedule == AUTO else SCHEDULES[schedule].stages_per_rank
    if own is None or stages_per_rank in (1, own):
        return own or stages_per_rank
    takers = [name for name, kind in SCHEDULES.items() if kind.stages_per_rank is None]
    fixed = [(name, kind.stages_per_rank) for name, kind in SCHEDULES.items()]
    raise ValueError(
        f"schedule {schedule!r} does not support stages_per_rank {stages_per_rank}: "
        f"{' and '.join([*takers, AUTO])} do, "
        + ", ".join(f"{name} has {count}" for name, count in fixed if count not in (None, 1))
    )


def count_stages_per_rank(name: str, partition: Partition | None, depth: int) -> int:
    """Return the number of stages per rank: the schedule's own, the partition's, or else two."""
    own = 1 if name == AUTO else SCHEDULES[name].stages_per_rank
    if own is not None:
        return own
    return 2 if partition is None else partition.num_stages // depth


def place_stages(name: str, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage; if ranks have several, resolve `auto` before this call."""
    place = place_in_rounds if name == AUTO else SCHEDULES[name].place
    return place(num_ranks, stages_per_rank)


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
    """Build the schedule `name` with this recompute mode (varuna always recomputes: `none` means
    `full`, and `offload` is an error).

    By default, all stages have equal costs. A schedule that does not fit in `memory` is an error.
    """
    num_stages = num_ranks * stages_per_rank
    if name not in (*SCHEDULES, AUTO):
        raise ScheduleError(f"no schedule {name!r}: choose one of {', '.join((*SCHEDULES, AUTO))}")
    costs = costs or build_even_costs(num_stages)
    if costs.num_stages != num_stages:
        raise ScheduleError(f"{name}: costs has {costs.num_stages} stages, expected {num_stages}")
    wanted = ScheduleRequest(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        costs=costs,
        recompute=recompute,
        memory=memory,
    )
    return _choose_best(wanted) if name == AUTO else _build(name, wanted)


def _build(name: str, wanted: ScheduleRequest) -> Schedule:
    kind, given = SCHEDULES[name], wanted.stages_per_rank
    if kind.stages_per_rank not in (None, given):
        has = "one stage" if kind.stages_per_rank == 1 else f"{kind.stages_per_rank} stages"
        raise ScheduleError(f"{name} has {has} a rank, not {given}")
    if kind.recomputes and wanted.recompute == "offload":
        raise ScheduleError(
            f"{name} recomputes, so recompute offload is not supported: choose another schedule"
        )
    if kind.recomputes and wanted.recompute == "none":
        wanted = replace(wanted, recompute="full")
    schedule = replace(kind.build(wanted), name=name)
    schedule = apply_recompute(schedule, wanted.recompute, wanted.memory)
    if wanted.memory is not None:
        _check_fits(schedule, wanted.memory)
    return schedule


def _choose_best(wanted: ScheduleRequest) -> Schedule:
    """Return the shortest schedule, in simulation, that fits; among equals, the last registered."""
    ways: list[Recompute] = [wanted.recompute]
    if wanted.recompute == "auto":
        ways.append("none")  # a schedule made for little memory may beat one made to fit
    attempts = []
    for name, kind in reversed(SCHEDULES.items()):
        fits = kind.stages_per_rank in (None, wanted.stages_per_rank)
        is_alone = kind.stages_per_rank is None and wanted.stages_per_rank == 1
        if fits and not is_alone and not kind.recomputes:
            attempts += [(name, way) for way in ways]
    if wanted.recompute != "none":
        attempts += [
            (name, wanted.recompute)
            for name, kind in SCHEDULES.items()
            if kind.recomputes and kind.stages_per_rank in (None, wanted.stages_per_rank)
        ]
    found: list[Schedule] = []
    reasons = []
    for name, way in attempts:
        try:
            found.append(_build(name, replace(wanted, recompute=way)))
        except ScheduleError as error:
            reasons.append(f"{name}: {error}")
    if not found:
        raise ScheduleError("no schedule fits; " + "; ".join(reasons))
    return min(found, key=lambda schedule: simulate(schedule, wanted.costs).makespan)


def _count_graphs(memory: Memory) -> int:
    """Return how many graphs of the largest stage fit on the smallest rank."""
    largest = max(memory.graphs)
    return int(min(memory.limits) // largest) if largest else len(memory.graphs)


def _check_fits(schedule: Schedule, memory: Memory) -> None:
    for rank, held in enumerate(measure_memory(schedule, memory)):
        if held > memory.limits[rank]:
            raise ScheduleError(
                f"rank {rank}: {schedule.name} holds {held:g} at once, but the limit is "
                f"{memory.limits[rank]:g}: try recompute: auto"
            )
