"""Choice of the scheduler of a run, by its name in the plan.

Callers import this module, not the function: a test then replaces the scheduler in one place.
"""

from __future__ import annotations

from importlib import import_module

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers.base import Scheduler

BUILT_IN = {
    "slurm": "vjob.jobs.schedulers.slurm.scheduler:SlurmScheduler",
    "local": "vjob.jobs.schedulers.local.scheduler:LocalScheduler",
    "ssh": "vjob.jobs.schedulers.local.scheduler:LocalScheduler",
}
"""Schedulers by their names in the plan. With `ssh`, a list of machines, the batch script runs
here and its agents on the machines."""
ON_THIS_MACHINE = ("local", "ssh")


def get_scheduler(scheduler: str, run: RunFolder | None = None) -> Scheduler:
    """The scheduler with this name in the plan, for the jobs of a run; imports no other."""
    if scheduler not in BUILT_IN:
        raise InputError(
            f"{scheduler!r} is not a scheduler that vjob knows here: there are "
            f"{', '.join(sorted(BUILT_IN))}"
        )
    module, _, name = BUILT_IN[scheduler].partition(":")
    made: Scheduler = getattr(import_module(module), name)(run)
    return made
