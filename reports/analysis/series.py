"""Step times in their order, and the steps that stand out."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

FAR = 6.0
"""A step stands out beyond so many deviations (median absolute, scaled to a normal one's)..."""
MUCH = 1.1
"""...and beyond so many times the median."""
_MAD = 1.4826


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A step that took much longer than the others."""

    attempt: str
    step: int
    took_s: float
    median_s: float
    rank: int | None
    """The rank that was busy longest in it, where a trace says so."""
    kind: str
    """What of its work grew most: a kind of the trace, `wait`, or empty."""


def build_step_times(steps: pd.DataFrame, iterations: pd.DataFrame) -> pd.DataFrame:
    """attempt, step, begin_s, took_s, count: from the traces, else from the log.

    The log gives a mean over the steps since the line before: one row for those `count`, at the
    last. How many the first line is about is taken from the second.
    """
    columns = ["attempt", "step", "begin_s", "took_s", "count"]
    if not steps.empty:
        grouped = steps.groupby(["attempt", "step"], sort=False)
        table = grouped.agg(begin_s=("begin_s", "min"), took_s=("took_s", "max")).reset_index()
        table["count"] = 1
        return table.sort_values("begin_s", kind="stable")[columns].reset_index(drop=True)
    if iterations.empty:
        return pd.DataFrame(columns=columns)
    table = iterations.dropna(subset=["time_ms"]).drop_duplicates(["attempt", "step"])
    table = table.assign(took_s=table["time_ms"] / 1000, begin_s=float("nan"))
    since = table.groupby("attempt")["step"].diff()
    table["count"] = since.fillna(since.groupby(table["attempt"]).shift(-1)).clip(lower=1)
    table["count"] = table["count"].fillna(1).clip(upper=table["step"].clip(lower=1))
    return table[columns].reset_index(drop=True)


def drop_first(times: pd.DataFrame) -> pd.DataFrame:
    """Without each attempt's first step, which warms up, unless nothing else is there."""
    later = times[times.duplicated("attempt")]
    return later if len(later) else times


def find_outliers(times: pd.DataFrame, steps: pd.DataFrame, most: int = 10) -> list[Outlier]:
    """The slowest first; an attempt's first step, which warms up, is none."""
    later = times[times.duplicated("attempt")]
    if len(later) < 5:
        return []
    median = float(later["took_s"].median())
    deviation = float((later["took_s"] - median).abs().median()) * _MAD
    bound = max(median + FAR * deviation, median * MUCH)
    slow = later[later["took_s"] > bound].nlargest(most, "took_s")
    found = []
    for attempt, step, took in slow[["attempt", "step", "took_s"]].itertuples(index=False):
        rank, kind = _find_cause(steps, attempt, step)
        found.append(
            Outlier(
                attempt=attempt, step=int(step), took_s=took, median_s=median, rank=rank, kind=kind
            )
        )
    return found


def _find_cause(steps: pd.DataFrame, attempt: str, step: int) -> tuple[int | None, str]:
    """Whose work of which kind grew most against its own median."""
    if steps.empty:
        return None, ""
    kinds = [name for name in steps.columns if name.endswith("_s") and name not in _SUMS]
    own = steps[steps["attempt"] == attempt]
    usual = own.groupby("rank")[kinds].median()
    then = own[own["step"] == step].set_index("rank")[kinds]
    grown = (then - usual.loc[then.index]).stack()
    if grown.empty or grown.max() <= 0:
        return None, ""
    rank, name = grown.idxmax()
    return int(rank), str(name)[:-2]


_SUMS = ("begin_s", "took_s", "first_s", "last_s", "wait_s", "work_s")


def measure_bubbles(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a step: attempt, step, makespan_s and bubble_share, the mean over the replicas."""
    known = steps.dropna(subset=["first_s", "last_s"]) if not steps.empty else steps
    if known.empty:
        return pd.DataFrame(columns=["attempt", "step", "makespan_s", "bubble_share"])
    table = known.groupby(["attempt", "step", "replica"]).agg(
        first=("first_s", "min"),
        last=("last_s", "max"),
        work=("work_s", "sum"),
        ranks=("rank", "nunique"),
    )
    table["makespan_s"] = table["last"] - table["first"]
    table["bubble_share"] = 1 - table["work"] / (table["makespan_s"] * table["ranks"])
    means = table.groupby(["attempt", "step"])[["makespan_s", "bubble_share"]].mean()
    return means.dropna().reset_index()
