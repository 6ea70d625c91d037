"""Decide if more nodes, or fewer slow ones, are worth a morph. Pure functions.

idle nodes, pace, pause, time ─► choose_growth ─► how many more, of which group
slow nodes, the same ──────────► choose_leaving ─► who is to go

A node is slow by the rule of `varuna_core.records.logs.slow_ranks`, as in status and report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_core.morph.gain import Forecast, forecast, pays, with_more
from varuna_core.records.logs.slow_ranks import SlowRank, find_slow_ranks
from varuna_core.records.plan import GroupPlan, Plan
from varuna_core.records.training import TrainingFacts


@dataclass(frozen=True, kw_only=True)
class SlowNode(SlowRank):
    """A node with a slow rank: the slowest of its ranks."""

    seat: int

    def __str__(self) -> str:
        peers = "its peer" if self.num_peers == 1 else f"its {self.num_peers} peers"
        return (
            f"rank {self.rank} works {100 * (self.ratio - 1):.0f} % longer than {peers}, by "
            f"{self.extra_s:.3g} s a step, in the last {self.num_steps} steps"
        )


def find_slow_nodes(
    works_s: Mapping[int, Mapping[int, float]],
    peers: Sequence[Sequence[int]],
    seats: Mapping[int, int],
    steps_s: Mapping[int, float] | None = None,
) -> list[SlowNode]:
    """Return slow nodes, slowest first. `works_s` is the work of each rank in each step, `seats`
    its node, and `steps_s` the time of a step, so that ranks with little work are ignored."""
    worst: dict[int, SlowNode] = {}
    # One node alone is nobody's peer.
    across = [ranks for ranks in peers if len({seats[rank] for rank in ranks}) > 1]
    for slow in find_slow_ranks(works_s, across, steps_s):
        seat = seats[slow.rank]
        worst.setdefault(seat, SlowNode(seat=seat, **vars(slow)))
    return list(worst.values())


DEFAULT_PAUSE_S = 120.0
"""Assumed pause of a morph in seconds, as long as the run has not had a morph."""
NUM_PAUSES = 5
"""Number of the last pauses whose median is taken."""
CAUTION = 2.0
"""A gain must be worth this many pauses, since a forecast may be off and first steps are slow."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """How long a morph interrupts the run's steps."""

    seconds: float
    num_morphs: int
    """Number of the run's own morphs whose pauses `seconds` is the median of; 0 if the pause is a
    guess."""

    def __str__(self) -> str:
        whence = "a guess"
        if self.num_morphs:
            whence = f"median of the last {self.num_morphs}" if self.num_morphs > 1 else "the last"
        return f"a pause of {self.seconds:.3g} s ({whence})"


def compute_pause(pauses_s: Sequence[float]) -> Pause:
    """Compute the pause that a morph costs from `pauses_s`, the pauses of the run's own morphs,
    oldest first."""
    last = pauses_s[-NUM_PAUSES:]
    seconds = statistics.median(last) if last else DEFAULT_PAUSE_S
    return Pause(seconds=seconds, num_morphs=len(last))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Pace and remaining steps of a run as it is now. More nodes are worth a pause if the run would
    then end earlier than this."""

    plan: Plan
    """The plan, with joined nodes after those of the conf."""
    facts: TrainingFacts
    here: tuple[int, ...]
    """Seats of nodes that are present and stay."""
    steps_left: float
    step_s: float
    """Step time measured on these nodes."""
    pause: Pause
    left_s: float = math.inf
    """Seconds until the time limit."""

    def is_worth(self, then_s: float, caution: float = CAUTION) -> bool:
        pause_s = caution * self.pause.seconds
        return pays(self.steps_left, self.step_s, then_s, pause_s, self.left_s)


@dataclass(frozen=True, kw_only=True)
class GrowthOffer:
    """A number of further nodes of one group, with the step time that they would give."""

    group: GroupPlan
    """The group whose nodes are like those to add."""
    count: int
    then_s: float
    is_predicted: bool


def choose_growth(standing: Standing, room: int, idle: Mapping[str, int]) -> GrowthOffer | None:
    """Return the offer with the shortest step, then the fewest nodes, whose gain exceeds the pause;
    `idle` has the number of idle nodes by group."""
    best: GrowthOffer | None = None
    for group in standing.plan.groups:
        for count in range(1, min(idle.get(group.name, 0), room) + 1):
            wide = with_more(standing.plan, group, count)
            more = range(standing.plan.num_nodes, wide.num_nodes)
            found = forecast(wide, standing.facts, standing.here, (*standing.here, *more))
            if found is None:
                continue
            then_s = standing.step_s * found.ratio
            is_better = best is None or (then_s, count) < (best.then_s, best.count)
            if is_better and standing.is_worth(then_s):
                best = GrowthOffer(
                    group=group, count=count, then_s=then_s, is_predicted=found.is_predicted
                )
    return best


def still_pays(standing: Standing, seats: Sequence[int]) -> bool:
    """Return True if nodes on their way are still worth a morph."""
    found = forecast(standing.plan, standing.facts, standing.here, (*standing.here, *seats))
    return found is not None and standing.is_worth(standing.step_s * found.ratio, caution=1.0)


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Slow nodes whose removal is worth a morph."""

    seats: tuple[int, ...]
    then_s: float
    is_predicted: bool


def choose_leaving(standing: Standing, slow: Sequence[SlowNode], fewest: int) -> Parting | None:
    """Return the slowest nodes to remove, as few as needed, keeping at least `fewest` nodes.

    Each step waits for the slowest node. Without it, a step is shorter by its lag behind the next
    slowest, and longer by the cost of a layout for fewer nodes.
    """
    best: Parting | None = None
    worst = sorted(slow, key=lambda item: -item.extra_s)
    for number in range(1, len(worst) + 1):
        seats = tuple(item.seat for item in worst[:number])
        rest = [seat for seat in standing.here if seat not in seats]
        if len(rest) < max(fewest, 1):
            break
        found: Forecast | None = forecast(standing.plan, standing.facts, standing.here, rest)
        if found is None:
            continue
        next_s = worst[number].extra_s if number < len(worst) else 0.0
        then_s = (standing.step_s - (worst[0].extra_s - next_s)) * found.ratio
        if standing.is_worth(then_s) and (best is None or then_s < best.then_s):
            best = Parting(seats=seats, then_s=then_s, is_predicted=found.is_predicted)
    return best


def format_basis(*, is_predicted: bool) -> str:
    """Return the basis of a forecast, in words."""
    return "planned at submit" if is_predicted else "estimated from the numbers of slots and ranks"
