"""Place the stages of a pipeline on the nodes of a cluster.

A stage is held by replicas x tensor GPUs. If these are of several kinds, each figure is that of the
slowest kind, since all replicas wait for the slowest one.

```
tensor 1, replicas 2, nodes of 4 GPUs       node A: stages 0 1   node B: stages 2 3
tensor 1, replicas 8, nodes of 4 GPUs       nodes A and B: stage 0   nodes C and D: stage 1
```

The ranks of a tensor-parallel group are on one node. Nodes are filled one after another; GPUs that
no replica fills stay idle, as do nodes after the last stage.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import Where

_Slot = tuple[tuple[int, str, int], ...]
"""Replicas of one stage: for each node its index, its kind of GPU and its number of replicas."""


@dataclass(frozen=True)
class StageSite:
    """The GPUs that hold one stage."""

    kinds: tuple[str, ...]
    """Kinds of GPU, without repetition, sorted."""
    group: tuple[tuple[str, int], ...]
    """Nodes of the ranks that sum gradients together: kind of GPU, and number of ranks on each."""
    sharing: int
    """The number of such groups that use the link of one node at the same time."""


@dataclass(frozen=True)
class GpuRoute:
    """The link that messages take from one GPU to another."""

    sender: str
    receiver: str
    where: Where
    flows: int
    """The number of messages on the link at the same time."""


@dataclass(frozen=True)
class Boundary:
    """The links between a stage and the next one, of which the slowest counts."""

    routes: tuple[GpuRoute, ...]


@dataclass(frozen=True)
class PlacedPipeline:
    """A pipeline with GPUs chosen for each stage."""

    sites: tuple[StageSite, ...]
    boundaries: tuple[Boundary, ...]
    nodes: tuple[str, ...] = ()
    """Kinds of the nodes, in the order in which stages fill them."""
    slots: tuple[_Slot, ...] = field(default=(), compare=False, repr=False)
    tensor: int = field(default=1, compare=False, repr=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple("+".join(site.kinds) for site in self.sites)

    def find_boundary(self, before: int, after: int) -> Boundary | None:
        """Return the boundary between any two ranks of a replica; None if they are the same."""
        if before == after:
            return None
        if after == before + 1:
            return self.boundaries[before]
        return _build_boundary(self.slots[before], self.slots[after], self.tensor)


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """A number of identical nodes."""

    name: str
    gpu: str
    """The GPU's name in the profile."""
    gpus: int
    """The number of GPUs on each node."""
    count: int
    price_per_hour: float | None = None
    """The price of one node."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes that a plan may use."""

    kinds: tuple[NodeKind, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise PlanningError(f"nodes must be of one kind or more, each kind once, not {names}")
        for kind in self.kinds:
            if kind.gpus < 1 or kind.count < 1:
                raise PlanningError(f"{kind.count} nodes {kind.name!r} of {kind.gpus} GPUs")

    @property
    def num_gpus(self) -> int:
        return sum(kind.gpus * kind.count for kind in self.kinds)

    @property
    def num_nodes(self) -> int:
        return sum(kind.count for kind in self.kinds)


Order = tuple[tuple[NodeKind, int], ...]
"""Nodes in sequence, with the most stages each may take; the last node of a kind may take fewer."""


def place(nodes: Order, stages: int, tensor: int, replicas: int) -> PlacedPipeline | None:
    """Place stages on nodes in sequence; None if the nodes are too few, or one is not needed."""
    slots: list[_Slot] = []
    filling: list[tuple[int, str, int]] = []
    missing = replicas
    for number, (node, most) in enumerate(nodes):
        if len(slots) == stages:
            return None
        groups = node.gpus // tensor
        if not groups:
            return None
        if filling or groups < replicas:
            filling.append((number, node.gpu, min(groups, missing)))
            missing -= filling[-1][2]
            if not missing:
                slots.append(tuple(filling))
                filling, missing = [], replicas
        else:
            for _ in range(min(groups // replicas, most, stages - len(slots))):
                slots.append(((number, node.gpu, replicas),))
    if filling or len(slots) < stages:
        return None
    return _join(slots, tensor, tuple(node.name for node, _ in nodes))


def place_in_turn(
    nodes: Sequence[NodeKind], stages: int, tensor: int, replicas: int
) -> PlacedPipeline:
    """Place tensor groups one after another, so a stage may begin on the node where another ends.

    A run with `parallel.order: data` has this layout. Too few nodes raise PlanningError.
    """
    rooms = [[number, node.gpus // tensor] for number, node in enumerate(nodes)]
    rooms.reverse()
    slots: list[_Slot] = []
    for _ in range(stages):
        missing, slot = replicas, []
        while missing:
            if not rooms:
                raise PlanningError(f"{stages} x {replicas} x {tensor} ranks need more GPUs")
            number, room = rooms[-1]
            some = min(room, missing)
            if some:
                slot.append((number, nodes[number].gpu, some))
            missing -= some
            rooms[-1][1] -= some
            if not rooms[-1][1]:
                rooms.pop()
        slots.append(tuple(slot))
    used = slots[-1][-1][0] + 1
    return _join(slots, tensor, tuple(node.name for node in nodes[:used]))


def _join(slots: Sequence[_Slot], tensor: int, names: tuple[str, ...]) -> PlacedPipeline:
    """Build the pipeline of placed stages. Stages that span the same nodes share their links."""
    spread = Counter(one[0] for slot in slots if len(slot) > 1 for one in slot)
    sites = tuple(
        _make_site(
            tuple(one[1:] for one in slot),
            tensor * (max(spread[one[0]] for one in slot) if len(slot) > 1 else 1),
        )
        for slot in slots
    )
    boundaries = [_build_boundary(*pair, tensor) for pair in itertools.pairwise(slots)]
    return PlacedPipeline(sites, tuple(boundaries), names, tuple(slots), tensor)


def _build_boundary(before: _Slot, after: _Slot, tensor: int) -> Boundary:
    first = before[0][0]
    pair = [tuple((one[0] - first, *one[1:]) for one in slot) for slot in (before, after)]
    return _make_boundary(pair[0], pair[1], tensor)


@lru_cache(maxsize=4096)
def _make_site(group: tuple[tuple[str, int], ...], sharing: int) -> StageSite:
    return StageSite(tuple(sorted({gpu for gpu, _ in group})), group, sharing)


@lru_cache(maxsize=16384)
def _make_boundary(before: _Slot, after: _Slot, tensor: int) -> Boundary:
    """Build the boundary between two stages; nodes are numbered from the first one used."""
    pairs = list(_pair_up(before, after))
    leaving: Counter[int] = Counter()
    coming: Counter[int] = Counter()
    for (a, _), (b, _), count in pairs:
        if a != b:
            leaving[a] += count
            coming[b] += count
    routes = set()
    for (a, sender), (b, receiver), _ in pairs:
        if a == b:
            routes.add(GpuRoute(sender, receiver, "intra", 1))
        else:
            flows = max(leaving[a], coming[b]) * tensor
            routes.add(GpuRoute(sender, receiver, "inter", flows))
    return Boundary(tuple(sorted(routes, key=str)))


def _pair_up(before: _Slot, after: _Slot) -> Iterator[tuple[tuple[int, str], tuple[int, str], int]]:
    """Yield sender, receiver and count for replicas of two stages that lie on the same nodes."""
    there = iter(after)
    node, gpu, left = next(there)
    for number, sender, count in before:
        while count:
            if not left:
                node, gpu, left = next(there)
            some = min(count, left)
            yield (number, sender), (node, gpu), some
            count, left = count - some, left - some


def count_stages(kind: NodeKind, tensor: int, replicas: int) -> int:
    """Return the most stages that all nodes of a kind can hold."""
    groups = kind.gpus // tensor
    if not groups:
        return 0
    if groups >= replicas:
        return kind.count * (groups // replicas)
    return kind.count // -(-replicas // groups)


def list_all_orders(cluster: Cluster, most: int) -> list[Order] | None:
    """Return every order of every choice of nodes; None if there are more than `most`."""
    counts = tuple(kind.count for kind in cluster.kinds)
    if not has_few_orders(counts, most):  # before thousands of nodes are put in orders
        return None
    orders: list[Order] = []
    waiting: list[tuple[Order, tuple[int, ...]]] = [((), counts)]
    while waiting:
        order, left = waiting.pop()
        if order:
            orders.append(order)
        for number, kind in reversed(list(enumerate(cluster.kinds))):
            if left[number]:
                rest = (*left[:number], left[number] - 1, *left[number + 1 :])
                waiting.append(((*order, (kind, kind.gpus)), rest))
    return orders


def has_few_orders(counts: Sequence[int], most: int) -> bool:
    """Return True if choices of nodes with these counts have at most `most` orders."""
    total = -1  # no node at all is no order
    for chosen in itertools.product(*(range(count + 1) for count in counts)):
        ways, length = 1, 0
        for number in chosen:
            length += number
            ways *= math.comb(length, number)
        total += ways
        if total > most:
            return False
    return True


def list_blocks(
    cluster: Cluster, counts: Sequence[int], tensor: int, replicas: int
) -> Iterator[Order]:
    """Yield nodes for `counts` stages of each kind, with the kinds in every order."""
    used = [(kind, n) for kind, n in zip(cluster.kinds, counts, strict=True) if n]
    for order in itertools.permutations(used):
        nodes: list[tuple[NodeKind, int]] = []
        for kind, stages in order:
            groups = kind.gpus // tensor
            if groups >= replicas:
                each = groups // replicas
                nodes += [(kind, min(each, stages - n)) for n in range(0, stages, each)]
            else:
                nodes += [(kind, 1)] * (stages * -(-replicas // groups))
        yield tuple(nodes)
