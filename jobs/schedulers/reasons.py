"""A scheduler's reasons for pending jobs, and their remedies.

Up to Slurm 22.05, and wherever EnforcePartLimits is off, sbatch accepts jobs that can never start.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from varuna_core.facts.catalogue.known_line import Fate, KnownLine, Scope
from varuna_core.facts.remedy import Context
from vjob.jobs.known_lines import load_catalogue
from vjob.jobs.schedulers.job import JobState, SchedulerJob

NO_OUTPUT = 53
"""The signal number by which slurmd reports that it could not create an output file."""


@cache
def find_reason(reason: str) -> KnownLine | None:
    """Return the catalogue's row for a reason of squeue or scontrol; None for an unknown reason."""
    return load_catalogue().match(Scope.PENDING, reason)


def is_permanent(info: SchedulerJob) -> bool:
    """Return True for a pending job that will never start as it was submitted."""
    row = find_reason(info.reason_text)
    return info.state is JobState.PENDING and row is not None and row.fate is Fate.NEVER


def is_provisional(info: SchedulerJob) -> bool:
    """Return True for a pending job whose reason is not given yet, or may become more exact."""
    row = find_reason(info.reason_text)
    return info.state is JobState.PENDING and (
        not info.reason_text or (row is not None and row.is_provisional)
    )


def explain_reason(infos: Sequence[SchedulerJob]) -> str:
    """Return a sentence about the first of these jobs that will never start by itself; empty if
    there is none."""
    for info in infos:
        row = find_reason(info.reason_text)
        if row is not None and is_permanent(info):
            why = row.explain(Context.CONF, info.id)
            return f"job {info.id} will not start: {info.reason_text}; {why}"
    return ""
