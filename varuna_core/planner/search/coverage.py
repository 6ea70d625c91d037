"""Record how far a search went through each class of plans: the terms of a certificate.

```
WHOLLY    every plan of the class was timed, or a bound ruled it out
IN_PART   some of its shapes were (`n of m`); the bound holds for the others too
NOT       the reason why; nothing is said of their plans
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.tables import Tables
from varuna_core.planner.search.space import FOR_MEMORY, SEARCHED, Option, Wishes
from varuna_core.schedule.registry import SCHEDULES


class Coverage(str, Enum):
    """How much of a class was searched."""

    WHOLLY = "wholly"
    IN_PART = "in-part"
    NOT = "not"


class Stop(str, Enum):
    """Reasons why a class was searched in part or not at all."""

    TIME = "time"
    NUMBER = "number"
    """The limit on the plans of one search was reached."""
    ONLY_ASKED = "only-asked"
    NO_FIGURES = "no-figures"
    """The profile has no figures for these plans."""
    ONE_STAGE = "one-stage"
    """Plans of this kind are searched with one stage on each rank."""
    ONE_F_ONE_B = "1f1b"
    """Ways to save memory are searched only with 1f1b, which holds least."""
    NEVER_FASTER = "never-faster"
    """In this cost model, another class always has a plan that is at least as fast."""


@dataclass(frozen=True, kw_only=True)
class PlanClass:
    """A class of plans that have one of these values in each field; in a class that was not
    searched, an empty field means any value."""

    coverage: Coverage
    stages_per_rank: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    tensor: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    recomputes: tuple[str, ...] = ()
    zero: tuple[int, ...] = ()
    placements: str = ""
    done: int = 0
    """The number of shapes (with schedule and recompute) that were searched wholly."""
    of: int = 0
    why: Stop | None = None
    """The reason for an incomplete search; None if all shapes were searched."""
    bound_s: float | None = None
    """Lower bound for the plans of the class; None if it was not searched."""


def make_class(
    options: Sequence[Option],
    *,
    stages_per_rank: tuple[int, ...],
    placements: str,
    num_open: int,
    of: int,
    why: Stop | None,
    bound_s: float,
) -> PlanClass:
    """Return the class of these options, `num_open` of which were not searched wholly."""
    shapes = [one.shape for one in options]
    return PlanClass(
        coverage=Coverage.IN_PART if num_open else Coverage.WHOLLY,
        stages_per_rank=stages_per_rank,
        schedules=tuple(dict.fromkeys(one.schedule for one in options)),
        tensor=tuple(sorted({one.tensor for one in shapes})),
        replicas=tuple(sorted({one.replicas for one in shapes})),
        micro_batches=tuple(sorted({one.micro_batch for one in shapes})),
        recomputes=tuple(dict.fromkeys(one.recompute for one in options)),
        zero=tuple(sorted({one.zero for one in shapes})),
        placements=placements,
        done=of - num_open,
        of=of,
        why=why if num_open else None,
        bound_s=bound_s,
    )


def list_not_searched(
    searched: Sequence[PlanClass],
    tables: Tables,
    cluster: Cluster,
    wishes: Wishes,
) -> Iterator[PlanClass]:
    """Yield classes of plans that the wishes allow and that were not searched, with the reason."""

    def leave_out(why: Stop, **values: tuple[object, ...]) -> PlanClass:
        return replace(PlanClass(coverage=Coverage.NOT, why=why), **values)  # type: ignore[arg-type]

    training, profile = tables.training, tables.profile
    known = {name for one in searched for name in one.schedules}
    if wishes.schedule is None:
        others = tuple(name for name in SCHEDULES if name not in known)
        if others and cluster.num_gpus > 1:
            yield leave_out(Stop.ONLY_ASKED, schedules=others)
        saving = tuple(way for way in training.recomputes if way in FOR_MEMORY)
        plain = tuple(name for name in SEARCHED if not SCHEDULES[name].recomputes)[1:]
        if saving and wishes.recompute is None:
            yield leave_out(Stop.ONE_F_ONE_B, schedules=plain, recomputes=saving)
        again = tuple(name for name in SEARCHED if SCHEDULES[name].recomputes)
        if "selective" in saving and wishes.recompute is None:
            yield leave_out(Stop.ONLY_ASKED, schedules=again, recomputes=("selective",))
    for one in searched:
        left = tuple(
            way for way in training.recomputes if way not in one.recomputes and profile.knows(way)
        )
        if left and wishes.recompute is None:
            yield leave_out(
                Stop.ONE_F_ONE_B if one.stages_per_rank == (1,) else Stop.ONE_STAGE,
                stages_per_rank=one.stages_per_rank,
                schedules=one.schedules,
                recomputes=left,
            )
        more = tuple(range(one.stages_per_rank[-1] + 1, tables.size // 2 + 1))
        if "interleaved" in one.schedules and more and wishes.partition is None:
            yield leave_out(Stop.NUMBER, stages_per_rank=more, schedules=("interleaved",))
    if wishes.zero is None and cluster.num_gpus > 1:
        yield leave_out(Stop.NEVER_FASTER, zero=(2,))
        yield leave_out(Stop.ONLY_ASKED, zero=(3,))
    ways = tuple(way for way in training.recomputes if not profile.knows(way))
    if ways and wishes.recompute is None:
        yield leave_out(Stop.NO_FIGURES, recomputes=ways)
    if wishes.tensor is None:
        held = {degree for one in searched for degree in one.tensor}
        largest = max(kind.gpus for kind in cluster.kinds)
        degrees = tuple(n for n in (1, 2, 4, 8, 16) if n <= largest and n not in held)
        if degrees:
            yield leave_out(Stop.NO_FIGURES, tensor=degrees)
    if wishes.micro_batch is None:
        sizes = [size for gpu in profile.gpus.values() for size, _ in gpu.cells]
        larger = range(max(sizes, default=0) + 1, training.batch + 1)
        left_sizes = tuple(n for n in larger if training.batch % n == 0)
        if left_sizes:
            yield leave_out(Stop.NO_FIGURES, micro_batches=left_sizes)
