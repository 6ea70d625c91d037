"""A pipeline whose ranks have several stages each: interleaved and zbv.

```
interleaved, 2 ranks   rank 0: stages 0 2   rank 1: stages 1 3
zbv, 2 ranks           rank 0: stages 0 3   rank 1: stages 1 2
```

Partitions are timed as those of `Chain`. A rank's memory is that of all its stages, so what fits is
not a matter of one stage, and `Chain`'s bounds do not hold (search/rank_bounds.py has some).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from varuna_core.planner.model.chain import Bounds, Chain
from varuna_core.planner.model.schedule_model import model_schedule
from varuna_core.planner.model.step import StageMemory
from varuna_core.planner.model.tables import Array
from varuna_core.schedule.compiled import Compiled, list_stages, unlist_costs
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.registry import SCHEDULES, build_schedule


class SeveralStages(Chain):
    """Several stages a rank; every stage has a segment or more."""

    def compute_costs(self, bounds: Bounds) -> Costs:
        """Those of these stages, as a plan gives them to its run."""
        (column,) = self.build_costs(bounds).columns
        return Costs(**unlist_costs(column.costs, column.hops).as_json())

    def follow_costs(self, costs: Costs) -> SeveralStages:
        """With the actions in the order that the runtime makes for these costs; the stages may cost
        otherwise then, where the host's part is dealt out among other actions."""
        schedule = self.compiled.schedule
        if not SCHEDULES[schedule.name].splits_backward:  # it is the same for any costs
            return self
        made = build_schedule(
            schedule.name,
            schedule.num_ranks,
            schedule.num_microbatches,
            stages_per_rank=self.num_stages // schedule.num_ranks,
            costs=costs,
            recompute=self.schedule.recompute,
        )
        work = model_schedule(Compiled(made), self.schedule.recompute)
        return SeveralStages(self.tables, self.shape, self.placed, work)

    def list_memory(self, bounds: Bounds) -> list[StageMemory]:
        """Memory of each stage; the framework's is on a rank's first stage."""
        framework = self.tables.training.framework_bytes
        return [
            replace(one, fixed=one.fixed - framework) if place in self.places[:stage] else one
            for stage, (place, one) in enumerate(
                zip(self.places, super().list_memory(bounds), strict=True)
            )
        ]

    def select_fitting(self, cuts: Array) -> Array:
        return super().select_fitting(cuts) & (self.compute_shares(cuts) <= 1)

    def compute_shares(self, cuts: Array) -> Array:
        """The most that a rank holds, as a share of its memory, by partition in rows."""
        shares = np.zeros(len(cuts))
        fixed = self.tables.compute_fixed(self.shape)
        framework = self.tables.training.framework_bytes
        for rank, held in enumerate(self.compiled.held):
            own = list_stages(self.compiled.schedule, rank)
            pairs = [(cuts[:, s], cuts[:, s + 1]) for s in own]
            stages = [self.stages[s] for s in own]
            always = sum(fixed[pair] for pair in pairs) - (len(own) - 1) * framework
            work = np.max(
                [one.times.work_bytes[pair] for one, pair in zip(stages, pairs, strict=True)],
                axis=0,
            )
            figures = []
            for one, (begins, ends) in zip(stages, pairs, strict=True):
                figures += [one.graph[begins, ends], one.inputs[begins, ends]]
            live = (np.array(held, dtype=float) @ np.array(figures)).max(axis=0)
            shares = np.maximum(shares, (always + work + live) / stages[0].times.memory_bytes)
        return shares

    def follow_bound(self) -> Bounds | None:
        """The partition whose largest stage works least."""
        return _find_min_max([stage.work for stage in self.stages])


def _find_min_max(figures: list[Array]) -> Bounds | None:
    """The partition whose largest figure is least; None where all are inf."""
    size = len(figures[0]) - 1
    behind = np.full(size + 1, np.inf)
    behind[size] = 0.0
    rows = []
    for figure in reversed(figures):
        rows.append(np.maximum(figure, behind[None, :]))
        behind = rows[-1].min(axis=1)
    if not np.isfinite(behind[0]):
        return None
    return tuple(
        itertools.accumulate(reversed(rows), lambda a, row: int(row[a].argmin()), initial=0)
    )
