"""Find the parts of a plan that its profile does not cover, and their effect on the step time.

The factors were measured (benchmarks/results/planner_sizes.md and estimates.md) on OPT-350M on six
GPUs and on 688 published runs. There is no factor for a link or a sum that was not measured: the
least step time then assumes that these take no time, and the most is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Sure, Within
from varuna_core.facts.not_covered import Lack, NotCovered
from varuna_core.planner.profile.profile import LinkKey, Network, Profile, build_link
from varuna_core.planner.search.search import Candidate

BETWEEN: Mapping[int, tuple[float, float]] = {4: (0.90, 1.03), 16: (0.83, 1.18), 32: (0.82, 1.18)}
BEYOND: Mapping[int, tuple[float, float]] = {2: (0.96, 1.20), 4: (0.81, 1.36), 8: (0.77, 2.12)}
BELOW: Mapping[int, tuple[float, float]] = {2: (0.81, 1.36), 4: (0.71, 1.93), 8: (0.64, 2.13)}
"""Bounds of the ratio of the true time to a time derived from two measured sizes, keyed by the
largest ratio of sizes to which they apply."""
SIZES = Evidence("benchmarks/results/planner_sizes.md", Sure.MEASURED)
ESTIMATED = Within(
    0.55, 4.0, (Evidence("benchmarks/results/estimates.md", Sure.MEASURED, seen=688),)
)
"""Bounds of the ratio of true to estimated step time in eight of ten runs, with an assumed link
between nodes."""
NOBODY = "the error of such a prediction is not known"
GPUS_ALONE = "the error of predictions was measured only on GPUs"
CPU = "cpu"
"""A profile's name for a rank without a GPU. Its times depend less evenly on size: on a shared
machine with two cores, a size was off by more than a quarter from the line through two others."""
FREE = build_link(0.0, 1e9)


def find_lacks(profile: Profile, candidate: Candidate) -> Iterator[NotCovered]:
    """Yield each part of the plan that the profile does not cover."""
    shape, placed = candidate.option.shape, candidate.placed
    kinds = sorted({kind for site in placed.sites for kind in site.kinds})
    for kind in kinds:
        cell = profile.estimate_cell(kind, shape.micro_batch, shape.tensor)
        if cell.source == "estimate":
            yield NotCovered(Lack.ESTIMATE, kind, ESTIMATED)
        elif cell.source != "measured":
            cells = profile.find_gpu(kind).cells
            sizes = tuple(sorted(size for size, degree in cells if degree == shape.tensor))
            factor = weigh_size(shape.micro_batch, sizes) if kind != CPU else NotKnown(GPUS_ALONE)
            yield NotCovered(Lack.SIZE, kind, factor, shape.micro_batch, sizes)
    links = sorted({key for key in list_links(candidate) if _is_estimate(profile.network, key)})
    for a, b, where in links:
        subject = f"{a} and {b} {'of' if where == 'intra' else 'on two'} nodes"
        yield NotCovered(Lack.LINK, subject, NotKnown(NOBODY))
    groups = sorted({site.group for site in placed.sites})
    for group in groups:
        size = sum(count for _, count in group)
        if size > 1 and not profile.network.is_sum_measured(group):
            named = " + ".join(f"{count} {kind}" for kind, count in group)
            yield NotCovered(Lack.SUM, named, NotKnown(NOBODY))


def weigh_size(wanted: int, sizes: tuple[int, ...]) -> Bounded[float]:
    """Bound the true time divided by the one derived from the two nearest sizes."""
    lower, higher = [n for n in sizes if n < wanted], [n for n in sizes if n > wanted]
    if lower and higher:
        table, times = BETWEEN, higher[0] / lower[-1]
    elif lower:
        table, times = BEYOND, wanted / lower[-1]
    else:
        table, times = BELOW, higher[0] / wanted
    for most, (low, high) in table.items():
        if times <= most:
            return Within(low, high, (SIZES,))
    return NotKnown(NOBODY, (SIZES,))


def list_links(candidate: Candidate) -> Iterator[LinkKey]:
    """Yield sender, receiver and place of each link between a plan's stages."""
    for before, after in itertools.pairwise(candidate.places):
        boundary = candidate.placed.find_boundary(before, after)
        for route in () if boundary is None else boundary.routes:
            yield route.sender, route.receiver, route.where


def free_links(profile: Profile, lacks: Iterable[NotCovered], candidate: Candidate) -> Profile:
    """Return a profile in which unmeasured links of the plan take no time."""
    if all(one.lack is not Lack.LINK for one in lacks):
        return profile
    network = profile.network
    free = {key: FREE for key in list_links(candidate) if _is_estimate(network, key)}
    return replace(profile, network=replace(network, links={**network.links, **free}))


def _is_estimate(network: Network, key: LinkKey) -> bool:
    return network.find(*key).source != "measured"
