"""Replace the estimated or profiled costs of actions by costs measured in training.

A schedule runs only some kinds of action: 1f1b has no `I`. The costs of the other kinds are the
former estimates, scaled by the ratio of measured to estimated costs of the stage's measured kinds.

    estimated   F 1   I 1   W 1   B 2        any unit
    measured    F 3               B 9
    result      F 3   I 4   W 4   B 9        seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from varuna_core.schedule.actions import COPIES, Kind
from varuna_core.schedule.costs import Costs

WORK: tuple[Kind, ...] = ("F", "R", "B", "I", "W")
"""Kinds that are measured; `f` counts as `F`."""
MEASURED = (*WORK, *COPIES)

MOVED, MOST_MOVED = 0.1, 0.4
"""A cost has changed if it differs by this fraction of itself or of the mean action, whichever is
larger. The limit doubles, up to the second value, whenever a change led to no better schedule:
building schedules takes time, and on a busy machine costs change all the time."""


class KnownCosts:
    """The current costs of all stages."""

    def __init__(self, given: Costs) -> None:
        self._by_kind = {kind: list(given.by_kind[kind]) for kind in MEASURED}
        self._hops = list(given.hops)
        self._moved = MOVED
        self._seen: list[float] | None = None
        """The costs that were last considered changed."""

    def measure(
        self, by_kind: Mapping[Kind, Sequence[float]], hops: Sequence[float | None]
    ) -> Costs | None:
        """Update the costs from measured ones by kind and stage (0 if no action of the kind ran)
        and from the hops' (None if not known). Return all costs, or None, without an update, if no
        action of a stage was measured."""
        stages = range(len(self._by_kind["F"]))
        before = after = 0.0
        believed = {kind: list(figures) for kind, figures in self._by_kind.items()}
        for stage in stages:
            ran = [kind for kind in WORK if by_kind[kind][stage] > 0]
            was = sum(believed[kind][stage] for kind in ran)
            now = sum(by_kind[kind][stage] for kind in ran)
            if not ran:
                return None
            before, after = before + was, after + now
            for kind in WORK:
                rest = believed[kind][stage] * now / was if was else now / len(ran)
                believed[kind][stage] = by_kind[kind][stage] if kind in ran else rest
            for kind in COPIES:
                believed[kind][stage] = by_kind[kind][stage] or believed[kind][stage]
        factor = after / before if before else 1.0
        self._by_kind = believed
        self._hops = [
            old * factor if new is None else new for old, new in zip(self._hops, hops, strict=True)
        ]
        return self.costs

    @property
    def costs(self) -> Costs:
        return Costs(
            forward=tuple(self._by_kind["F"]),
            input_grad=tuple(self._by_kind["I"]),
            weight_grad=tuple(self._by_kind["W"]),
            backward=tuple(self._by_kind["B"]),
            recompute=tuple(self._by_kind["R"]),
            offload=self._list_copies("O"),
            load=self._list_copies("L"),
            hops=tuple(self._hops),
        )

    def _list_copies(self, kind: Kind) -> tuple[float, ...]:
        """Return the costs of this kind of copy (O or L) by stage; empty if not known."""
        return tuple(self._by_kind[kind]) if any(self._by_kind[kind]) else ()

    def has_moved(self) -> bool:
        """Return True if any cost has changed since the last time that this returned True."""
        work = [one for kind in WORK for one in self._by_kind[kind]]
        copies = [one for kind in COPIES for one in self._by_kind[kind]]
        mean = sum(work) / len(work)
        figures = [*work, *copies, *self._hops]
        if self._seen is not None and all(
            abs(new - old) <= self._moved * max(mean, old)
            for new, old in zip(figures, self._seen, strict=True)
        ):
            return False
        self._seen = figures
        return True

    def note_use(self, was_of_use: bool) -> None:
        """Record if the last changed costs led to another schedule."""
        self._moved = MOVED if was_of_use else min(MOST_MOVED, 2 * self._moved)
