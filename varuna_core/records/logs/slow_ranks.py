"""Find ranks that work longer than their peers: one rule for status, the autoscaler and the report.

A rank's peers run the same stages on the same kind of device. The work of a step, without waits, is
compared with the median of the peers' work in that step. One ladder, from the bottom:

rung         times peers  in steps                       who acts on it
NOTABLE      over 1.1     60 % of the attempt            the report names the rank
PERSISTENT   over 1.15    80 % of the last 20 to 60      the report and status name it (SLOW), the
                                                         autoscaler may exclude its node
STARK        over 1.43    the median of 10 or fewer      status names it before 20 are known

So status and the report always name the nodes that the autoscaler excludes. The report names more,
since it looks back and stops nothing. Ranks with equal work differ by less than 1.1; a lasting 1.15
justifies the pause of a morph; above 1.43 (a score below 0.7), a few steps are enough, since
random variation is smaller.

PERSISTENT and STARK also require a loss of LEAST_S in a step, and of LEAST_SHARE of the step.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Dict, List, Mapping, Optional, Sequence

WARM_UP_STEPS = 5
"""First steps of an attempt, which say nothing about later ones."""
RECENT_STEPS = 60
"""Number of last steps that count when an action is to be taken."""
LEAST_S = 0.1
LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Rung:
    """A rule for slow ranks: how much slower than peers, in which share of how many steps."""

    times: float
    """Minimum ratio to the work of the peers."""
    share: float
    """Minimum share of steps above that ratio."""
    num_steps: int
    """Minimum number of steps with known times."""


NOTABLE = Rung(times=1.1, share=0.6, num_steps=1)
PERSISTENT = Rung(times=1.15, share=0.8, num_steps=20)
STARK = Rung(times=1 / 0.7, share=0.5, num_steps=1)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow by the rule PERSISTENT in the last steps."""

    rank: int
    ratio: float
    """The rank's work divided by that of its peers, in the median step."""
    share: float
    """The share of steps in which the rank was slow."""
    extra_s: float
    """Seconds by which the rank works longer than its peers, in the median step."""
    work_s: float
    peers_s: float
    num_steps: int
    num_peers: int


def find_slow_ranks(
    works_s: Mapping[int, Mapping[int, float]],
    peers: Sequence[Sequence[int]],
    steps_s: Optional[Mapping[int, float]] = None,
) -> List[SlowRank]:
    """Return slow ranks, slowest first. `works_s` is each rank's work in each step, `peers` the
    groups of equal ranks; with `steps_s`, the steps' times, ranks that cost little are ignored."""
    found = [item for ranks in peers for item in _compare(works_s, ranks)]
    if steps_s is not None:
        found = [item for item in found if costs_much(item.extra_s, steps_s.get(item.rank))]
    return sorted(found, key=lambda item: -item.extra_s)


def costs_much(extra_s: float, step_s: Optional[float]) -> bool:
    """Return True if this loss of time, also as a share of the step, is worth a report."""
    return extra_s > max(LEAST_S, LEAST_SHARE * (step_s or 0.0))


def _compare(works_s: Mapping[int, Mapping[int, float]], ranks: Sequence[int]) -> List[SlowRank]:
    """List the ranks that are slow among these, by the last steps of which more than half of the
    ranks have times."""
    told: Dict[int, Dict[int, float]] = {}
    for rank in ranks:
        for step, work in works_s.get(rank, {}).items():
            told.setdefault(step, {})[rank] = work
    enough = max(2, len(ranks) // 2 + 1)
    steps = [step for step in sorted(told) if len(told[step]) >= enough][-RECENT_STEPS:]
    if len(steps) < PERSISTENT.num_steps:
        return []
    usual: Dict[int, float] = {}
    num_slow = dict.fromkeys(ranks, 0)
    for step in steps:
        works = told[step]
        usual[step] = compute_peers_work(list(works.values()))
        bound = PERSISTENT.times * usual[step]
        for rank, work in works.items():
            num_slow[rank] += usual[step] > 0 and work > bound
    found = []
    for rank, count in num_slow.items():
        if count < PERSISTENT.share * PERSISTENT.num_steps:
            continue
        own = [step for step in steps if rank in told[step]]
        share = count / len(own)
        ratios = [told[step][rank] / usual[step] for step in own if usual[step] > 0]
        if len(ratios) == len(own) >= PERSISTENT.num_steps and share >= PERSISTENT.share:
            found.append(
                SlowRank(
                    rank=rank,
                    ratio=statistics.median(ratios),
                    share=share,
                    extra_s=statistics.median(told[step][rank] - usual[step] for step in own),
                    work_s=statistics.median(told[step][rank] for step in own),
                    peers_s=statistics.median(usual[step] for step in own),
                    num_steps=len(own),
                    num_peers=len(ranks) - 1,
                )
            )
    return found


def compute_peers_work(works: List[float]) -> float:
    """Return the median work of the other ranks, given the works of all ranks, the slow one
    included.

    The result is the same for every rank of the upper half, since removing one of them does not
    change the ranks below.
    """
    works.sort()
    middle = (len(works) - 1) // 2
    return works[middle] if len(works) % 2 == 0 else (works[middle - 1] + works[middle]) / 2
