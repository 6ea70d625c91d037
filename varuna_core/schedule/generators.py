"""Build schedules with a fixed order of actions: gpipe, 1f1b, varuna, interleaved 1f1b.

In the drawings F, f, R, I and W take one unit of time and B two units; a test draws them again.
"""

from __future__ import annotations

from varuna_core.schedule.actions import Action, Kind, Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Memory, Recompute, apply_recompute


def build_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build GPipe: all forwards, then all backwards, so that all graphs are held at once.

    ```
    F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    .. F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
    .. .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 --
    .. .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 --
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    ranks = [
        _run("F", stage, 0, num_microbatches) + _run("B", stage, 0, num_microbatches)
        for stage in range(num_ranks)
    ]
    return _build("gpipe", ranks, num_microbatches)


def build_one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Build 1F1B: as long as gpipe, but stage s of p holds only p - s graphs.

    ```
    F0 F1 F2 F3 .. .. .. .. .. .. B0 -- F4 B1 -- F5 B2 -- .. B3 -- .. B4 -- .. B5 --
    .. F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .. B4 -- .. B5 --
    .. .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .. B5 --
    .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 --
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    aheads = [num_ranks - stage for stage in range(num_ranks)]
    return _build("1f1b", _alternate(aheads, num_microbatches), num_microbatches)


def build_varuna(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_microbatches: int | None = None,
    *,
    recompute: Recompute = "full",
    memory: Memory | None = None,
) -> Schedule:
    """Build Varuna's schedule, which recomputes before the gradient arrives instead of afterwards.

    The last stage uses its graph at once and never recomputes. The other stages hold one graph and
    otherwise only inputs, so they may run one forward further ahead than in 1f1b, or more with slow
    links: with `costs`, the shortest in simulation. `max_microbatches` limits the micro-batches
    that a stage has begun but not finished.

    ```
    f0 f1 f2 f3 f4 R0 .. .. .. .. B0 -- f5 R1 B1 -- R2 .. B2 -- R3 .. B3 -- R4 B4 -- R5 B5 --
    .. f0 f1 f2 f3 R0 .. .. B0 -- f4 R1 B1 -- f5 R2 B2 -- R3 .. B3 -- R4 B4 -- R5 B5 --
    .. .. f0 f1 f2 R0 B0 -- f3 R1 B1 -- f4 R2 B2 -- f5 R3 B3 -- R4 B4 -- R5 B5 --
    .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 --
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    bound = num_microbatches if max_microbatches is None else max_microbatches
    if bound < 1:
        raise ScheduleError(f"varuna: max_microbatches is {bound}, expected 1 or more")

    def build(slope: float, length: int) -> Schedule:
        beyond = [num_ranks - 1 - stage for stage in range(num_ranks)]  # stages behind this one
        aheads = [min(bound, 1 + int(slope * n) + (n > 0)) for n in beyond]
        schedule = _build("varuna", _alternate(aheads, length), length)
        return apply_recompute(schedule, recompute, memory)

    if costs is None:
        return build(1.0, num_microbatches)
    few = min(num_microbatches, 8 * num_ranks)
    makespans: dict[float, float] = {}
    for slope in (1.0, 1.5, 2.0, 3.0, 4.0):
        try:
            makespans[slope] = simulate(build(slope, few), costs).makespan
        except ScheduleError:  # the inputs of so many micro-batches do not fit
            break
    return build(min(makespans, key=lambda slope: makespans[slope], default=1.0), num_microbatches)


def build_interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Build interleaved 1F1B (arXiv 2104.04473): several stages per rank, stage s on rank s mod p.

    The ramps are as long as one stage's, so with v stages per rank the bubble is 1/v of 1F1B's. A
    rank runs rounds of p micro-batches, stage by stage. Any number of micro-batches is allowed:
    those beyond a multiple of p are distributed over the rounds, with the longer rounds first.

    ```
    0F0 0F1 0F2 2F0 2F1 2F2 ... 2B0 --- ... 2B1 --- ... 2B2 --- 0B0 --- 0B1 --- 0B2 ---
    ... 1F0 1F1 1F2 3F0 3B0 --- 3F1 3B1 --- 3F2 3B2 --- 1B0 --- 1B1 --- 1B2 ---
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    if stages_per_rank < 1:
        raise ScheduleError(f"interleaved: {stages_per_rank} stages per rank, expected 1 or more")
    rounds = _split_rounds(num_ranks, num_microbatches)
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Action("F", s, mb) for some in rounds for s in stages for mb in some]
        backwards = [Action("B", s, mb) for some in rounds for s in stages[::-1] for mb in some]
        warmup = (stages_per_rank - 1) * len(rounds[0]) + 2 * (num_ranks - 1 - rank)
        ahead = min(warmup, len(forwards) - 1)
        actions = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            actions += [forward, backward]
        ranks.append(tuple(actions + backwards[len(forwards) - ahead :]))
    return Schedule(
        name="interleaved",
        ranks=tuple(ranks),
        placement=place_in_rounds(num_ranks, stages_per_rank),
        num_microbatches=num_microbatches,
    )


def place_in_rounds(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the ranks of the stages: 0 1 2 0 1 2."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def check_sizes(num_ranks: int, num_microbatches: int) -> None:
    if num_ranks < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{num_ranks} ranks and {num_microbatches} micro-batches, expected 1 or more of each"
        )


def _split_rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Split micro-batches into nearly equal rounds of p or a few more, longer rounds first."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_rounds)
    begins = [i * size + min(i, longer) for i in range(num_rounds + 1)]
    return [range(begins[i], begins[i + 1]) for i in range(num_rounds)]


def _alternate(aheads: list[int], num_microbatches: int) -> list[list[Action]]:
    """Return actions by stage: `aheads[s]` forwards, then backwards and forwards alternately."""
    ranks = []
    for stage, ahead in enumerate(aheads):
        ahead = min(ahead, num_microbatches)
        actions = _run("F", stage, 0, ahead)
        for microbatch in range(num_microbatches):
            actions.append(Action("B", stage, microbatch))
            if microbatch + ahead < num_microbatches:
                actions.append(Action("F", stage, microbatch + ahead))
        ranks.append(actions)
    return ranks


def _run(kind: Kind, stage: int, begin: int, end: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(begin, end)]


def _build(name: str, ranks: list[list[Action]], num_microbatches: int) -> Schedule:
    return Schedule(
        name=name,
        ranks=tuple(map(tuple, ranks)),
        placement=tuple(range(len(ranks))),
        num_microbatches=num_microbatches,
    )
