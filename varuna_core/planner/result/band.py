"""Estimate the uncertainty of a predicted step by drawing steps from the spread of measured
actions.

```
a drawn step   F x 0.98   F x 1.03   B x 1.00 ...    each action by its kind's quantiles
               all of them x 1.02                    the machine, slow or fast for a while
               + what a replica waits                where others get ahead on a link they share
the band       5 and 95 of 100 drawn steps, and UNEXPLAINED on both sides
```

Two plans run on the same slow or fast machine, so they are compared by a narrower band without that
factor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from varuna_core.facts.known import Within
from varuna_core.facts.not_covered import Lack, NotCovered
from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.schedule_model import build_schedule_model
from varuna_core.planner.model.several import SeveralStages
from varuna_core.planner.model.shared_links import run_together
from varuna_core.planner.model.tables import Array, Tables
from varuna_core.planner.profile.profile import FIGURE_OF, QUANTILES, TIMES, Spread
from varuna_core.planner.search.deadline import Deadline
from varuna_core.planner.search.search import Candidate, Search, Searched, measure_simplicity
from varuna_core.schedule.compiled import KINDS

UNEXPLAINED = 0.03
"""Share of a step not explained by the spread of actions. Most timed layouts were within it:
benchmarks/results/simulator.md."""
DRAWS = 200
MOST_FACTORS = 4_000_000
"""Most factors that are drawn for all steps together: for a long schedule fewer steps are drawn,
but at least FEWEST."""
FEWEST = 40
FEWEST_TOGETHER, MOST_TOGETHER = 4, 20
"""Drawn steps of all replicas that share links: the least and the most number."""
MOST_ACTIONS = 100_000
"""Limit of actions over all these steps, unless fewer than FEWEST_TOGETHER would be drawn."""
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Band:
    """The two times between which a step is expected in nine of ten cases."""

    low_s: float
    middle_s: float
    """The median of the drawn steps."""
    high_s: float
    apart: float
    """The share of a step by which another plan must differ to count as faster or slower."""


def find_band(chain: Chain, bounds: Bounds, lacks: Sequence[NotCovered] = ()) -> Band | None:
    """Return the expected range of a step, wider for sizes that were not measured.

    None if the spread of the measured times is not known, or if times are estimates.
    """
    spreads = [stage.times.spread for stage in chain.stages]
    known = [spread for spread in spreads if spread is not None]
    if len(known) < len(spreads) or any("estimate" in s.times.sources for s in chain.stages):
        return None
    factors, rounds = _draw_factors(chain, known)
    partitions = np.repeat([bounds], len(rounds), axis=0)
    delays = np.resize(_draw_delays(chain, bounds), len(rounds))
    steps = chain.compute_steps(partitions, factors) + delays
    middle, high = np.quantile(steps, [0.5, QUANTILES[-1]])
    slower = factors * rounds
    low_s, high_s = (
        np.quantile(chain.compute_steps(partitions, slower * width) + delays, quantile)
        for width, quantile in zip(_widen(chain, lacks), (QUANTILES[0], QUANTILES[-1]), strict=True)
    )
    return Band(
        low_s=float(low_s) * (1 - UNEXPLAINED),
        middle_s=float(middle),
        high_s=float(high_s) * (1 + UNEXPLAINED),
        apart=float(high / middle) - 1 + UNEXPLAINED,
    )


def _widen(chain: Chain, lacks: Sequence[NotCovered]) -> tuple[Array, Array]:
    """Return the least and the greatest duration of each action, divided by its usual time."""
    stages = np.array([op[1] % chain.num_stages for op in chain.compiled.ops])
    low, high = np.ones((2, len(stages), 1))
    for one in lacks:
        if one.lack is Lack.SIZE and isinstance(one.factor, Within):
            own = [one.subject in site.kinds for site in chain.placed.sites]
            held = np.array([own[place] for place in chain.places])[stages]
            low[held] = np.minimum(low[held], one.factor.low)
            high[held] = np.maximum(high[held], one.factor.high)
    return low, high


def prefer_simpler(question: Search, searched: Searched, deadline: Deadline) -> Searched:
    """Return the result with the simplest plan whose time cannot be told from that of the best, if
    that plan is simpler."""
    best = searched.best
    chain = build_chain(question.tables, best, question.wishes.least)
    band = find_band(chain, best.bounds)
    if band is None:
        return searched
    chosen = question.choose_simplest(best.step_s * (1 + band.apart), deadline)
    is_simpler = measure_simplicity(chosen) < measure_simplicity(best)
    return replace(searched, simpler=chosen if is_simpler else None)


def _draw_factors(chain: Chain, spreads: list[Spread]) -> tuple[Array, Array]:
    """Draw steps: the factor by which each action differs from its usual time, and one factor for
    all actions of the step."""
    ops = chain.compiled.ops
    count = max(FEWEST, min(DRAWS, MOST_FACTORS // max(1, len(ops))))
    draw = np.random.default_rng(SEED)
    factors = draw.random((len(ops), count))
    kinds, stages = np.divmod([op[1] for op in ops], chain.num_stages)
    for kind, stage in {(int(k), int(s)) for k, s in zip(kinds, stages, strict=True)}:
        own = (kinds == kind) & (stages == stage)
        if kind >= len(KINDS):  # a copy: how much it varies nobody measures
            factors[own] = 1.0
            continue
        quantiles = spreads[stage].actions[TIMES.index(FIGURE_OF[KINDS[kind]])]
        factors[own] = np.interp(factors[own], QUANTILES, quantiles)
    # One draw for all: the stage with the widest spread says how far.
    widest = max(spreads, key=lambda spread: spread.rounds[-1] - spread.rounds[0])
    return factors, np.interp(draw.random(count), QUANTILES, widest.rounds)


def _draw_delays(chain: Chain, bounds: Bounds) -> list[float]:
    """Draw the seconds by which a step is longer if replicas send at once over shared links than if
    they take turns."""
    (column,) = chain.build_costs(bounds).columns
    if not column.lag_s:
        return [0.0]
    compiled = chain.compile(bounds)
    in_turn = column.lag_s
    in_turn += compiled.run(column.costs, column.hops, holds=column.holds).makespan
    count = min(MOST_TOGETHER, MOST_ACTIONS // (len(compiled.ops) * max(chain.sharing)))
    draw = random.Random(SEED)
    return [
        run_together(compiled, column, chain.sharing, draw) - in_turn
        for _ in range(max(FEWEST_TOGETHER, count))
    ]


def build_chain(tables: Tables, candidate: Candidate, least: int = 1) -> Chain:
    """Return the chain to which the candidate's partition belongs."""
    option, several = candidate.option, candidate.stages_per_rank
    work = candidate.order or build_schedule_model(
        option.schedule,
        len(candidate.placed.sites),
        option.num_microbatches,
        option.recompute,
        several,
    )
    make = SeveralStages if several > 1 else Chain
    return make(tables, option.shape, candidate.placed, work, least)
