"""Where stages are: which GPUs hold each one, and what their messages go over.

A stage is held by replicas x tensor GPUs. One that has several kinds of GPU counts as the slowest
of them, figure by figure: its slowest replica is at the end of every stage it meets.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.planner.profile.links import Where


@dataclass(frozen=True)
class Site:
    """One stage's GPUs."""

    kinds: tuple[str, ...]
    """Each once, sorted."""
    group: tuple[tuple[str, int], ...]
    """Of the ranks that sum their gradients: their nodes' kinds, and how many lie on each."""
    sharing: int
    """Such groups that use a node's link at once."""


@dataclass(frozen=True)
class Route:
    """How messages go from one GPU to another."""

    sender: str
    receiver: str
    where: Where
    flows: int
    """Messages of the same moment on the same link."""


@dataclass(frozen=True)
class Boundary:
    """Between a stage and the next: the slowest route counts."""

    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Placed:
    """A whole pipeline."""

    sites: tuple[Site, ...]
    boundaries: tuple[Boundary, ...]
    nodes: tuple[str, ...] = ()
    """Kinds of the nodes, in the order in which stages fill them."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple("+".join(site.kinds) for site in self.sites)
