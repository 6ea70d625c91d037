"""Costs of actions as a training measures them, in place of those that were counted or profiled.

A schedule runs only some kinds of action: 1f1b has no `I`. What the others would take is what was
believed of them, times how much longer the stage's measured kinds take than was believed.

    believed   F 1   I 1   W 1   B 2        any unit
    measured   F 3               B 9
    then       F 3   I 4   W 4   B 9        seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from varuna_core.schedule.actions import COPIES, Kind
from varuna_core.schedule.costs import Costs

WORK: tuple[Kind, ...] = ("F", "R", "B", "I", "W")
"""`f` counts as `F`."""
MEASURED = (*WORK, *COPIES)

MOVED, MOST_MOVED = 0.1, 0.4
"""Of itself or of the mean action, if that is more: a figure that differs by more has moved. The
limit doubles, up to the second, each time that what had moved was of no use: making a schedule
takes time, and on a machine that is busy with something else figures move all the time."""


class KnownCosts:
    """Known costs of all stages."""

    def __init__(self, given: Costs) -> None:
        self._by_kind = {kind: list(given.by_kind[kind]) for kind in MEASURED}
        self._hops = list(given.hops)
        self._moved = MOVED
        self._seen: list[float] | None = None
        """The figures of the last costs that had moved."""

    def measure(
        self, by_kind: Mapping[Kind, Sequence[float]], hops: Sequence[float | None]
    ) -> Costs | None:
        """Take figures of all stages, 0 where a kind has not run, None for a hop that is not known.

        The costs as they are known now; None if there is a stage of which nothing was measured.
        """
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
        """None where nothing is known to be copied."""
        return tuple(self._by_kind[kind]) if any(self._by_kind[kind]) else ()

    def has_moved(self) -> bool:
        """True if any figure differs from those for which this was true the last time."""
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
        """Note if the costs that had moved last led to another schedule."""
        self._moved = MOVED if was_of_use else min(MOST_MOVED, 2 * self._moved)
