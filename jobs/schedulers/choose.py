"""Choice of the scheduler of a run, by its name in the plan.

Callers import this module, not the function: a test then replaces the executor in one place.
"""

from __future__ import annotations

from vjob.jobs.schedulers.base import Executor


def choose_executor(scheduler: str) -> Executor:
    """Executor by its name in the plan; imports no other."""
    if scheduler in ("local", "ssh"):  # ssh: the batch script runs here, agents on the machines
        from vjob.jobs.schedulers.local import LocalExecutor

        return LocalExecutor()
    from vjob.jobs.schedulers.slurm import SlurmExecutor

    return SlurmExecutor()
