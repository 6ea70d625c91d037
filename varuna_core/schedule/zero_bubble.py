"""Build zero-bubble schedules, in which weight gradients fill otherwise idle time.

A list scheduler builds both schedules for the stages' own costs under several policies, and the
shortest one in simulation is used. The search ends as soon as a schedule reaches the lower bound;
for many micro-batches, the policy is chosen with fewer. The best policy is tried again with unsplit
backwards while forwards remain, and so are the published orders. All candidates get their weight
gradients fused (`fuse`), and among equally short ones the one with most fused backwards is used.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from varuna_core.schedule.actions import Action, Kind, Schedule, ScheduleError
from varuna_core.schedule.compiled import simulate
from varuna_core.schedule.costs import Costs, build_even_costs
from varuna_core.schedule.fuse import EQUAL, count_fused, fuse
from varuna_core.schedule.generators import build_one_f_one_b, check_sizes
from varuna_core.schedule.recompute import Memory, Recompute, apply_recompute
from varuna_core.schedule.verify import verify

PATIENCES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules by which a rank chooses its next action."""

    ahead: tuple[int, ...]
    """For each stage, the maximum number of forwards beyond its input gradients."""
    patience: float = 1.0
    """Measure of how early weight gradients run: one that would delay the next arrival by more than
    1 - patience of its own duration waits."""
    forward_first: bool = False
    """True to run the forward if a forward and an input gradient are both ready."""
    make_room: bool = False
    """True to run a weight gradient before an input gradient if a forward needs its memory."""
    split_first: tuple[int, ...] | None = None
    """For each stage, how many backwards are split before the first unsplit ones. If None, all are
    split, as are those after the rank's last forward."""


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
        # Bounds of other policies that would have chosen the same at each moment so far.
        self.patiences = set(PATIENCES)
        self.above, self.most = [-1] * stages, [sys.maxsize] * stages
        self.is_first_alike = self.is_room_alike = True

    def run(self) -> list[list[Action]]:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                self.choose(rank, now)
        return self.actions

    def is_alike(self, other: Policy) -> bool:
        """Return True if `other`, a policy that splits all backwards, gives the same schedule."""
        own = self.policy
        return (
            other.patience in self.patiences
            and (self.is_first_alike or other.forward_first == own.forward_first)
            and (self.is_room_alike or other.make_room == own.make_room)
            and all(a < n <= e for a, n, e in zip(self.above, other.ahead, self.most, strict=True))
        )

    def has_room(self, rank: int, stage: int) -> bool:
        """Return True if the rank has memory for one more graph of activations, and then still for
        one of each of its later stages."""
        later = sum(1 for other in self.stages[rank] if other > stage)
        return self.graphs[rank] < self.max_graphs[rank] - later

    def is_ahead(self, stage: int) -> bool:
        ahead = self.forwards[stage] - self.inputs[stage]
        if ahead < self.policy.ahead[stage]:
            self.above[stage] = max(self.above[stage], ahead)
            return True
        self.most[stage] = min(self.most[stage], ahead)
        return False

    def choose(self, rank: int, now: float) -> None:
        """Start an action on an idle rank, or leave the rank idle until a message arrives."""
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
        if ready and lacks_memory and weights:
            self.is_room_alike = False
        if ready and not (lacks_memory and self.policy.make_room and weights):
            self.is_first_alike = self.is_first_alike and len({kind for kind, _ in ready}) == 1
            first = "F" if self.policy.forward_first else "I"
            kind, stage = next((some for some in ready if some[0] == first), ready[0])
            self.start(rank, now, kind, stage)
        elif weights:
            stage, _ = weights[0]
            whole = self.costs.weight_grad[stage]
            delay = now + whole - soonest
            starts = lacks_memory or delay <= (1 - self.policy.patience) * whole
            if not lacks_memory:
                alike = (p for p in self.patiences if (delay <= (1 - p) * whole) == starts)
                self.patiences = set(alike)
            if starts:
                self.start(rank, now, "W", stage)

    def is_whole(self, rank: int, stage: int) -> bool:
        """Return True if the stage's next backward is one action for both gradients (B, not I)."""
        split = self.policy.split_first
        if split is None or self.inputs[stage] < split[stage]:
            return False
        return any(self.forwards[other] < self.m for other in self.stages[rank])

    def start(self, rank: int, now: float, kind: Kind, stage: int) -> None:
        if kind == "I" and self.is_whole(rank, stage):
            kind = "B"
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
            if kind == "B":
                self.graphs[rank] -= 1
            else:
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
    """Build the schedule that `policy` gives; each rank needs memory for one graph per stage."""
    greedy = _Greedy(placement, num_microbatches, costs, max_graphs, policy)
    return _make_schedule(name, greedy)


def _make_schedule(name: str, greedy: _Greedy) -> Schedule:
    return Schedule(
        name=name,
        ranks=tuple(map(tuple, greedy.run())),
        placement=greedy.placement,
        num_microbatches=greedy.m,
    )


def build_zero_bubble(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_graphs: int | None = None,
    *,
    recompute: Recompute = "none",
    memory: Memory | None = None,
) -> Schedule:
    """Build ZB-H1 (arXiv 2401.10241) for any costs: 3m + p - 1 units; 1f1b takes 3(m + p - 1).

    Each of p ranks holds at most `max_graphs` graphs and never more than p, as 1f1b's first stage.
    A graph counts until its W; m counts micro-batches. Never slower than 1f1b in simulation.

    ```
    F0 F1 F2 F3 .. .. .. B0 -- F4 B1 -- F5 B2 -- B3 -- B4 -- B5 --
    .. F0 F1 F2 .. .. I0 F3 B1 -- F4 B2 -- F5 I3 W0 I4 W3 I5 W4 W5
    .. .. F0 F1 .. I0 F2 I1 F3 B2 -- F4 B3 -- F5 I4 W0 I5 W1 W4 W5
    .. .. .. F0 I0 F1 I1 F2 I2 F3 B3 -- F4 B4 -- F5 I5 W0 W1 W2 W5
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    bound = min(_check_bound("zero_bubble", max_graphs, least=1), num_ranks)
    costs = costs or build_even_costs(num_ranks)
    placement = tuple(range(num_ranks))
    best = _choose_policy("zero_bubble", placement, num_microbatches, costs, bound)
    bounds = (bound,) * num_ranks
    candidates = [
        build_greedy("zero_bubble", placement, num_microbatches, costs, bounds, best),
    ]
    if bound >= min(num_ranks, num_microbatches):
        one_f_one_b = build_one_f_one_b(num_ranks, num_microbatches)
        candidates.append(replace(one_f_one_b, name="zero_bubble"))
    return _choose_best(candidates, costs, bound, recompute, memory)


def build_zbv(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_graphs: int | None = None,
    *,
    recompute: Recompute = "none",
    memory: Memory | None = None,
) -> Schedule:
    """Build ZBV (same paper, section 6): two stages per rank, placed down and up the ranks as a V.

    Stage 2p - 1 is on rank 0, so the first gradient is computed on the rank of the first forward. A
    rank holds at most `max_graphs` graphs and never more than 2p, which equals 1f1b's memory, as
    stages are half as large; or one more if this makes DualPipe's order the shortest.

    ```
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 --- 0B0 --- 3F2 3B2 --- 0B1 --- ... 0B2 ---
    ... 1F0 2F0 1F1 2F1 2B0 --- 1B0 --- 1F2 2F2 2B1 --- 1I1 2B2 --- 1I2 1W1 1W2
    ```
    """
    check_sizes(num_ranks, num_microbatches)
    most = _check_bound("zbv", max_graphs, least=2)
    bound = min(most, 2 * num_ranks)
    costs = costs or build_even_costs(2 * num_ranks)
    placement = place_v(num_ranks)
    best = _choose_policy("zbv", placement, num_microbatches, costs, bound)
    # The first gradients hurry up the ranks: as many are split as have a rank behind them to fill.
    split_first = tuple(max(0, stage - num_ranks) for stage in range(2 * num_ranks))
    bounds = (bound,) * num_ranks
    candidates = [
        build_greedy("zbv", placement, num_microbatches, costs, bounds, policy)
        for policy in (best, replace(best, split_first=split_first))
    ]
    orders: list[Order] = []
    if most >= 2 * num_ranks:
        orders += [_order_published_zbv, _order_dual_pipe]
    if most > 2 * num_ranks:
        orders.append(partial(_order_dual_pipe, forward_first=True))
    candidates += [_build_in_order(order, num_ranks, num_microbatches) for order in orders]
    return _choose_best(candidates, costs, bound, recompute, memory)


def place_v(num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of 2p stages, such as 0 1 2 3 3 2 1 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _check_bound(name: str, given: int | None, *, least: int) -> int:
    if given is None:
        return sys.maxsize
    if given < least:
        raise ScheduleError(f"{name}: max_graphs is {given}, expected {least} or more")
    return given


def _list_policies(num_stages: int, bound: int) -> Iterator[Policy]:
    """Yield policies, published ones first; steeper `ahead` suits slow links, patience large W."""
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
            for patience in PATIENCES:
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


def _choose_policy(
    name: str, placement: tuple[int, ...], num_microbatches: int, costs: Costs, bound: int
) -> Policy:
    """Return the policy with the shortest split-backward schedule for a few micro-batches."""
    if costs.num_stages != len(placement):
        raise ScheduleError(
            f"{name}: costs has {costs.num_stages} stages, expected {len(placement)}"
        )
    few = min(num_microbatches, 4 * len(placement))
    bounds = (bound,) * (max(placement) + 1)
    floor = _compute_floor(placement, costs, few)
    found: list[tuple[float, Policy]] = []
    tried: list[_Greedy] = []
    for policy in _list_policies(len(placement), bound):
        if any(greedy.is_alike(policy) for greedy in tried):
            continue
        tried.append(_Greedy(placement, few, costs, bounds, policy))
        makespan = simulate(_make_schedule(name, tried[-1]), costs).makespan
        if not found or makespan * EQUAL < found[-1][0]:
            found.append((makespan, policy))
        if makespan <= floor * EQUAL:
            break
    return found[-1][1]


def _choose_best(
    candidates: list[Schedule],
    costs: Costs,
    bound: int,
    recompute: Recompute,
    memory: Memory | None,
) -> Schedule:
    """Return the shortest schedule that fits, in the requested recompute mode.

    Among equals, prefer schedules within the bound of graphs, then the most fused backwards.
    """
    finished: list[tuple[float, Schedule]] = []
    reasons: list[ScheduleError] = []
    for candidate in candidates:
        try:
            schedule = fuse(apply_recompute(candidate, recompute, memory), costs)
        except ScheduleError as reason:
            reasons.append(reason)
        else:
            finished.append((simulate(schedule, costs).makespan, schedule))
    if not finished:
        raise reasons[0]
    limit = min(makespan for makespan, _ in finished) * EQUAL
    shortest = [schedule for makespan, schedule in finished if makespan <= limit]
    return max(shortest, key=lambda one: (max(verify(one).graphs) <= bound, count_fused(one)))


def _compute_floor(placement: tuple[int, ...], costs: Costs, num_microbatches: int) -> float:
    """Return a lower bound for schedules whose backwards are all split.

    It assumes that a rank waits for its first activation, and then works without idle time.
    """
    floor, arrival = 0.0, 0.0
    reached: dict[int, float] = {}
    for stage, rank in enumerate(placement):
        reached.setdefault(rank, arrival)
        if stage < len(placement) - 1:
            hop = costs.hops[stage] if placement[stage + 1] != rank else 0.0
            arrival += costs.forward[stage] + hop
    for rank, arrival in reached.items():
        work = sum(
            costs.forward[stage] + costs.input_grad[stage] + costs.weight_grad[stage]
            for stage in range(len(placement))
            if placement[stage] == rank
        )
        floor = max(floor, arrival + num_microbatches * work)
    return floor


Order = Callable[[int, int, int], list[Action]]
"""Function that maps the numbers of ranks and micro-batches, and a rank, to the rank's actions, for
stages placed as a V (two per rank)."""


def _build_in_order(order: Order, num_ranks: int, num_microbatches: int) -> Schedule:
    """Build a schedule from `order`, which needs 2p micro-batches, and drop those in excess."""
    many = max(num_microbatches, 2 * num_ranks)
    return Schedule(
        name="zbv",
        ranks=tuple(
            tuple(a for a in order(num_ranks, many, rank) if a.microbatch < num_microbatches)
            for rank in range(num_ranks)
        ),
        placement=place_v(num_ranks),
        num_microbatches=num_microbatches,
    )


def _order_published_zbv(num_ranks: int, num_microbatches: int, rank: int) -> list[Action]:
    """Return the paper's order; no bubbles from 2p - 1 micro-batches on if F, I and W are equal."""
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


def _order_dual_pipe(
    num_ranks: int, num_microbatches: int, rank: int, forward_first: bool = False
) -> list[Action]:
    """Return DualPipe's order (arXiv 2412.19437) on a V: backwards are split only in the ramps.

    Each forward down and forward up alternates with a backward up and a backward down. As
    published, a forward comes first and its message leaves earlier; with a backward first, a rank
    holds 2p graphs, else one more.
    """
    behind, before = num_ranks - 1 - rank, rank + 1
    stages = {"down": rank, "up": 2 * num_ranks - 1 - rank}
    done = {(leg, way): 0 for leg in stages for way in "FB"}
    actions: list[Action] = []
    waiting: deque[Action] = deque()

    def add(leg: str, kind: Kind) -> None:
        way = "F" if kind == "F" else "B"
        actions.append(Action(kind, stages[leg], done[leg, way]))
        done[leg, way] += 1
        if kind == "I":
            waiting.append(replace(actions[-1], kind="W"))

    def add_weights() -> None:
        if waiting:
            actions.append(waiting.popleft())

    for _ in range(2 * behind):
        add("down", "F")
    for _ in range(before):
        add("down", "F")
        add("up", "F")
    for _ in range(behind):  # the first gradients, which the ranks before this one wait for
        add("up", "I")
        add_weights()
        add("up", "F")
    while done["up", "F"] < num_microbatches:
        is_down_left = done["down", "F"] < num_microbatches
        if is_down_left and forward_first:
            add("down", "F")
        add("up", "B")
        if forward_first:
            add("up", "F")
        elif is_down_left:
            add("down", "F")
        add("down", "B")
        if not forward_first:
            add("up", "F")
    for number in range(2 * before + behind):  # the last ones: half of those up and down are split
        leg = "up" if number < 2 * before and number % 2 == 0 else "down"
        if number >= 2 * before:
            add_weights()
        add(leg, "B" if number < before else "I")
    while waiting:
        add_weights()
    return actions
