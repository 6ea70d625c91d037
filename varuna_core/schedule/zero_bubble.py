"""Zero-bubble schedules: weight gradients wait until there is nothing better to do.

Both are made by the list scheduler for the stages' own costs, under several policies; the one that
the simulation finds shortest is taken. Where no schedule can be shorter the search ends at once;
for many micro-batches it is made on fewer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from varuna_core.schedule.actions import Action, Kind, Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.generators import build_one_f_one_b, check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules by which a rank chooses its next action."""

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


Candidate = Callable[[int], Schedule]
"""Makes a schedule of so many micro-batches."""


def build_zero_bubble(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_graphs: int | None = None,
) -> Schedule:
    """ZB-H1 (arXiv 2401.10241) for any costs: 3m + p - 1 units where 1f1b takes 3(m + p - 1).

    Every rank holds at most `max_graphs` graphs, by default p: as many as 1f1b on its first stage.
    A graph counts until its W. Never slower than 1f1b, as simulated with the same costs.

    ```
    F0 F1 F2 F3 .. .. .. B0 -- F4 B1 -- F5 B2 -- B3 -- B4 -- B5 --
    .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    bound = _check_bound("zero_bubble", max_graphs, default=num_ranks, least=1)
    costs = costs or build_even_costs(num_ranks)
    placement = tuple(range(num_ranks))
    candidates = _build_candidates("zero_bubble", placement, costs, bound)
    baseline: list[Candidate] = []
    if bound >= min(num_ranks, num_microbatches):
        baseline.append(lambda m: build_one_f_one_b(num_ranks, m))
    best = _find_best(candidates, baseline, num_microbatches, placement, costs)
    return replace(best, name="zero_bubble")


def build_zbv(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_graphs: int | None = None,
) -> Schedule:
    """ZBV (same paper, section 6): two stages a rank, down the ranks and up again as a V.

    Stage 2p - 1 lies on rank 0, so the first gradient is made where the first forward was.
    `max_graphs` is 2p by default: 1f1b's memory, as these stages are half as large.

    ```
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1 3F2 3I2 3W2 ... 0B2 ---
    ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    bound = _check_bound("zbv", max_graphs, default=2 * num_ranks, least=2)
    costs = costs or build_even_costs(2 * num_ranks)
    placement = place_v(num_ranks)
    candidates = _build_candidates("zbv", placement, costs, bound)
    baseline: list[Candidate] = []
    if bound >= 2 * num_ranks:
        baseline.append(lambda m: _build_published_zbv(num_ranks, m))
    return _find_best(candidates, baseline, num_microbatches, placement, costs)


def place_v(num_ranks: int) -> tuple[int, ...]:
    """The ranks of 2p stages: 0 1 2 3 3 2 1 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _check_bound(name: str, given: int | None, *, default: int, least: int) -> int:
    bound = default if given is None else given
    if bound < least:
        raise ScheduleError(f"{name}: max_graphs is {bound}, expected {least} or more")
    return bound


def _build_candidates(
    name: str, placement: tuple[int, ...], costs: Costs, bound: int
) -> list[Candidate]:
    if costs.num_stages != len(placement):
        raise ScheduleError(
            f"{name}: costs of {costs.num_stages} stages given, it has {len(placement)}"
        )
    bounds = (bound,) * (max(placement) + 1)

    def build(policy: Policy) -> Candidate:
        def candidate(num_microbatches: int) -> Schedule:
            schedule = build_greedy(name, placement, num_microbatches, costs, bounds, policy)
            fusing_pays = costs.by_kind["B"][0] <= _split(costs, 0)
            return _fuse_first_stage(schedule) if fusing_pays else schedule

        return candidate

    return [build(policy) for policy in _list_policies(len(placement), bound)]


def _list_policies(num_stages: int, bound: int) -> Iterator[Policy]:
    """The published ones first; steeper `ahead` pays on slow links, patience with large W."""
    seen = set()
    for slope in (1.0, 1.5, 2.0, 3.0):
        for extra in (0, 1):
            ahead = tuple(
                min(bound, 1 + int(slope * (num_stages - 1 - stage)) + extra)
                for stage in range(num_stages)
            )
            if ahead in seen:
                continue
            seen.add(ahead)
            for patience in (0.0, 0.5, 1.0):
                for forward_first, make_room in (
                    (True, False),
                    (True, True),
                    (False, False),
                ):
                    yield Policy(
                        ahead=ahead,
                        patience=patience,
                        forward_first=forward_first,
                        make_room=make_room,
                    )


def _find_best(
    candidates: list[Candidate],
    baseline: list[Candidate],
    num_microbatches: int,
    placement: tuple[int, ...],
    costs: Costs,
) -> Schedule:
    """The shortest; `baseline` is always tried at full length, so nothing behind it is returned."""
    few = min(num_microbatches, 4 * len(placement))
    floor = _find_floor(placement, costs, few)
    best, shortest = candidates[0], float("inf")
    for candidate in candidates:
        makespan = simulate(candidate(few), costs).makespan
        if makespan < shortest * (1 - 1e-9):
            best, shortest = candidate, makespan
        if shortest <= floor * (1 + 1e-9):
            break
    schedules = [candidate(num_microbatches) for candidate in [best, *baseline]]
    return min(schedules, key=lambda schedule: simulate(schedule, costs).makespan)


def _find_floor(placement: tuple[int, ...], costs: Costs, num_microbatches: int) -> float:
    """No schedule is shorter: a rank waits for its first activation, then has its work to do."""
    floor, arrival = 0.0, 0.0
    reached: dict[int, float] = {}
    for stage, rank in enumerate(placement):
        reached.setdefault(rank, arrival)
        if stage < len(placement) - 1:
            hop = costs.hops[stage] if placement[stage + 1] != rank else 0.0
            arrival += costs.forward[stage] + hop
    for rank, arrival in reached.items():
        work = sum(
            costs.forward[stage] + min(_split(costs, stage), costs.by_kind["B"][stage])
            for stage in range(len(placement))
            if placement[stage] == rank
        )
        floor = max(floor, arrival + num_microbatches * work)
    return floor


def _split(costs: Costs, stage: int) -> float:
    return costs.input_grad[stage] + costs.weight_grad[stage]


def _fuse_first_stage(schedule: Schedule) -> Schedule:
    """I and W in a row become B on stage 0, where nobody waits for the I."""
    rank = schedule.placement[0]
    fused: list[Action] = []
    for action in schedule.ranks[rank]:
        if action.kind == "W" and action.stage == 0 and fused:
            before = fused[-1]
            if before == Action("I", 0, action.microbatch):
                fused[-1] = Action("B", 0, action.microbatch)
                continue
        fused.append(action)
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(fused)
    return replace(schedule, ranks=tuple(ranks))


def _build_published_zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """The paper's own order, free of bubbles from 2p - 1 micro-batches on if F, I and W cost alike.

    Made for at least that many; those there are not are left out.
    """
    ranks = []
    for rank in range(num_ranks):
        actions = _order_published_zbv(num_ranks, max(num_microbatches, 2 * num_ranks - 1), rank)
        ranks.append(tuple(a for a in actions if a.microbatch < num_microbatches))
    return Schedule(
        name="zbv",
        ranks=tuple(ranks),
        placement=place_v(num_ranks),
        num_microbatches=num_microbatches,
    )


def _order_published_zbv(num_ranks: int, num_microbatches: int, rank: int) -> list[Action]:
    stages = {"down": rank, "up": 2 * num_ranks - 1 - rank}
    counts = {(leg, kind): 0 for leg in stages for kind in "FIW"}
    actions: list[Action] = []

    def add(leg: str, *kinds: Kind) -> None:
        for kind in kinds:
            actions.append(Action(kind, stages[leg], counts[leg, kind]))
            counts[leg, kind] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        add("down", "F")
    for _ in range(rank):
        add("up", "F")
        add("down", "F")
    for _ in range(num_ranks - rank):
        add("up", "F", "I", "W")
    while counts["up", "F"] < num_microbatches:
        if counts["down", "F"] < num_microbatches:
            add("down", "F")
        add("down", "I", "W")
        add("up", "F", "I", "W")
    for _ in range(rank):
        add("down", "I")
        add("up", "I")
    for _ in range(num_ranks - rank):
        add("down", "I", "W")
    for leg in ("up", "down"):
        while counts[leg, "W"] < num_microbatches:
            add(leg, "W")
    return actions
