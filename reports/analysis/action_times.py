"""Measured times of a run's actions and messages, to which a profile is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from varuna_core.records.logs.trace import ACTIONS
from vjob.reports.load.tables import load_job

SEES_WAIT_S = 2e-5
"""A receiver that waited less may have come later than its message."""
MOST_EVENTS = 300_000


@dataclass(frozen=True)
class ActionTime:
    """The median of one rank's actions of one kind."""

    rank: int
    stage: int
    kind: str
    seconds: float


@dataclass(frozen=True)
class MessageTime:
    """The median between two ranks: from a sender's end to the begin of who waited for it."""

    sender: int
    receiver: int
    stage: int
    """The sender's."""
    is_forward: bool
    seconds: float


def read_times(folder: Path, tensor: int) -> tuple[list[ActionTime], list[MessageTime]]:
    """Of the last attempt, without its first step, which warms up. SourceError without files."""
    events = load_job(folder, more_events=MOST_EVENTS).events
    if events.empty:
        return [], []
    events = events[events["attempt"] == events["attempt"].iloc[-1]]
    later = events[events["step"] > events["step"].min()]
    events = events if later.empty else later
    return list_actions(events), list_messages(events, tensor)


def list_actions(events: pd.DataFrame) -> list[ActionTime]:
    actions = events[events["kind"].isin(ACTIONS)]
    took = (actions["end_s"] - actions["ready_s"]).groupby(
        [actions["rank"], actions["stage"], actions["kind"]], observed=True
    )
    return [
        ActionTime(int(rank), int(stage), str(kind), float(seconds))
        for (rank, stage, kind), seconds in took.median().items()
        if seconds > 0
    ]


def list_messages(events: pd.DataFrame, tensor: int) -> list[MessageTime]:
    found = []
    keys = ["replica", "part", "step", "microbatch"]
    for kinds, way in ((["F", "f"], 1), (["B", "I"], -1)):
        own = events[events["kind"].isin(kinds)]
        own = own.assign(part=own["rank"] % tensor, source=own["stage"] - way)
        pairs = own.merge(
            own[[*keys, "stage", "rank", "end_s"]],
            left_on=[*keys, "source"],
            right_on=[*keys, "stage"],
            suffixes=("", "_sent"),
        )
        took = pairs["ready_s"] - pairs["end_s_sent"]
        seen = (pairs["ready_s"] - pairs["begin_s"] > SEES_WAIT_S) & (took > 0)
        names = ["rank_sent", "rank", "stage_sent"]
        grouped = took[seen].groupby([pairs.loc[seen, name] for name in names])
        found += [
            MessageTime(int(sender), int(receiver), int(stage), way == 1, float(seconds))
            for (sender, receiver, stage), seconds in grouped.median().items()
        ]
    return found
