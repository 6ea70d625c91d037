"""Reasons of a scheduler for a job that pends, and what to do.

Up to 22.05, and wherever EnforcePartLimits is off, sbatch accepts what can never start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from varuna_core.facts.catalogue.known_line import Fate, KnownLine, Scope
from varuna_core.facts.remedy import Context
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.schedulers.job import JobState, SchedulerJob

NO_OUTPUT = 53
"""The signal that slurmd puts in place of an output file that it could not make."""


@cache
def find_reason(reason: str) -> KnownLine | None:
    """The row of a reason as squeue or scontrol writes it; None for one that is not known."""
    return load_catalogue().match(Scope.PENDING, reason)


def is_permanent(info: SchedulerJob) -> bool:
    """True for a job that pends and will not start as it was submitted."""
    row = find_reason(info.reason_text)
    return info.state is JobState.PENDING and row is not None and row.fate is Fate.NEVER


def explain_reason(infos: Sequence[SchedulerJob], context: Context = Context.CONF) -> str:
    """One sentence for a job that will not start by itself; empty for all others."""
    for info in infos:
        row = find_reason(info.reason_text)
        if row is not None and is_permanent(info):
            why = row.explain(context, info.id)
            return f"job {info.id} will not start: {info.reason_text}; {why}"
    return ""
