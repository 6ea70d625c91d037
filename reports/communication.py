"""Communication of one step: how much of it the work hid, and how much held up the ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from reports.pipeline import Pipeline, list_waits
from varuna_core.records.trace import COMMUNICATION, COMPUTE


def measure_communication(events: pd.DataFrame, pipelines: list[Pipeline]) -> pd.DataFrame:
    """A row a rank: work_s; bubble_s, its waits for messages not yet made; exposed_s, its waits for
    messages under way and communication beside which it did nothing; overlapped_s, the rest."""
    rows = []
    for rank, own in events.groupby("rank"):
        work = own[own["kind"].isin(COMPUTE)].sort_values("ready_s")
        links = own[own["kind"].isin(COMMUNICATION)]
        took = (links["end_s"] - links["begin_s"]).clip(lower=0).sum()
        hidden = _measure_overlap(work, links)
        stage = int(own["stage"].max())
        rows.append(
            {
                "rank": int(rank),
                "stage": stage,
                "work_s": float((work["end_s"] - work["ready_s"]).sum()),
                "exposed_s": float(took - hidden),
                "overlapped_s": hidden,
            }
        )
    table = pd.DataFrame(rows, columns=["rank", "stage", "work_s", "exposed_s", "overlapped_s"])
    waits = pd.DataFrame(
        [row for pipeline in pipelines for row in list_waits(pipeline)],
        columns=["rank", "stage", "bubble_s", "transfer_s"],
    )
    summed = waits.groupby("rank")[["bubble_s", "transfer_s"]].sum()
    table = table.join(summed, on="rank").fillna({"bubble_s": 0.0, "transfer_s": 0.0})
    table["exposed_s"] += table.pop("transfer_s")
    return table


def _measure_overlap(work: pd.DataFrame, links: pd.DataFrame) -> float:
    """Seconds of communication beside which the rank worked, on one thing at a time."""
    if work.empty or links.empty:
        return 0.0
    begin, end = work["ready_s"].to_numpy(), work["end_s"].to_numpy()
    times = np.column_stack([begin, np.maximum(begin, end)]).ravel()
    times = np.maximum.accumulate(times)
    worked = np.concatenate(
        [[0.0], np.cumsum(np.diff(times) * (np.arange(len(times) - 1) % 2 == 0))]
    )
    until = np.interp(links["end_s"].to_numpy(), times, worked)
    since = np.interp(links["begin_s"].to_numpy(), times, worked)
    return float(np.maximum(until - since, 0).sum())
