"""Ranks that are slower than those that do the same work on the same kind of GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

SLOWER = 1.1
"""A straggler takes at least so many times what its peers take."""
MOST_OF_THE_STEPS = 0.6
"""In at least this part of the steps."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank."""

    attempt: str
    rank: int
    stage: int
    host: str
    ratio: float
    """Its work against the median of its peers', in the median step."""
    share_of_steps: float
    """In how many steps it was slower than SLOWER times its peers."""
    num_peers: int


def find_stragglers(steps: pd.DataFrame, ranks: pd.DataFrame) -> list[Straggler]:
    """The slowest first. `ranks` has attempt, rank, stage, host and device.

    Peers are the other ranks of an attempt with the same stage and device.
    """
    if steps.empty or ranks.empty:
        return []
    found = []
    columns = ["attempt", "rank", "host", "device"]
    work = steps[["attempt", "rank", "stage", "step", "work_s"]].merge(
        ranks[columns].drop_duplicates(["attempt", "rank"]), on=["attempt", "rank"]
    )
    for (attempt, stage, _), group in work.groupby(["attempt", "stage", "device"]):
        table = group.pivot(index="step", columns="rank", values="work_s")
        if table.shape[1] < 2:
            continue
        table = table.iloc[1:] if len(table) > 2 else table  # the first step warms up
        hosts = group.drop_duplicates("rank").set_index("rank")["host"]
        for rank in table.columns:
            peers = table.drop(columns=rank).median(axis=1)
            ratios = (table[rank] / peers).replace([np.inf, -np.inf], np.nan).dropna()
            if ratios.empty:
                continue
            share = float((ratios > SLOWER).mean())
            if ratios.median() > SLOWER and share >= MOST_OF_THE_STEPS:
                found.append(
                    Straggler(
                        attempt=str(attempt),
                        rank=int(rank),
                        stage=int(stage),
                        host=str(hosts[rank]),
                        ratio=float(ratios.median()),
                        share_of_steps=share,
                        num_peers=table.shape[1] - 1,
                    )
                )
    return sorted(found, key=lambda straggler: -straggler.ratio)
