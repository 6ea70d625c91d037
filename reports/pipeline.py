"""One step of one pipeline as it ran: its bubble, what it could have been, and its critical path.

The schedule is not asked for: the order of the actions says what was run, and the simulator what
the same order would take if messages cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd

from varuna_core.records.trace import COMPUTE
from varuna_core.schedule.actions import Action, Kind, Schedule, ScheduleError
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.order import find_source
from varuna_core.schedule.simulate import simulate


@dataclass(frozen=True, kw_only=True)
class Ran:
    """When an action ran, in seconds."""

    rank: int
    begin: float
    ready: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What one replica did in one step."""

    replica: int
    ranks: tuple[int, ...]
    """The rank of the job that each rank of the schedule is."""
    schedule: Schedule
    ran: dict[Action, Ran]

    @property
    def makespan(self) -> float:
        begin = min(ran.begin for ran in self.ran.values())
        return max(ran.end for ran in self.ran.values()) - begin

    @property
    def bubble_share(self) -> float:
        """Part of the ranks' time, from the first action to the last, that was no work."""
        busy = sum(ran.end - ran.ready for ran in self.ran.values())
        return 1 - busy / (self.makespan * len(self.ranks)) if self.makespan else 0.0


def observe(events: pd.DataFrame, replica: int) -> Pipeline | str:
    """The replica's pipeline in the events of one step, or why there is none.

    Ranks that share a stage (tensor parallelism) do the same at the same time: the first counts.
    """
    own = events[(events["replica"] == replica) & events["kind"].isin(COMPUTE)]
    own = own[(own["stage"] >= 0) & (own["microbatch"] >= 0)]
    if own.empty:
        return "no actions"
    owners = own.groupby("stage")["rank"].min()
    stages = [int(stage) for stage in owners.index]
    missing = next((at for at, stage in enumerate(stages) if at != stage), None)
    if missing is not None:
        return f"no rank wrote of stage {missing}"
    own = own[own["rank"] == own["stage"].map(owners)].sort_values(["rank", "begin_s"])
    ranks = tuple(sorted({int(rank) for rank in owners}))
    lists: list[list[Action]] = [[] for _ in ranks]
    ran: dict[Action, Ran] = {}
    index = {rank: at for at, rank in enumerate(ranks)}
    columns = ["rank", "kind", "stage", "microbatch", "begin_s", "ready_s", "end_s"]
    for rank, kind, stage, microbatch, begin, ready, end in own[columns].itertuples(index=False):
        action = Action(cast(Kind, kind), int(stage), int(microbatch))
        lists[index[rank]].append(action)
        ran[action] = Ran(rank=int(rank), begin=begin, ready=ready, end=end)
    if sum(map(len, lists)) != len(ran):
        return "an action is there twice"
    schedule = Schedule(
        name="as run",
        ranks=tuple(map(tuple, lists)),
        placement=tuple(index[rank] for rank in owners),
        num_microbatches=int(own["microbatch"].max()) + 1,
    )
    return Pipeline(replica=replica, ranks=ranks, schedule=schedule, ran=ran)


def measure_costs(pipeline: Pipeline) -> Costs:
    """The mean work of each kind of action on each stage."""
    totals: dict[tuple[str, int], list[float]] = {}
    for action, ran in pipeline.ran.items():
        found = totals.setdefault((action.kind, action.stage), [0.0, 0])
        found[0] += max(0.0, ran.end - ran.ready)
        found[1] += 1

    def mean(*kinds: str) -> tuple[float, ...]:
        sums = []
        for stage in range(pipeline.schedule.num_stages):
            found = [totals[kind, stage] for kind in kinds if (kind, stage) in totals]
            count = sum(number for _, number in found)
            sums.append(sum(total for total, _ in found) / count if count else 0.0)
        return tuple(sums)

    return Costs(
        forward=mean("F", "f"),
        input_grad=mean("I"),
        weight_grad=mean("W"),
        backward=mean("B"),
        recompute=mean("R"),
    )


def even_out(costs: Costs) -> Costs:
    """The same work shared equally by all stages."""

    def even(figures: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(figures) / len(figures),) * len(figures) if figures else ()

    return Costs(
        forward=even(costs.forward),
        input_grad=even(costs.input_grad),
        weight_grad=even(costs.weight_grad),
        backward=even(costs.backward),
        recompute=even(costs.recompute),
    )


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """Idle parts of the ranks' time in one step of one pipeline."""

    measured: float
    ideal: float
    """The same order with these stage times, messages for nothing."""
    ideal_even: float
    """The same order with the same work on every stage."""
    makespan_s: float
    ideal_s: float
    ideal_even_s: float


def compare_bubbles(pipeline: Pipeline) -> Bubbles | str:
    """The step against its ideals, or why that cannot be said."""
    costs = measure_costs(pipeline)
    try:
        ideal = simulate(pipeline.schedule, costs)
        even = simulate(pipeline.schedule, even_out(costs))
    except ScheduleError as error:
        return f"the events are no whole step: {error}"
    return Bubbles(
        measured=pipeline.bubble_share,
        ideal=ideal.bubble_share,
        ideal_even=even.bubble_share,
        makespan_s=pipeline.makespan,
        ideal_s=ideal.makespan,
        ideal_even_s=even.makespan,
    )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the critical path."""

    what: str
    """work, message (under way), or gap (between two actions of a rank)."""
    rank: int
    stage: int
    action: str
    seconds: float


def find_critical_path(pipeline: Pipeline) -> list[Piece]:
    """From the first action to the last: each piece waited for the one before it.

    An action waited for its message if the sender ended after the rank's own action before it;
    else for that one.
    """
    before: dict[Action, Action] = {}
    for actions in pipeline.schedule.ranks:
        before.update(zip(actions[1:], actions, strict=False))
    ran = pipeline.ran
    action: Action | None = max(ran, key=lambda item: ran[item].end)
    pieces: list[Piece] = []
    now = ran[action].end if action is not None else 0.0

    def add(what: str, at: Action, since: float) -> float:
        nonlocal now
        if since < now:
            piece = Piece(
                what=what, rank=ran[at].rank, stage=at.stage, action=str(at), seconds=now - since
            )
            pieces.append(piece)
            now = since
        return now

    seen: set[Action] = set()
    while action is not None and action not in seen:
        seen.add(action)
        add("work", action, ran[action].ready)
        own = before.get(action)
        sender = find_sender(pipeline, action)
        if sender is not None and (own is None or ran[sender].end > ran[own].end):
            add("message", action, ran[sender].end)
            action = sender
        elif own is not None:
            add("gap", action, ran[own].end)
            action = own
        else:  # another rank may have been ready before this one began
            add("gap", action, min(item.begin for item in ran.values()))
            action = None
    return pieces[::-1]


def find_sender(pipeline: Pipeline, action: Action) -> Action | None:
    """The action whose message this one takes."""
    source = find_source(action, pipeline.schedule.num_stages)
    if source is None:
        return None
    forward, _ = source
    stage = action.stage + (-1 if forward else 1)
    kinds = ("F", "f") if forward else ("B", "I")
    for kind in kinds:
        sender = Action(cast(Kind, kind), stage, action.microbatch)
        if sender in pipeline.ran:
            return sender
    return None


def list_waits(pipeline: Pipeline) -> Iterator[dict[str, Any]]:
    """Each action's wait, apart: for its message to be made, and for it to come."""
    for action, ran in pipeline.ran.items():
        sender = find_sender(pipeline, action)
        wait = max(0.0, ran.ready - ran.begin)
        idle = 0.0
        if sender is not None:
            idle = min(wait, max(0.0, pipeline.ran[sender].end - ran.begin))
        yield {
            "rank": ran.rank,
            "stage": action.stage,
            "bubble_s": idle,
            "transfer_s": wait - idle if sender is not None else 0.0,
        }
