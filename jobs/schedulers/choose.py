"""Choice of the scheduler of a run, by its name in the plan.

Callers import this module, not the function: a test then replaces the scheduler in one place.
"""

from __future__ import annotations

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.schedulers.base import Scheduler

ON_THIS_MACHINE = ("local", "ssh")
"""Of ssh the batch script runs here, agents on the machines."""


def get_scheduler(scheduler: str, run: RunFolder | None = None) -> Scheduler:
    """The scheduler with this name in the plan, for the jobs of a run; imports no other."""
    if scheduler in ON_THIS_MACHINE:
        from vjob.jobs.schedulers.local import LocalScheduler

        return LocalScheduler(run)
    from vjob.jobs.schedulers.slurm import SlurmScheduler

    return SlurmScheduler()
