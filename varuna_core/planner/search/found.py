"""What a search found and what it proved."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.planner.model.chain import Bounds
from varuna_core.planner.model.sites import Placed
from varuna_core.planner.search.space import Option


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan, timed."""

    option: Option
    placed: Placed
    bounds: Bounds
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What is known of one class of placements."""

    placement_class: str
    best_s: float
    bound_s: float
    """No plan of it takes less."""

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.best_s)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found, best first, and what it proved."""

    candidates: tuple[Candidate, ...]
    """The first is the best; the others are what was timed on the way, each shape once."""
    proofs: tuple[Proof, ...]
    """Of growing classes of placements; the last is of all that was looked through."""
    num_options: int
    num_placements: int
    """Looked into; the floors spoke for the others."""
    took_s: float

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def bound_s(self) -> float:
        return self.proofs[-1].bound_s

    @property
    def placement_class(self) -> str:
        return self.proofs[-1].placement_class

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_s / self.best.step_s)
