"""Communication of one step: how much of it the work hid, and how much held up the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from varuna_core.records.logs.trace import COMMUNICATION, COMPUTE
from vjob.reports.analysis.pipeline import Pipeline, list_waits


def measure_communication(events: pd.DataFrame, pipelines: list[Pipeline]) -> pd.DataFrame:
    """A row a rank: work_s; bubble_s, its waits for messages not yet made; exposed_s, its waits for
    messages under way and communication beside which it did nothing; overlapped_s, the rest."""
    ordered = events.sort_values(["rank", "ready_s"], kind="stable")
    is_work = ordered["kind"].isin(COMPUTE).to_numpy()
    is_link = ordered["kind"].isin(COMMUNICATION).to_numpy()
    names = ("begin_s", "ready_s", "end_s")
    times = np.column_stack([ordered[name].to_numpy(dtype=float) for name in names])
    stages = ordered["stage"].to_numpy()
    of_rank = ordered["rank"].to_numpy()
    ranks, starts = np.unique(of_rank, return_index=True)
    most = np.maximum.reduceat(stages, starts) if len(ranks) else stages
    works, links = times[is_work], times[is_link]
    worked = works[:, 2] - works[:, 1]
    took = np.maximum(links[:, 2] - links[:, 0], 0)
    rows = []
    for rank, stage, work_of, links_of in zip(
        ranks.tolist(),
        most.tolist(),
        _cut_by_rank(ranks, of_rank[is_work]),
        _cut_by_rank(ranks, of_rank[is_link]),
        strict=True,
    ):
        hidden = _measure_overlap(works[work_of], links[links_of])
        rows.append(
            {
                "rank": int(rank),
                "stage": int(stage),
                "work_s": float(worked[work_of].sum()),
                "exposed_s": float(took[links_of].sum()) - hidden,
                "overlapped_s": hidden,
            }
        )
    table = pd.DataFrame(rows, columns=["rank", "stage", "work_s", "exposed_s", "overlapped_s"])
    waits = list_waits(pipelines)
    summed = waits.groupby("rank")[["bubble_s", "transfer_s"]].sum()
    table = table.join(summed, on="rank").fillna({"bubble_s": 0.0, "transfer_s": 0.0})
    table["exposed_s"] += table.pop("transfer_s")
    return table


def _cut_by_rank(ranks: npt.NDArray[Any], ordered: npt.NDArray[Any]) -> Iterator[slice]:
    """Where each rank's rows are."""
    starts = np.searchsorted(ordered, ranks).tolist()
    ends = np.searchsorted(ordered, ranks, side="right").tolist()
    return map(slice, starts, ends)


def _measure_overlap(work: npt.NDArray[Any], links: npt.NDArray[Any]) -> float:
    """Seconds of communication beside which the rank worked, on one thing at a time.

    Rows are begin, ready, end; those of work in the order of ready.
    """
    if not len(work) or not len(links):
        return 0.0
    begin, end = work[:, 1], work[:, 2]
    times = np.column_stack([begin, np.maximum(begin, end)]).ravel()
    times = np.maximum.accumulate(times)
    worked = np.concatenate(
        [[0.0], np.cumsum(np.diff(times) * (np.arange(len(times) - 1) % 2 == 0))]
    )
    until, since = (np.interp(links[:, at], times, worked) for at in (2, 0))
    return float(np.maximum(until - since, 0).sum())
