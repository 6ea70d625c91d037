"""Reasons of a scheduler for a job that pends, or ended before our script began, and what to do.

Up to 22.05, and wherever EnforcePartLimits is off, sbatch accepts what can never start.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import cache

from varuna_core.facts.catalogue.known_line import Fate, KnownLine, Scope
from varuna_core.facts.cause import EndCause
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


_NO_LAUNCH = (EndCause.LAUNCH_FAILED, EndCause.NO_OUTPUT)


def explain_reason(infos: Sequence[SchedulerJob], context: Context = Context.CONF) -> str:
    """One sentence for a job that will not start by itself; empty for all others."""
    for info in infos:
        row = find_reason(info.reason_text)
        if row is not None and is_permanent(info):
            why = row.explain(context, info.id)
            return f"job {info.id} will not start: {info.reason_text}; {why}"
    return ""


def explain_launch(info: SchedulerJob, context: Context = Context.CONF) -> str:
    """One sentence for a job whose batch script never ran, or was killed; empty for all others."""
    killer = find_killer(info)
    if killer:  # Slurm calls that a launch failure too
        return f"the batch script was ended by {killer}"
    # sacct keeps the reason of its pending, and says it in the exit code alone.
    has_none = (info.code, info.signal) == (0, NO_OUTPUT)
    for reason in (info.reason_text, f"RaisedSignal:{NO_OUTPUT}" if has_none else ""):
        row = find_reason(reason)
        if row is not None and row.cause in _NO_LAUNCH:
            return f"{reason}: {row.explain(context, info.id)}"
    return ""


def find_killer(info: SchedulerJob) -> str:
    """The signal that ended the batch script of a failed job; empty where none did."""
    number = info.signal
    if not number or info.code or info.state is not JobState.FAILED or number == NO_OUTPUT:
        return ""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
