"""Compare the work of stages and of ranks: suggest a more even partition, and find slow ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from varuna_core.facts.partition import Partition
from varuna_core.records.logs.slow_ranks import (
    NOTABLE,
    PERSISTENT,
    RECENT_STEPS,
    WARM_UP_STEPS,
    Rung,
)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A partition that would make the slowest stage faster than the present one."""

    partition: Partition
    slowest_now_s: float
    slowest_then_s: float
    """Seconds of the slowest stage under the suggestion, without messages and bubbles."""

    def __str__(self) -> str:
        return self.partition.spell()

    @property
    def gain(self) -> float:
        """The fraction of the slowest stage's time that the suggestion saves."""
        return 1 - self.slowest_then_s / self.slowest_now_s if self.slowest_now_s else 0.0


def suggest_partition(
    partition: Sequence[int], work_s: Sequence[float], head: float | None
) -> Suggestion | None:
    """Return the partition of a model of like layers with the fastest slowest stage; None if the
    present one is best, or too little is known.

    `head` is the work of the last stage besides its layers, as a number of layers. If it is None,
    the first and the last stage keep their layers, for what these take alone is not known; a layer
    more takes there at most the present mean.

    A layer is taken to cost on each stage what it costs there now, so a stage on slower GPUs takes
    longer; a stage without layers gets none. The first and the last stage keep at least one layer
    if they have one now: that layer may be the part of the model that only they can hold, so a conf
    with the suggestion stays valid however its layers are counted.
    """
    if len(partition) != len(work_s) or not 0 < sum(partition) < 10_000 or min(work_s) < 0:
        return None
    last = len(partition) - 1
    heads = [0.0] * last + [head or 0.0]
    counts = [0] * len(partition)
    for end in {0, last}:
        counts[end] = partition[end] if head is None else min(1, partition[end])

    def compute_work(at: int, layers: int) -> float:
        return work_s[at] * (layers + heads[at]) / (partition[at] + heads[at])

    with_layers = [at for at, layers in enumerate(partition) if layers]
    for _ in range(sum(partition) - sum(counts)):
        best = min(with_layers, key=lambda at: (compute_work(at, counts[at] + 1), at))
        counts[best] += 1
    then = max(
        compute_work(at, counts[at]) if at in with_layers else work
        for at, work in enumerate(work_s)
    )
    now = max(work_s)
    if not now or then >= now * 0.999:
        return None
    return Suggestion(partition=Partition(counts), slowest_now_s=now, slowest_then_s=then)


@dataclass(frozen=True, kw_only=True)
class StagePaces:
    """Work of the stages over all recorded steps of an attempt but its first."""

    num_steps: int
    work_s: tuple[float, ...]
    """Median work of each stage: the mean over its ranks, slow ranks excluded."""
    stage: int
    """The stage of `rank`."""
    rank: int
    """The rank with the longest median work."""
    rank_s: tuple[float, float, float]
    """The lower quartile, the median and the upper quartile of that rank's work."""
    num_longest: int
    """Number of steps in which a rank of that stage worked longest."""

    @property
    def is_known(self) -> bool:
        """True if the stage works longest in so many more than half of the steps that chance does
        not explain it: two standard deviations of a fair coin tossed once for each step."""
        least = self.num_steps / 2 + self.num_steps**0.5
        return self.num_steps >= LEAST_PACED and self.num_longest >= min(self.num_steps, least)


LEAST_PACED = 3
"""The number of steps needed to name the stage that sets the pace."""


def measure_stage_paces(works: pd.DataFrame, slow: Collection[int]) -> StagePaces | None:
    """Measure how long each stage works in a step, as the median over an attempt's steps. Return
    None if no step has the work of all ranks.

    `works` has the columns step, stage, rank and work_s; `slow` are the ranks that are slower than
    the other ranks of their stages.
    """
    table = works.pivot_table(index="step", columns=["stage", "rank"], values="work_s")
    table = (table.iloc[1:] if len(table) > 1 else table).dropna()
    stages = table.columns.get_level_values("stage")
    if table.empty or not table.to_numpy().any():
        return None
    medians = table.median()
    is_slow = table.columns.get_level_values("rank").isin(list(slow))
    by_stage = medians[~is_slow].groupby("stage").mean()
    by_stage = by_stage.combine_first(medians.groupby("stage").mean())
    by_stage = by_stage.reindex(range(int(by_stage.index.max()) + 1), fill_value=0.0)
    stage, rank = medians.idxmax()
    longest = stages[table.to_numpy().argmax(axis=1)]
    low, middle, high = np.quantile(table[stage, rank], (0.25, 0.5, 0.75))
    return StagePaces(
        num_steps=len(table),
        work_s=tuple(map(float, by_stage)),
        stage=int(stage),
        rank=int(rank),
        rank_s=(float(low), float(middle), float(high)),
        num_longest=int((longest == stage).sum()),
    )


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is slower than its peers."""

    attempt: str
    rank: int
    stage: int
    host: str
    ratio: float
    """The rank's work divided by the median work of its peers, in the median step."""
    share_of_steps: float
    """The fraction of the steps in which the rank was slower than the rule of `slow_ranks` that
    found it allows."""
    num_steps: int = 0
    """Length in steps of the stretch in which the rank was slow; 0 means the whole attempt."""
    num_peers: int
    device: str = ""
    """Kind of device of the rank and its peers; empty if not known."""


def find_stragglers(steps: pd.DataFrame, ranks: pd.DataFrame) -> list[Straggler]:
    """Return the slow ranks, slowest first. `ranks` has attempt, rank, stage, host and device.

    A rank's peers are the other ranks of its attempt with the same stage and device.
    """
    if steps.empty or ranks.empty:
        return []
    found = []
    columns = ["attempt", "rank", "host", "device"]
    work = steps[["attempt", "rank", "stage", "step", "work_s"]].merge(
        ranks[columns].drop_duplicates(["attempt", "rank"]), on=["attempt", "rank"]
    )
    for (attempt, stage, device), group in work.groupby(["attempt", "stage", "device"]):
        table = group.pivot(index="step", columns="rank", values="work_s")
        if table.shape[1] < 2:
            continue
        table = table.iloc[1:] if len(table) > 2 else table  # the first step warms up
        hosts = group.drop_duplicates("rank").set_index("rank")["host"]
        work_s = table.to_numpy(dtype=float)
        peers_s = compute_medians_of_others(work_s)
        known = (peers_s > 0) & ~np.isnan(work_s)
        ratios_of = np.divide(work_s, peers_s, out=np.full_like(work_s, np.nan), where=known)
        for rank, column in zip(table.columns, ratios_of.T, strict=True):
            ratios = column[~np.isnan(column)]
            num_steps, rung = 0, NOTABLE
            if not _holds(rung, ratios):
                ratios, rung = compute_slow_stretch(ratios), PERSISTENT
                num_steps = len(ratios)
            if len(ratios):
                found.append(
                    Straggler(
                        attempt=str(attempt),
                        rank=int(rank),
                        stage=int(stage),
                        host=str(hosts[rank]),
                        ratio=float(np.median(ratios)),
                        share_of_steps=float((ratios > rung.times).mean()),
                        num_steps=num_steps,
                        num_peers=table.shape[1] - 1,
                        device=str(device),
                    )
                )
    return sorted(found, key=lambda straggler: -straggler.ratio)


def _holds(rung: Rung, ratios: npt.NDArray[np.float64]) -> bool:
    return bool(
        len(ratios) >= rung.num_steps
        and np.median(ratios) > rung.times
        and (ratios > rung.times).mean() >= rung.share
    )


def compute_slow_stretch(ratios: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ratios of the worst consecutive steps in which a rank was slow by the rule
    PERSISTENT; empty if there are none.

    The stretch is as long as the window of the live monitor: 60 steps, or fewer after the warm-up.
    """
    slow = ratios > PERSISTENT.times
    if slow.sum() < PERSISTENT.share * PERSISTENT.num_steps:
        return ratios[:0]
    sums = np.concatenate([[0], np.cumsum(slow)])
    starts, ends = [], []
    for first in (0, WARM_UP_STEPS - 1):  # the first step is left out already
        early = np.arange(first + PERSISTENT.num_steps, min(first + RECENT_STEPS, len(ratios)) + 1)
        ends.append(early)
        starts.append(np.full_like(early, first))
    later = np.arange(RECENT_STEPS, len(ratios) + 1)
    ends.append(later)
    starts.append(later - RECENT_STEPS)
    start, end = np.concatenate(starts), np.concatenate(ends)
    shares = (sums[end] - sums[start]) / (end - start)
    if not len(shares) or shares.max() < PERSISTENT.share:
        return ratios[:0]
    worst = int(shares.argmax())
    return ratios[start[worst] : end[worst]]


def compute_medians_of_others(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return, for each number, the median of the other numbers in its row, ignoring NaN.

    Each row is sorted once: leaving out one number moves the middle by at most one position.
    """
    order = np.argsort(values, axis=1)  # NaN comes last
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(values.shape[1])[None, :], axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    others = (~np.isnan(values)).sum(axis=1, keepdims=True) - ~np.isnan(values)

    def pick(place: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        shifted = np.where(places > place, place, place + 1)
        return np.take_along_axis(ordered, np.clip(shifted, 0, values.shape[1] - 1), axis=1)

    middles = (pick((others - 1) // 2) + pick(others // 2)) / 2
    return np.where(others > 0, middles, np.nan)
