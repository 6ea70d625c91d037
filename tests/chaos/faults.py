"""What is done to a run, and when: drawn from a seed, written to the report, played again from it.

    faults of seed 7:  ──────●─────────●●──────────────●────────►  iterations that are saved
                          kill rank   fill store       warn
                                       kill manager    (two at once, now and then)

When a fault comes is told in saved iterations, not in seconds, so that a slow machine plays the
same story as a fast one.
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
    """One thing that is done to the run."""

    kind: str
    at: int
    """Once a checkpoint of this iteration or a later one is there."""
    pick: float
    """0 to 1: which of the nodes, ranks or files that there are then."""
    lasts_s: float
    """For what is undone again."""


def draw(seed: int, count: int, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """So many faults; each kind once before one comes again."""
    dice = random.Random(seed)
    found: list[Fault] = []
    at, was_together = 0, True
    for kind in _deal(dice, count, kinds):
        is_together = not was_together and dice.random() < TOGETHER
        if not is_together:
            at += dice.randrange(GAP // 2, GAP * 3 // 2)
        was_together = is_together
        lasts_s = round(dice.uniform(*LASTS_S), 1)
        found.append(Fault(kind=kind, at=at, pick=round(dice.random(), 3), lasts_s=lasts_s))
    return tuple(found)


def _deal(dice: random.Random, count: int, kinds: Sequence[str]) -> Iterator[str]:
    deck: list[str] = []
    for _ in range(count):
        if not deck:
            deck = dice.sample(list(kinds), len(kinds))
        yield deck.pop()


def count_steps(faults: Sequence[Fault]) -> int:
    """Of a training that is not over before the last fault has come, and been mended."""
    return max((fault.at for fault in faults), default=0) + 2 * GAP
