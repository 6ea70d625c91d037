"""Find JOB as a run of vjob, or as a scheduler's job that vjob did not submit."""

from __future__ import annotations

from pathlib import Path

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.runs.find import find_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.foreign_job import ForeignJob


def find_run_or_job(job: str, here: Path) -> RunFolder | ForeignJob:
    """Return the run that JOB names, or else the job with that id; InputError if neither."""
    try:
        return find_run(job, here)
    except InputError:
        found = find_foreign_job(job)
        if found is None:
            raise
        return found


def find_foreign_job(word: str) -> ForeignJob | None:
    """Return the job with this id; None if no scheduler knows it, or none answers."""
    for scheduler in schedulers.list_with_queue():
        try:
            found = scheduler.ask_foreign_job(word)
        except VjobError:
            continue
        if found is not None:
            return found
    return None


def ask_again(job: ForeignJob) -> ForeignJob | None:
    """Return the job's present state; raise UncertainError if its scheduler does not answer."""
    return schedulers.get_scheduler(job.scheduler).ask_foreign_job(job.word)
