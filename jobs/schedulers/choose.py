"""Choice of the scheduler of a run, by its name in the plan.

Callers import this module, not the function: a test then replaces the scheduler in one place.
"""

from __future__ import annotations

from vjob.jobs.schedulers.base import Scheduler


def get_scheduler(scheduler: str) -> Scheduler:
    """The scheduler with this name in the plan; imports no other."""
    if scheduler in ("local", "ssh"):  # ssh: the batch script runs here, agents on the machines
        from vjob.jobs.schedulers.local import LocalScheduler

        return LocalScheduler()
    from vjob.jobs.schedulers.slurm import SlurmScheduler

    return SlurmScheduler()
