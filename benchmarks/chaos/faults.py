"""Schedules of faults: which faults hit a run and when, drawn from a seed or read from a report.

    faults of seed 7:  ──────●─────────●●──────────────●────────►  iterations that are saved
                          kill rank   fill store       warn
                                       kill manager    (two at once, now and then)

The time of a fault is counted in saved iterations, not in seconds, so that a schedule means the
same on a slow machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ANYWHERE = (
    "kill rank",
    "kill agent",
    "kill node",
    "kill manager",
    "freeze manager",
    "freeze node",
    "slow rank",
    "damage newest",
    "fill store",
    "fill run",
    "warn",
    "leave",
    "grow",
    "shrink",
    "kill waiting",
    "step clock",
)
"""Faults that real processes on one machine can have."""
ON_SLURM = (
    "power off",
    "cut link",
    "slow link",
    "stop slurmd",
    "restart controller",
    "requeue",
    "preempt",
)
"""Those that need the lab besides."""

GAP = 40
"""Iterations from one fault to the next, about: time for a checkpoint between."""
TOGETHER = 0.2
"""Share of the faults that come with the one before."""
LASTS_S = (1.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: what it is, when it comes and what it hits."""

    kind: str
    at: int
    """Once a checkpoint of this iteration or a later one is there."""
    pick: float
    """0 to 1: which of the nodes, ranks or files that there are then."""
    lasts_s: float
    """How long until the fault is undone, for those that are."""


def draw_faults(seed: int, count: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """Draw that many faults; each kind comes once before one is repeated."""
    rng = random.Random(seed)
    found: list[Fault] = []
    at, was_together = 0, True
    for kind in _deal(rng, count, kinds):
        is_together = not was_together and rng.random() < TOGETHER
        if not is_together:
            at += rng.randrange(GAP // 2, GAP * 3 // 2)
        was_together = is_together
        lasts_s = round(rng.uniform(*LASTS_S), 1)
        found.append(Fault(kind=kind, at=at, pick=round(rng.random(), 3), lasts_s=lasts_s))
    return tuple(found)


def _deal(rng: random.Random, count: int, kinds: Sequence[str]) -> Iterator[str]:
    deck: list[str] = []
    for _ in range(count):
        if not deck:
            deck = rng.sample(list(kinds), len(kinds))
        yield deck.pop()


def count_steps(faults: Sequence[Fault]) -> int:
    """Steps of a training that outlasts the last fault and its repair."""
    return max((fault.at for fault in faults), default=0) + 2 * GAP
