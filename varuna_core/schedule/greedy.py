"""A list scheduler: every rank takes, whenever it is free, the best of what it can do then.

It knows what each action costs and which messages are already on their way, so it can see whether
a weight gradient fits in front of the next gradient to arrive (the lookahead), and it never holds
more graphs than its bound. A schedule it makes cannot get stuck: each later stage of a rank has a
graph kept free for it, so the oldest micro-batch can always go on.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from varuna_core.schedule.actions import Action, Kind, Schedule
from varuna_core.schedule.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a rank chooses."""

    ahead: tuple[int, ...]
    """For each stage, forwards it may run beyond its input gradients."""
    patience: float = 1.0
    """A weight gradient waits if that part of it would delay what is about to arrive."""
    forward_first: bool = False
    """Of a forward and an input gradient that are both ready, which runs."""
    make_room: bool = False
    """Run a weight gradient before a ready input gradient, if a forward waits for its memory."""


class _Greedy:
    def __init__(
        self,
        placement: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        max_graphs: tuple[int, ...],
        policy: Policy,
    ) -> None:
        self.placement, self.m, self.costs = placement, num_microbatches, costs
        self.max_graphs, self.policy = max_graphs, policy
        num_ranks, stages = max(placement) + 1, len(placement)
        self.stages = [[s for s in range(stages) if placement[s] == r] for r in range(num_ranks)]
        self.actions: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.graphs = [0] * num_ranks
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]
        self.forwards, self.inputs = [0] * stages, [0] * stages
        self.arrivals: list[deque[float]] = [deque() for _ in range(stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(stages)]
        self.arrivals[0].extend([0.0] * num_microbatches)
        self.link_free: dict[tuple[int, int], float] = {}
        self.events = [(0.0, rank) for rank in range(num_ranks)]

    def run(self) -> list[list[Action]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                self.choose(rank, now)
        return self.actions

    def has_room(self, rank: int, stage: int) -> bool:
        """For one more graph, with one left for each later stage of the rank."""
        later = sum(1 for other in self.stages[rank] if other > stage)
        return self.graphs[rank] < self.max_graphs[rank] - later

    def is_ahead(self, stage: int) -> bool:
        return self.forwards[stage] - self.inputs[stage] < self.policy.ahead[stage]

    def choose(self, rank: int, now: float) -> None:
        """Start one action on a free rank, or leave it idle until something arrives."""
        ready: list[tuple[Kind, int]] = []
        soonest = float("inf")
        lacks_memory = False
        for stage in reversed(self.stages[rank]):  # the last stage is nearest to freeing memory
            gradients, arrivals = self.gradients[stage], self.arrivals[stage]
            if gradients:
                soonest = min(soonest, max(gradients[0], now))
                if gradients[0] <= now:
                    ready.append(("I", stage))
            if arrivals and self.is_ahead(stage):
                if not self.has_room(rank, stage):
                    lacks_memory = lacks_memory or arrivals[0] <= now
                elif arrivals[0] <= now:
                    ready.append(("F", stage))
                else:
                    soonest = min(soonest, arrivals[0])
        weights = self.weights[rank]
        if ready and not (lacks_memory and self.policy.make_room and weights):
            first = "F" if self.policy.forward_first else "I"
            kind, stage = next((some for some in ready if some[0] == first), ready[0])
            self.start(rank, now, kind, stage)
        elif weights:
            stage, _ = weights[0]
            delay = now + self.costs.weight_grad[stage] - soonest
            allowed = (1 - self.policy.patience) * self.costs.weight_grad[stage]
            if lacks_memory or delay <= allowed:
                self.start(rank, now, "W", stage)

    def start(self, rank: int, now: float, kind: Kind, stage: int) -> None:
        end = now + self.costs.by_kind[kind][stage]
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        if kind == "W":
            stage, microbatch = self.weights[rank].popleft()
            self.graphs[rank] -= 1
        elif kind == "F":
            microbatch = self.forwards[stage]
            self.forwards[stage] += 1
            self.arrivals[stage].popleft()
            self.graphs[rank] += 1
            if stage == len(self.placement) - 1:
                self.gradients[stage].append(end)
            else:
                self.send(rank, stage, stage + 1, end, self.arrivals[stage + 1])
        else:
            microbatch = self.inputs[stage]
            self.inputs[stage] += 1
            self.gradients[stage].popleft()
            self.weights[rank].append((stage, microbatch))
            if stage > 0:
                self.send(rank, stage, stage - 1, end, self.gradients[stage - 1])
        self.actions[rank].append(Action(kind, stage, microbatch))

    def send(self, rank: int, stage: int, target: int, end: float, queue: deque[float]) -> None:
        to = self.placement[target]
        if to != rank:
            link = (rank, to)
            end = max(end, self.link_free.get(link, 0.0)) + self.costs.hops[min(stage, target)]
            self.link_free[link] = end
            heapq.heappush(self.events, (end, to))
        queue.append(end)


def build_greedy(
    name: str,
    placement: tuple[int, ...],
    num_microbatches: int,
    costs: Costs,
    max_graphs: tuple[int, ...],
    policy: Policy,
) -> Schedule:
    """The schedule that `policy` chooses; needs a graph on each rank for each of its stages."""
    greedy = _Greedy(placement, num_microbatches, costs, max_graphs, policy)
    return Schedule(
        name=name,
        ranks=tuple(map(tuple, greedy.run())),
        placement=placement,
        num_microbatches=num_microbatches,
    )
