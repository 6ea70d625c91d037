"""Useful step time over wall time, and where the rest went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the ranks on the wall clock; seconds since 1970, None where nothing tells."""

    label: str
    started: float | None
    ended: float | None
    first_step: int | None
    last_step: int | None
    steps_s: float
    repeated_s: float
    """Steps that a later attempt did again."""
    outcome: str

    @property
    def lost_s(self) -> float | None:
        """What was no useful step: starting, waiting, ending, and steps done again."""
        if self.started is None or self.ended is None:
            return None
        return max(0.0, self.ended - self.started - self.steps_s + self.repeated_s)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """A job from the start of its first attempt to the end of its last."""

    attempts: tuple[Attempt, ...]
    wall_s: float | None
    useful_s: float
    between_s: float
    """Between an attempt's end and the next one's start."""

    @property
    def share(self) -> float | None:
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s else None


def measure_goodput(
    times: pd.DataFrame,
    zero_s: float,
    exits: pd.DataFrame,
    history: Sequence[Mapping[str, Any]],
    outcomes: Mapping[str, str],
    labels: Sequence[str],
) -> Goodput:
    """`times` as of build_step_times, its `begin_s` counted from `zero_s`; `labels` in order."""
    order = {label: at for at, label in enumerate(labels)}
    steps = times.assign(order=times["attempt"].map(order)).sort_values(["step", "order"])
    steps["all_s"] = _count_once(steps)
    steps["again"] = steps.duplicated("step", keep="last")
    attempts = []
    for label in labels:
        own = steps[steps["attempt"] == label]
        spans = exits[exits["attempt"] == label] if not exits.empty else exits
        begins = _list_numbers(spans, "started")
        ends = _list_numbers(spans, "ended")
        began = own["begin_s"].dropna()
        if len(began):
            begins.append(zero_s + float(began.min()))
            ends.append(zero_s + float((own["begin_s"] + own["took_s"]).max()))
        begins += _find_start(history, label, labels)
        attempts.append(
            Attempt(
                label=label,
                started=min(begins, default=None),
                ended=max(ends, default=None),
                first_step=int(own["step"].min()) if len(own) else None,
                last_step=int(own["step"].max()) if len(own) else None,
                steps_s=float(own["all_s"].sum()),
                repeated_s=float(own.loc[own["again"], "all_s"].sum()),
                outcome=outcomes.get(label, ""),
            )
        )
    known = [item for item in attempts if item.started is not None and item.ended is not None]
    starts = [item.started for item in known if item.started is not None]
    stops = [item.ended for item in known if item.ended is not None]
    between = sum(max(0.0, start - stop) for start, stop in zip(starts[1:], stops, strict=False))
    return Goodput(
        attempts=tuple(attempts),
        wall_s=max(stops) - min(starts) if known else None,
        useful_s=sum(item.steps_s - item.repeated_s for item in attempts),
        between_s=between,
    )


def _count_once(steps: pd.DataFrame) -> pd.Series[float]:
    """Seconds of each row; the first stage begins a step while the last one ends that before."""
    all_s = steps["took_s"] * steps["count"]
    until_next = -steps.groupby("attempt")["begin_s"].diff(-1)
    is_cut = (steps["count"] == 1) & (until_next > 0) & (until_next < all_s)
    return all_s.mask(is_cut, until_next)


def _list_numbers(table: pd.DataFrame, name: str) -> list[float]:
    numbers = pd.to_numeric(table[name], errors="coerce").dropna() if len(table) else []
    return [float(number) for number in numbers]


def _find_start(
    history: Sequence[Mapping[str, Any]], label: str, labels: Sequence[str]
) -> list[float]:
    """When the batch script began this try of the attempt, if it said so: at most one time."""
    number, _, earlier = label.partition(".earlier-")
    times = sorted(
        float(event["time"])
        for event in history
        if event.get("kind") == "started" and str(event.get("attempt", "")) == number
    )
    if earlier:
        return times[int(earlier) : int(earlier) + 1]
    was_tried = any(other.startswith(f"{number}.earlier-") for other in labels)
    return times[-1:] if was_tried else times[:1]
