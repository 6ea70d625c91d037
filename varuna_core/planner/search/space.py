"""What a search looks through: shapes, schedules, placements. Keys that a conf fixes narrow it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.tables import Shape
from varuna_core.planner.model.training import Training
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.schedule.recompute import Recompute

SCHEDULES = ("1f1b", "gpipe", "varuna")
"""Those whose order depends on no costs; `zero_bubble` is made for each partition's own."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Keys that are fixed; None leaves them to the search."""

    stages: int | None = None
    replicas: int | None = None
    tensor: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    least: int = 1
    """Segments of each stage but the first and the last; 0 allows stages without any."""
    partition: tuple[int, ...] | None = None
    """Segments of each stage, the embedding and the head counted."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One shape and schedule, not yet placed."""

    shape: Shape
    schedule: str
    recompute: Literal["none", "full"]
    num_microbatches: int

    def __str__(self) -> str:
        shape = self.shape
        words = f"{self.schedule}, {shape.replicas} replicas, tensor {shape.tensor}"
        words += f", micro-batch {shape.micro_batch}"
        if self.recompute == "full":
            words += ", recompute"
        return words + (f", zero {shape.zero}" if shape.zero else "")


def list_options(
    profile: Profile, training: Training, cluster: Cluster, wishes: Wishes
) -> list[Option]:
    """All that the batch and the profile allow; PlanningError that says why there are none."""
    kinds = sorted({kind.gpu for kind in cluster.kinds})
    degrees = set.intersection(*(profile.list_degrees(kind) for kind in kinds))
    tensors = _choose("tensor", wishes.tensor, sorted(degrees))
    divisors = [n for n in range(1, training.batch + 1) if training.batch % n == 0]
    largest = max(count_replicas(cluster, tensor) for tensor in tensors)
    replicas = _choose("replicas", wishes.replicas, [n for n in divisors if n <= largest])
    sizes = sorted({size for kind in kinds for size, _ in profile.find_gpu(kind).cells})
    micro_batches = _choose(
        "micro_batch", wishes.micro_batch, [n for n in divisors if n <= max(sizes, default=0)]
    )
    schedules = [wishes.schedule] if wishes.schedule else list(SCHEDULES)
    known = (*SCHEDULES, "zero_bubble")
    if wishes.schedule and wishes.schedule not in known:
        raise PlanningError(f"schedule {wishes.schedule!r} is not planned; {', '.join(known)} are")
    ways: list[Literal["none", "full"]] = ["none", "full"]
    if wishes.recompute in ("none", "full"):
        ways = [wishes.recompute]
    elif wishes.recompute == "auto":
        raise PlanningError("recompute auto is not planned: say none or full, or leave it out")
    zeros = [0, 1] if wishes.zero is None else [wishes.zero]
    options = []
    for tensor, count, size in itertools.product(tensors, replicas, micro_batches):
        number = training.count_micro_batches(count, size)
        if not number:
            continue
        for schedule, way, zero in itertools.product(schedules, ways, zeros):
            always = schedule == "varuna"
            if always != (way == "full") and always:
                if wishes.recompute != "none" or wishes.schedule is None:
                    continue
                raise PlanningError("schedule varuna recomputes: recompute none contradicts it")
            if zero and count == 1 and wishes.zero is None:
                continue
            shape = Shape(tensor=tensor, replicas=count, micro_batch=size, zero=zero)
            options.append(
                Option(shape=shape, schedule=schedule, recompute=way, num_microbatches=number)
            )
    if not options:
        raise PlanningError(
            f"a batch of {training.batch} is not divided by {_say('replicas', replicas)} times "
            f"{_say('micro_batch', micro_batches)}"
        )
    return options


def _choose(name: str, wish: int | None, allowed: Sequence[int]) -> list[int]:
    if wish is None:
        if not allowed:
            raise PlanningError(f"no {name} is possible")
        return list(allowed)
    if wish not in allowed:
        words = ", ".join(map(str, allowed)) or "none"
        raise PlanningError(f"{name} {wish} is not possible here; possible are {words}")
    return [wish]


def _say(name: str, values: Sequence[int]) -> str:
    return f"{name} {values[0]}" if len(values) == 1 else f"any {name} of {list(values)}"


def count_replicas(cluster: Cluster, tensor: int) -> int:
    return sum(kind.count * (kind.gpus // tensor) for kind in cluster.kinds)
