"""Cost of errors in the profile: is the best plan still the best if figures are 5 % off?

Each figure of a group is made larger and smaller: the times of one kind of GPU, of the embedding
and of the head, the links within and between nodes. The plans that a search found are timed anew,
their cuts improved anew; what the winner, as it is, loses to the best of them is its risk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from varuna_core.planner.model.tables import Tables
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.profile import TIMES, Cell, LinkTime, Profile
from varuna_core.planner.result.band import build_chain
from varuna_core.planner.search.partition import improve
from varuna_core.planner.search.search import Candidate

ERROR = 0.05
MOST_PLANS = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """One error of the profile."""

    what: str
    """Such as `A10 5 % slower`."""
    winner_s: float
    """The step of the plan that won without the error."""
    best_s: float
    """Of the best plan with it, of those that were found."""
    best: Candidate

    @property
    def loss(self) -> float:
        """Share of the best plan's time that the winner takes longer."""
        return max(0.0, self.winner_s / self.best_s - 1)


def find_sensitivity(
    profile: Profile,
    training: TrainingModel,
    candidates: Sequence[Candidate],
    *,
    least: int = 1,
    error: float = ERROR,
) -> list[Case]:
    """The first candidate is the winner. Memory is left as it is."""
    cases = []
    for what, changed in list_errors(profile, error):
        tables = Tables(changed, training)
        winner = candidates[0]
        winner_s = build_chain(tables, winner, least).find_step(winner.bounds)
        best_s, best = winner_s, winner
        for candidate in candidates[:MOST_PLANS]:
            chain = build_chain(tables, candidate, least)
            bounds, step_s = candidate.bounds, chain.find_step(candidate.bounds)
            begin = candidate.bounds if candidate.stages_per_rank > 1 else chain.follow_bound()
            if begin is not None:
                improved, improved_s = improve(chain, begin)
                if improved_s < step_s:
                    bounds, step_s = improved, improved_s
            if step_s < best_s:
                best_s, best = step_s, replace(candidate, bounds=bounds, step_s=step_s)
        cases.append(Case(what=what, winner_s=winner_s, best_s=best_s, best=best))
    return cases


def list_errors(profile: Profile, error: float) -> Iterator[tuple[str, Profile]]:
    """Profiles that are off in one thing."""
    last = profile.model.num_segments - 1
    for sign, word in ((1, "slower"), (-1, "faster")):
        factor = 1 + sign * error
        told = f"{error:.0%} {word}".replace("%", " %")
        kinds = sorted(profile.gpus)
        if len(kinds) > 1:  # with one kind alone all times would grow alike
            for kind in kinds:
                yield f"{kind} {told}", scale_times(profile, {kind}, lambda _: True, factor)
        if last > 0:
            every = set(kinds)
            yield f"embedding {told}", scale_times(profile, every, lambda s: s == 0, factor)
            yield f"head {told}", scale_times(profile, every, lambda s: s == last, factor)
        for where, name in (("intra", "within"), ("inter", "between")):
            if any(key[2] == where for key in profile.network.links):
                yield f"links {name} nodes {told}", _scale_links(profile, where, factor)


def scale_times(
    profile: Profile, kinds: set[str], is_meant: Callable[[int], bool], factor: float
) -> Profile:
    """The profile with the times of some segments on some kinds of GPU multiplied."""

    def scale(cell: Cell) -> Cell:
        changed: dict[str, Any] = {
            name: tuple(
                took * factor if is_meant(segment) else took
                for segment, took in enumerate(getattr(cell, name))
            )
            for name in (*TIMES, "selective_s")
        }
        return replace(cell, **changed)

    gpus = {
        kind: replace(gpu, cells={key: scale(cell) for key, cell in gpu.cells.items()})
        if kind in kinds
        else gpu
        for kind, gpu in profile.gpus.items()
    }
    return replace(profile, gpus=gpus)


def _scale_links(profile: Profile, where: str, factor: float) -> Profile:
    links = {
        key: scale_link(link, factor) if key[2] == where else link
        for key, link in profile.network.links.items()
    }
    sums = {
        key: scale_link(link, factor) if (key[1] > key[2]) == (where == "inter") else link
        for key, link in profile.network.all_reduces.items()
    }
    halves = {
        key: scale_link(link, factor) if (key[2] > key[3]) == (where == "inter") else link
        for key, link in profile.network.halves.items()
    }
    network = replace(profile.network, links=links, all_reduces=sums, halves=halves)
    return replace(profile, network=network)


def scale_link(link: LinkTime, factor: float) -> LinkTime:
    points = tuple((size, took * factor) for size, took in link.points)
    return replace(link, points=points)
