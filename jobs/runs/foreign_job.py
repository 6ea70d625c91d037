"""JOB, as a run of vjob or as a job of a scheduler that vjob did not submit."""

from __future__ import annotations

from pathlib import Path

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.find import find_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.foreign_job import ForeignJob


def find_run_or_job(job: str, here: Path) -> RunFolder | ForeignJob:
    """The run that JOB names, else the job of that id; InputError where it is neither."""
    try:
        return find_run(job, here)
    except InputError:
        found = find_foreign_job(job)
        if found is None:
            raise
        return found


def find_foreign_job(word: str) -> ForeignJob | None:
    """The job by its id; None where no scheduler knows it, or answers."""
    for scheduler in schedulers.list_with_queue():
        try:
            found = scheduler.ask_foreign_job(word)
        except VjobError:
            continue
        if found is not None:
            return found
    return None


def ask_again(job: ForeignJob) -> ForeignJob | None:
    """The job as it is now; UncertainError where its scheduler does not answer."""
    return schedulers.get_scheduler(job.scheduler).ask_foreign_job(job.word)
