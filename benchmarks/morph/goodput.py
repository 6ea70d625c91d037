"""Goodput of a long training on nodes that come and go, by replaying measured pauses.

A trace of availability says when nodes leave: most are called back with a warning, as spot nodes
are, some are lost without one. A day of it is not trained here: its steps are counted, with the
pauses of this run of `benchmarks.morph`. Beside it what is done without morphing: the same nodes,
each time a stop, a new job and the last checkpoint.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

HOURS = 24.0
NODES, LEAST = 16, 4
LEAVE_H = 12.0
"""Mean time until a node is taken away."""
RETURN_H = 2.0
"""Mean time until another one is there for it."""
WARNED = 0.8
"""Share of nodes that are taken away with a warning, in which a checkpoint is saved."""
SAVE_EVERY_S = 600.0
SEED = 10


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds without a step."""

    lost_s: float
    asked_s: float
    restart_s: float


class Event(NamedTuple):
    at_s: float
    nodes: int
    """There from now on."""
    kind: str
    """left with a warning, lost, or came."""


def make_trace(seed: int) -> list[Event]:
    """Each node leaves and comes back at random, as independent ones do."""
    dice = random.Random(seed)
    changes: list[tuple[float, int, str]] = []
    for _ in range(NODES):
        at = 0.0
        while True:
            at += dice.expovariate(1 / (LEAVE_H * 3600))
            changes.append((at, -1, "left" if dice.random() < WARNED else "lost"))
            at += dice.expovariate(1 / (RETURN_H * 3600))
            changes.append((at, 1, "came"))
            if at > HOURS * 3600:
                break
    nodes, found = NODES, []
    for at, change, kind in sorted(changes):
        nodes += change
        if at < HOURS * 3600:
            found.append(Event(at, nodes, kind))
    return found


class Kept(NamedTuple):
    """The use that was made of the available node-hours."""

    steps_s: float
    """Node-seconds in steps that were kept, as a share of all node-seconds."""
    events: int


def replay(trace: list[Event], pauses: dict[str, float]) -> Kept:
    """Node-seconds of steps that were kept over those that were there.

    A loss without a warning costs the steps since the last checkpoint, too. Another event during a
    pause begins it anew.
    """
    there = kept = 0.0
    now, nodes, resume, saved = 0.0, NODES, 0.0, 0.0
    for event in [*trace, Event(HOURS * 3600, 0, "end")]:
        length = event.at_s - now
        there += nodes * length
        trained = max(0.0, event.at_s - max(resume, now)) if nodes >= LEAST else 0.0
        if event.kind == "lost":
            since = (event.at_s - saved) % SAVE_EVERY_S
            trained = max(0.0, trained - since)
        kept += nodes * trained
        now, nodes = event.at_s, event.nodes
        resume = event.at_s + pauses.get(event.kind, 0.0)
        saved = resume
    return Kept(kept / there, len(trace))


def compare_goodput(costs: Costs) -> str:
    """The table."""
    trace = make_trace(SEED)
    ways = {
        "morphing": {"left": costs.asked_s, "lost": costs.lost_s, "came": costs.asked_s},
        "stop and submit again, by hand at once": dict.fromkeys(
            ("left", "lost", "came"), costs.restart_s
        ),
        "the same, after 5 minutes in the queue": dict.fromkeys(
            ("left", "lost", "came"), costs.restart_s + 300
        ),
    }
    rows = "\n".join(
        f"| {name} | {replay(trace, pauses).steps_s:.2%} |" for name, pauses in ways.items()
    )
    kinds = [event.kind for event in trace]
    left, lost, came = (kinds.count(kind) for kind in ("left", "lost", "came"))
    return f"""\
Goodput, replayed and not run: {HOURS:g} hours of {NODES} nodes, each taken away after {LEAVE_H:g}
hours on average ({WARNED:.0%} with a warning) and replaced after {RETURN_H:g}: {left} left, {lost}
lost, {came} came. A checkpoint each {SAVE_EVERY_S / 60:g} minutes, the medians above for the pauses
(a node that comes costs what one costs that leaves). Of the node-seconds that were there, in steps
that were kept:

| | goodput |
|---|---|
{rows}
"""
