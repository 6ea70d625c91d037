"""What the stages from one on need at least, by the segment they begin with.

Chains that end alike share it: it is made once for each way in which a pipeline can go on, and not
once for each chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from varuna_core.planner.model.stage_table import StageTable
from varuna_core.planner.model.tables import Array, Shape, Tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind:
    """Of a stage and those behind it; each figure by the first segment, inf where nothing fits."""

    least: Array
    """The least bound: `chain.py` says of what."""
    round: Array
    """What one micro-batch needs, down and back."""
    largest: Array
    """The least that the largest `beyond` of them can be."""
    summed: Array
    """Until all their sums over the replicas are done."""
    unhidden: Array
    """Of this stage's sum over the replicas, what is left when its last backward ends."""
    stage: StageTable | None = None
    after: Behind | None = None

    def find_beyond(self, begins: int | slice | Array = slice(None)) -> Array:
        """What the stage adds to one micro-batch's way down and back, by begin and end."""
        assert self.stage is not None and self.after is not None
        return _find_beyond(self.stage, self.after, begins)


def _find_beyond(stage: StageTable, after: Behind, begins: int | slice | Array) -> Array:
    """A stage that runs w forwards before its first gradient, of m micro-batches:

    F0 ─ way down, way back ─ B0, then m - 1 backwards and m - w forwards
    F0 ─ way ─ B0 Fw ─ way ─ Bw F2w ─ way ─ ... and the backwards that are left
    """
    if not stage.more_rounds:
        return stage.beyond[begins]
    again = stage.more_rounds * (stage.way[begins] + after.round) + stage.left[begins]
    return np.maximum(stage.beyond[begins], again)


Sums = tuple[Array, Array]


def find_end(tables: Tables) -> Behind:
    """Behind the last stage."""
    found = tables.behind.get("end")
    if found is None:
        nothing = np.full(tables.size + 1, np.inf)
        nothing[tables.size] = 0.0
        found = tables.behind["end"] = Behind(
            least=nothing,
            round=nothing,
            largest=nothing,
            summed=nothing,
            unhidden=nothing,
        )
    assert isinstance(found, Behind)
    return found


def find_behind(
    tables: Tables, shape: Shape, stage: StageTable, sums: Sums, after: Behind, puts_off: bool
) -> Behind:
    """`puts_off`: whether any stage of the chain does; all arguments are kept by the tables."""
    key = id(stage), id(sums), id(after), puts_off
    found = tables.behind.get(key)
    if found is None:
        found = tables.behind[key] = _make(tables, shape, stage, sums, after, puts_off)
    assert isinstance(found, Behind)
    return found


def _make(
    tables: Tables, shape: Shape, stage: StageTable, sums: Sums, after: Behind, puts_off: bool
) -> Behind:
    upstream = stage.way_down if puts_off else stage.way
    unhidden = _find_unhidden(tables, shape, stage, sums)
    done = np.maximum(stage.work + unhidden, stage.way_down + after.summed)
    beyond = _find_beyond(stage, after, slice(None))
    return Behind(
        least=np.maximum(stage.work, upstream + after.least).min(axis=1),
        round=(stage.way + after.round).min(axis=1),
        largest=np.maximum(beyond, after.largest).min(axis=1),
        summed=done.min(axis=1),
        unhidden=unhidden,
        stage=stage,
        after=after,
    )


def _find_unhidden(tables: Tables, shape: Shape, stage: StageTable, sums: Sums) -> Array:
    took = sums[0]
    if not tables.training.overlap_reduction:
        return took
    key = id(stage), id(sums)
    if key not in tables.behind:
        buckets = tables.find_buckets(shape)
        last = np.maximum(stage.kinds[3], stage.kinds[5]) if stage.puts_off else stage.kinds[3]
        hidden = last * (1 - 1 / buckets)
        # With the stage, so that nothing else gets its id as long as the key is there.
        tables.behind[key] = np.maximum(took / buckets, took - hidden), stage
    return tables.behind[key][0]
