"""Reconstruct how each pipeline ran in one step: the order of its actions, and which action waited
for which.

The order comes from the recorded actions, not from the configured schedule. Replicas mostly share
an order, so whatever depends on the order alone is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import pandas as pd

from varuna_core.records.logs.trace import ACTIONS, CONTINUED
from varuna_core.schedule.actions import Action, Kind, Schedule
from varuna_core.schedule.order import find_source
from vjob.reports.load.trace_lines import Column


@dataclass(frozen=True, kw_only=True)
class Ran:
    """When an action ran, in seconds."""

    rank: int
    begin: float
    ready: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Order:
    """The actions of a step in sequence, independent of which ranks of the job ran them."""

    schedule: Schedule
    actions: tuple[Action, ...]
    """The actions of all ranks, rank by rank."""
    ranks: Column
    """The schedule's rank of each action."""

    @cached_property
    def places(self) -> dict[Action, int]:
        """Map from each action to its index in `actions`."""
        return {action: at for at, action in enumerate(self.actions)}

    @cached_property
    def senders(self) -> Column:
        """Index of the action that sent the message which each action takes; -1 if it takes no
        message."""
        found = [self.find_sender(action) for action in self.actions]
        return np.array([-1 if action is None else self.places[action] for action in found])

    def find_sender(self, action: Action) -> Action | None:
        """Return the action whose message `action` takes; None if it takes no message."""
        source = find_source(action, self.schedule.num_stages)
        if source is None:
            return None
        forward, stage = source
        for kind in ("F", "f") if forward else ("B", "I"):
            sender = Action(kind, stage, action.microbatch)
            if sender in self.places:
                return sender
        return None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Begin and end of the actions of one replica in one step."""

    replica: int
    ranks: tuple[int, ...]
    """The job's rank for each rank of the schedule."""
    order: Order
    begin_s: Column
    """Begin of each action, in the sequence of `order`, as the other columns."""
    ready_s: Column
    end_s: Column

    @property
    def schedule(self) -> Schedule:
        return self.order.schedule

    @cached_property
    def ran(self) -> dict[Action, Ran]:
        """Begin, ready and end of each action, by action."""
        ranks = [self.ranks[at] for at in self.order.ranks]
        times = (self.begin_s.tolist(), self.ready_s.tolist(), self.end_s.tolist())
        return {
            action: Ran(rank=rank, begin=begin, ready=ready, end=end)
            for action, rank, begin, ready, end in zip(
                self.order.actions, ranks, *times, strict=True
            )
        }

    @cached_property
    def makespan(self) -> float:
        return float(self.end_s.max() - self.begin_s.min())

    @cached_property
    def bubble_share(self) -> float:
        """Fraction of the ranks' time without work, from the first action to the last."""
        busy = sum((self.end_s - self.ready_s).tolist())
        return 1 - busy / (self.makespan * len(self.ranks)) if self.makespan else 0.0


def observe(events: pd.DataFrame) -> Iterator[tuple[int, Pipeline | str]]:
    """Yield each replica's pipeline in the events of one step, or the reason why it cannot be
    reconstructed.

    Ranks that share a stage (tensor parallelism) do the same work at the same time, so only the
    first of them is used.
    """
    names = ("replica", "rank", "stage", "microbatch", "begin_s", "ready_s", "end_s")
    columns = {name: events[name].to_numpy() for name in names}
    columns["goes_on"] = (events["what"] == CONTINUED).to_numpy()
    columns["kind"] = pd.Index(ACTIONS).get_indexer(pd.Index(events["kind"]))
    replicas = np.unique(columns["replica"])
    is_action = (columns["kind"] >= 0) & (columns["stage"] >= 0) & (columns["microbatch"] >= 0)
    columns = {name: values[is_action] for name, values in columns.items()}
    ordered = np.lexsort((columns["begin_s"], columns["rank"], columns["replica"]))
    columns = {name: values[ordered] for name, values in columns.items()}
    starts = np.searchsorted(columns["replica"], replicas)
    ends = np.searchsorted(columns["replica"], replicas, side="right")
    known: dict[bytes, Order | None] = {}
    for replica, start, end in zip(replicas, starts, ends, strict=True):
        own = {name: values[start:end] for name, values in columns.items()}
        yield int(replica), _observe_one(int(replica), own, known)


def _observe_one(
    replica: int, own: dict[str, Column], known: dict[bytes, Order | None]
) -> Pipeline | str:
    """Reconstruct one replica from actions sorted by rank and time; `known` caches the orders."""
    if not len(own["rank"]):
        return "no actions"
    if own["goes_on"].any():
        own = _join_pieces(own)
    stages, firsts = np.unique(own["stage"], return_index=True)
    owners = own["rank"][firsts]
    missing = next((at for at, stage in enumerate(stages.tolist()) if at != stage), None)
    if missing is not None:
        return f"no rank recorded stage {missing}"
    counts = own["rank"] == owners[own["stage"]]
    own = {name: values[counts] for name, values in own.items()}
    ranks, placement = np.unique(owners, return_inverse=True)
    own["rank"] = np.searchsorted(ranks, own["rank"])
    of_order = (own["rank"], own["kind"], own["stage"], own["microbatch"], placement)
    key = b"".join(column.tobytes() for column in of_order)
    if key not in known:
        known[key] = _find_order(own, placement.tolist())
    order = known[key]
    if order is None:
        return "an action occurs twice"
    times = {name: own[name] for name in ("begin_s", "ready_s", "end_s")}
    return Pipeline(replica=replica, ranks=tuple(ranks.tolist()), order=order, **times)


def _join_pieces(own: dict[str, Column]) -> dict[str, Column]:
    """Join the pieces of interrupted actions.

    An action begins with its first piece and ends with its last; the time between pieces counts as
    wait.
    """
    starts = np.flatnonzero(~own["goes_on"] | (np.arange(len(own["rank"])) == 0))
    last = np.append(starts[1:], len(own["rank"])) - 1
    work = np.add.reduceat(own["end_s"] - own["ready_s"], starts)
    joined = {name: values[starts] for name, values in own.items()}
    joined["end_s"] = own["end_s"][last]
    joined["ready_s"] = joined["end_s"] - work
    return joined


def _find_order(own: dict[str, Column], placement: list[int]) -> Order | None:
    """Return the order of these actions; None if an action occurs twice."""
    kinds = [cast(Kind, ACTIONS[code]) for code in own["kind"]]
    stages, microbatches = own["stage"].tolist(), own["microbatch"].tolist()
    actions = tuple(map(Action, kinds, stages, microbatches))
    if len(set(actions)) < len(actions):
        return None
    lists: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for rank, action in zip(own["rank"].tolist(), actions, strict=True):
        lists[rank].append(action)
    schedule = Schedule(
        name="as run",
        ranks=tuple(map(tuple, lists)),
        placement=tuple(placement),
        num_microbatches=max(microbatches) + 1,
    )
    return Order(schedule=schedule, actions=actions, ranks=own["rank"])


@dataclass(frozen=True, kw_only=True)
class PathPart:
    what: str
    """The kind of part: work, message (in flight), or gap (between two actions of a rank)."""
    rank: int
    stage: int
    action: str
    seconds: float


def find_critical_path(pipeline: Pipeline) -> list[PathPart]:
    """Return the chain of parts from the first action to the last, each of which waited for the
    previous one.

    An action waited for its message if the sender ended after the previous action of its own rank;
    otherwise it waited for that previous action.
    """
    before: dict[Action, Action] = {}
    for actions in pipeline.schedule.ranks:
        before.update(zip(actions[1:], actions, strict=False))
    ran = pipeline.ran
    action: Action | None = max(ran, key=lambda item: ran[item].end)
    pieces: list[PathPart] = []
    now = ran[action].end if action is not None else 0.0

    def add(what: str, at: Action, since: float) -> float:
        nonlocal now
        if since < now:
            piece = PathPart(
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
        sender = pipeline.order.find_sender(action)
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


def list_waits(pipelines: list[Pipeline]) -> pd.DataFrame:
    """Return each action's wait: bubble_s until its message was sent, transfer_s to its arrival."""
    rows: dict[str, list[Column]] = {"rank": [], "bubble_s": [], "transfer_s": []}
    for pipeline in pipelines:
        senders = pipeline.order.senders
        begin = pipeline.begin_s
        wait = np.maximum(0.0, pipeline.ready_s - begin)
        idle = np.minimum(wait, np.maximum(0.0, pipeline.end_s[senders] - begin))
        rows["rank"].append(np.array(pipeline.ranks)[pipeline.order.ranks])
        rows["bubble_s"].append(np.where(senders >= 0, idle, 0.0))
        rows["transfer_s"].append(np.where(senders >= 0, wait - idle, 0.0))
    if not pipelines:
        return pd.DataFrame(columns=list(rows))
    return pd.DataFrame({name: np.concatenate(parts) for name, parts in rows.items()})
