"""Weigh the cost of a run against its time: the best plans for parts of the cluster.

    $ a step │ x
             │    x               a plan is on the front if no other is
             │        x  x        both cheaper and faster
             └──────────────  s a step

Any number of nodes of each kind may be used, if there are at most MOST_PARTS combinations;
otherwise all, half, a quarter, .. or none, in as fine steps as this limit allows. A plan pays for
whole nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.search.deadline import Deadline, within
from varuna_core.planner.search.search import Candidate, Search
from varuna_core.planner.search.space import Wishes

MOST_PARTS = 48


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    candidate: Candidate
    step_s: float
    price: float
    """The price of a step."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Plans with the best trade of time for price: fastest first, each next one cheaper."""

    offers: tuple[PricedPlan, ...]
    num_parts: int
    """The number of parts of the cluster that were planned for."""
    num_left: int
    """The number of parts for which there was no time."""


def compute_front(
    profile: Profile,
    training: TrainingModel,
    cluster: Cluster,
    wishes: Wishes,
    known: Sequence[Candidate] = (),
    deadline: Deadline | None = None,
) -> Front:
    """Compute the front; `known` plans are for the whole cluster. PlanningError without prices."""
    deadline = deadline or within(20.0)
    missing = [kind.name for kind in cluster.kinds if kind.price_per_hour is None]
    if missing:
        raise PlanningError(
            f"no price for {', '.join(missing)}: give prices for every kind of node, such as "
            f"--prices {cluster.kinds[0].gpu}=2.5 (per node-hour)"
        )
    prices = {kind.name: kind.price_per_hour or 0.0 for kind in cluster.kinds}

    def offer(candidate: Candidate) -> PricedPlan:
        hourly = sum(prices[name] for name in candidate.placed.nodes)
        price = hourly * candidate.step_s / 3600
        return PricedPlan(candidate=candidate, step_s=candidate.step_s, price=price)

    parts = list(list_parts(cluster))
    found = [offer(candidate) for candidate in known]
    done = 0
    for part in parts:
        if deadline.is_over():
            break
        share = deadline.rest(1 / (len(parts) - done))
        done += 1
        try:
            searched = Search(profile, training, part, wishes, share).run()
        except MissingData:
            raise
        except PlanningError:
            continue  # it does not fit on so few
        found += [offer(candidate) for candidate in searched.candidates]
    return Front(offers=tuple(keep_best(found)), num_parts=done, num_left=len(parts) - done)


def list_parts(cluster: Cluster) -> Iterator[Cluster]:
    """Yield parts of the cluster, small ones first since they are quickly planned for."""
    choices = [list(range(kind.count + 1)) for kind in cluster.kinds]
    for parts in (64, 16, 8, 4, 2, 1):  # the finest steps that are not too many
        if math.prod(map(len, choices)) <= MOST_PARTS:
            break
        choices = [_list_counts(kind.count, parts) for kind in cluster.kinds]
    for chosen in sorted(itertools.product(*choices), key=sum):
        kinds = tuple(
            replace(kind, count=n) for kind, n in zip(cluster.kinds, chosen, strict=True) if n
        )
        if kinds:
            yield Cluster(kinds=kinds)


def _list_counts(count: int, parts: int) -> list[int]:
    """Return 0, `count`, and the fractions of `count` down to `count` / `parts`."""
    halves = itertools.takewhile(lambda n: n <= parts, (2**i for i in range(1, 7)))
    return sorted({0, count, *(count // n for n in halves)})


def keep_best(offers: Sequence[PricedPlan]) -> Iterator[PricedPlan]:
    """Yield the plans that no other plan beats in both time and price."""
    cheapest = float("inf")
    for one in sorted(offers, key=lambda offer: (offer.step_s, offer.price)):
        if one.price < cheapest * (1 - 1e-9):
            cheapest = one.price
            yield one


def choose_within_budget(front: Front, per_step: float) -> PricedPlan:
    """Return the fastest plan within the budget; raise PlanningError with the cheapest plan."""
    for one in front.offers:
        if one.price <= per_step:
            return one
    raise PlanningError(
        f"no plan costs {per_step:.4g} a step or less; the cheapest costs "
        f"{front.offers[-1].price:.4g} and takes {front.offers[-1].step_s:.4g} s"
    )


def choose_by_deadline(front: Front, step_s: float) -> PricedPlan:
    """Return the cheapest plan that is fast enough; raise PlanningError with the fastest plan."""
    fast = [one for one in front.offers if one.step_s <= step_s]
    if fast:
        return fast[-1]
    raise PlanningError(
        f"no plan takes {step_s:.4g} s a step or less; the fastest takes "
        f"{front.offers[0].step_s:.4g} s and costs {front.offers[0].price:.4g}"
    )
