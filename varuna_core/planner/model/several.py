"""Model a pipeline with several stages on each rank: interleaved and zbv.

```
interleaved, 2 ranks   rank 0: stages 0 2   rank 1: stages 1 3
zbv, 2 ranks           rank 0: stages 0 3   rank 1: stages 1 2
```

Partitions are timed as in `Chain`. The memory of a rank is that of all its stages together, so
`Chain`'s memory test of a single stage and its lower bounds do not apply (search/rank_bounds.py has
other bounds).
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
    """A chain with several stages on each rank; every stage has at least one segment."""

    def compute_costs(self, bounds: Bounds) -> Costs:
        """Return the costs of a partition's stages, as a plan passes them to its run."""
        (column,) = self.build_costs(bounds).columns
        return Costs(**unlist_costs(column.costs, column.hops).as_json())

    def follow_costs(self, costs: Costs) -> SeveralStages:
        """Return the chain with the action order that the runtime makes for these costs. Costs may
        change with the order, since host time is spread over other actions."""
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
        """Return the memory of each stage; a rank's first stage also has the framework's."""
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
        """Return, by partition, the largest share of its memory that a rank holds."""
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
        """Return the partition whose largest stage has the least work."""
        return _find_min_max([stage.work for stage in self.stages])


def _find_min_max(figures: list[Array]) -> Bounds | None:
    """Return the partition whose largest figure is least; None if all are inf."""
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
