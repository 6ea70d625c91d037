"""Define the space of a search: shapes, schedules and placements. Keys fixed by a conf narrow it.

With few nodes, placements are every order of every choice of nodes. With many, the nodes of a kind
stay together: placements are the kinds in every order, with any number of stages on each. A plan's
certificate names which of these was searched.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from varuna_core.planner.model.cluster import (
    Cluster,
    Order,
    PlacedPipeline,
    count_stages,
    list_all_orders,
    list_blocks,
)
from varuna_core.planner.model.cluster import place as place_stages
from varuna_core.planner.model.tables import Array, Shape
from varuna_core.planner.model.training import RECOMPUTES, TrainingModel
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import SCHEDULES, has_one_stage_a_rank

SEARCHED = ("1f1b", "gpipe", "varuna")
"""Schedules searched unless the conf names one; their order does not depend on costs."""


PLAIN = ("1f1b", "gpipe")
"""The simplest schedules, simplest first: 1f1b holds least. Other schedules are less simple."""
AGAIN: tuple[Recompute, ...] = ("full", "selective")
"""Recompute modes for schedules that always recompute."""
FOR_MEMORY: tuple[Recompute, ...] = ("auto", "selective", "offload")
"""Recompute modes that are never faster than none; they are searched only if memory is short."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Values fixed by the conf; None leaves a value to the search."""

    stages: int | None = None
    replicas: int | None = None
    tensor: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    least: int = 1
    """Least segments of each inner stage; 0 allows stages without segments."""
    partition: tuple[int, ...] | None = None
    """Segments of each stage, counting embedding and head."""

    def is_for_memory(self, recompute: Recompute) -> bool:
        """Return True if this mode only saves memory and the user did not ask for it."""
        return recompute in FOR_MEMORY and self.recompute is None


@dataclass(frozen=True, kw_only=True)
class Option:
    """A candidate plan: its parallel degrees and schedule, not yet placed on nodes."""

    shape: Shape
    schedule: str
    recompute: Recompute
    num_microbatches: int

    def measure_simplicity(self, stages: int) -> tuple[int, ...]:
        """Return a sort key that puts the simplest options first: by the ranks of a replica, then
        by the work of a rank."""
        return (
            stages * self.shape.tensor,
            RECOMPUTES.index(self.recompute),
            self.shape.zero,
            PLAIN.index(self.schedule) if self.schedule in PLAIN else len(PLAIN),
        )

    def __str__(self) -> str:
        shape = self.shape
        words = f"{self.schedule}, {shape.replicas} replicas, tensor {shape.tensor}"
        words += f", micro-batch {shape.micro_batch}"
        how = self.recompute
        words += {"none": "", "full": ", recompute", "offload": ", offload"}.get(
            how, f", recompute {how}"
        )
        return words + (f", zero {shape.zero}" if shape.zero else "")


def list_options(
    profile: Profile, training: TrainingModel, cluster: Cluster, wishes: Wishes
) -> list[Option]:
    """Return the options that batch and profile allow; PlanningError with the reason if none."""
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
    schedules = [wishes.schedule] if wishes.schedule else list(SEARCHED)
    others = (name for name in SCHEDULES if name not in SEARCHED and has_one_stage_a_rank(name))
    known = (*SEARCHED, *others)
    if wishes.schedule and wishes.schedule not in known:
        raise PlanningError(f"schedule {wishes.schedule!r} is not planned: use {', '.join(known)}")
    ways = [way for way in training.recomputes if profile.knows(way)]
    if wishes.recompute is not None:
        ways = [wishes.recompute]
        _check_recompute(profile, wishes, wishes.recompute)
    zeros = [0, 1] if wishes.zero is None else [wishes.zero]
    if wishes.zero == 3:
        if wishes.schedule and SCHEDULES[wishes.schedule].splits_backward:
            raise PlanningError(
                f"schedule {wishes.schedule} cannot be planned with zero 3, which cannot "
                "postpone weight gradients: use 1f1b"
            )
        # The runtime refuses zero 3 together with tensor parallelism.
        if min(tensors) > 1:
            raise PlanningError(f"parallel.zero 3 needs parallel.tensor 1, not {tensors[0]}")
        tensors = [1]
    options = []
    for tensor, count, size in itertools.product(tensors, replicas, micro_batches):
        number = training.count_micro_batches(count, size)
        if not number:
            continue
        for schedule, way, zero in itertools.product(schedules, ways, zeros):
            if wishes.is_for_memory(way) and not _saves_memory(schedule, wishes):
                continue
            if zero == 3 and way in ("auto", "offload"):
                continue  # the runtime keeps all with the one, and refuses the other
            if SCHEDULES[schedule].recomputes and way not in AGAIN:
                if wishes.recompute is None or wishes.schedule is None:
                    continue
                raise PlanningError(
                    f"schedule {schedule} always recomputes, which contradicts recompute {way}"
                )
            if zero and count == 1 and wishes.zero is None:
                continue
            shape = Shape(tensor=tensor, replicas=count, micro_batch=size, zero=zero)
            options.append(
                Option(shape=shape, schedule=schedule, recompute=way, num_microbatches=number)
            )
    if not options:
        raise PlanningError(
            f"a batch of {training.batch} is not divisible by {_say('replicas', replicas)} "
            f"times {_say('micro_batch', micro_batches)}"
        )
    return options


def _check_recompute(profile: Profile, wishes: Wishes, way: Recompute) -> None:
    if way == "auto":
        raise PlanningError("recompute auto cannot be planned: set another mode, or leave it out")
    if not profile.knows(way):
        raise MissingData(
            f"the profile has no times of recompute {way}: profile again, or set another "
            "parallel.recompute"
        )
    if way == "offload" and wishes.zero == 3:
        raise PlanningError("parallel.recompute offload needs parallel.zero 0, 1 or 2, not 3")


def _saves_memory(schedule: str, wishes: Wishes) -> bool:
    """Return True if memory-saving recompute modes (FOR_MEMORY) are planned with this schedule.

    Its order must not depend on memory; unless the wishes name it, it must be 1f1b, which holds
    least.
    """
    kind = SCHEDULES[schedule]
    if kind.recomputes or kind.count_ahead is None:
        return False
    return schedule in (PLAIN[0], wishes.schedule)


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


Tier = Literal["alike", "orders", "whole", "blocks"]
NAMES: dict[Tier, str] = {
    "alike": "equal nodes, whose GPUs are used node by node, with any number of stages",
    "orders": "every choice and order of nodes, whose GPUs are used node by node",
    "whole": "all or no nodes of each kind, kinds in every order",
    "blocks": "the nodes of a kind together, kinds in every order, any number of stages on each",
}
MOST_ORDERS = 3000
"""The most orders of nodes; if there are more, the nodes of a kind are kept together."""


class Placements:
    """Placements on a cluster; `columns` of counts are kinds of places, such as ("A10", "A100")."""

    def __init__(self, cluster: Cluster, most_stages: int) -> None:
        self.cluster, self.most_stages = cluster, most_stages
        several = len(cluster.kinds) > 1
        self.orders = list_all_orders(cluster, MOST_ORDERS) if several else None
        self._groups: dict[tuple[int, int], dict[tuple[int, ...], list[PlacedPipeline]]] = {}
        self._columns: dict[tuple[int, int], list[tuple[str, ...]]] = {}
        self._counts: dict[tuple[Any, ...], tuple[list[tuple[str, ...]], Array]] = {}

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Classes of placements to search in turn, each a part of the next."""
        if len(self.cluster.kinds) == 1:
            return ("alike",)
        return ("orders",) if self.orders is not None else ("whole", "blocks")

    def list_counts(
        self, tensor: int, replicas: int, stages: int | None, tier: Tier
    ) -> tuple[list[tuple[str, ...]], Array]:
        """Return the kinds of node or group that hold stages, and an array with a row for each
        possible distribution: column i is the number of stages on kind i."""
        key = tensor, replicas, stages, tier
        if key not in self._counts:
            self._counts[key] = self._list_counts(*key)
        return self._counts[key]

    def _list_counts(
        self, tensor: int, replicas: int, stages: int | None, tier: Tier
    ) -> tuple[list[tuple[str, ...]], Array]:
        if self.orders is None:
            limits = [count_stages(kind, tensor, replicas) for kind in self.cluster.kinds]
            columns: list[tuple[str, ...]] = [(kind.gpu,) for kind in self.cluster.kinds]
            ranges = [np.arange(min(limit, self.most_stages) + 1) for limit in limits]
            counts = np.stack([axis.ravel() for axis in np.meshgrid(*ranges)], axis=1)
        else:
            limits = []
            groups = self._find_groups(tensor, replicas)
            columns = self._columns[tensor, replicas]
            counts = np.array(list(groups), dtype=int).reshape(len(groups), len(columns))
        total = counts.sum(axis=1)
        fits = (total >= 1) & (total <= self.most_stages)
        if stages is not None:
            fits &= total == stages
        if tier == "whole":
            fits &= ((counts == 0) | (counts == limits)).all(axis=1)
        return columns, counts[fits]

    def iterate(
        self, tensor: int, replicas: int, counts: tuple[int, ...]
    ) -> Iterator[PlacedPipeline]:
        if self.orders is not None:
            yield from self._find_groups(tensor, replicas)[counts]
            return
        for order in list_blocks(self.cluster, counts, tensor, replicas):
            placed = place_stages(order, sum(counts), tensor, replicas)
            if placed is not None:
                yield placed

    def _find_groups(
        self, tensor: int, replicas: int
    ) -> dict[tuple[int, ...], list[PlacedPipeline]]:
        key = tensor, replicas
        if key not in self._groups:
            assert self.orders is not None
            found: dict[PlacedPipeline, Counter[tuple[str, ...]]] = {}
            seen = set()
            for order in self.orders:
                for placed in self._place_all(order, tensor, replicas):
                    same = placed.sites, placed.boundaries
                    if same not in seen:
                        seen.add(same)
                        found[placed] = Counter(site.kinds for site in placed.sites)
            columns = sorted({kinds for counted in found.values() for kinds in counted})
            groups: dict[tuple[int, ...], list[PlacedPipeline]] = {}
            for placed, counted in found.items():
                groups.setdefault(tuple(counted[c] for c in columns), []).append(placed)
            self._groups[key], self._columns[key] = groups, columns
        return self._groups[key]

    def _place_all(self, order: Order, tensor: int, replicas: int) -> Iterator[PlacedPipeline]:
        """Yield placements with numbers of stages that need all these nodes."""
        most = sum(max(1, kind.gpus // tensor // replicas) for kind, _ in order)
        for stages in itertools.takewhile(lambda n: n > 0, range(most, 0, -1)):
            placed = place_stages(order, stages, tensor, replicas)
            if placed is not None and len(placed.sites) <= self.most_stages:
                yield placed
