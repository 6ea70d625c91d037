"""Resolve the runs that must end before a run starts to job ids of its scheduler.

A run that is over needs no dependency and gets none: Slurm forgets old jobs, and refuses
dependencies on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records import record as records
from varuna_core.records.logs.tail import fold
from varuna_core.records.plan import read_plan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError
from vjob.jobs.runs.find import RunView, find_run, is_over, view_runs
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.job import After, JobState


@dataclass(frozen=True, kw_only=True)
class AfterRuns:
    """Runs that another run waits for."""

    succeeded: tuple[RunFolder, ...] = ()
    """Runs that must succeed; if one does not, the waiting run is cancelled."""
    ended: tuple[RunFolder, ...] = ()
    """Runs that must end, in any way."""

    @property
    def runs(self) -> tuple[RunFolder, ...]:
        return (*self.succeeded, *self.ended)


NO_RUNS = AfterRuns()


def find_after(after: Sequence[str], after_any: Sequence[str], here: Path) -> AfterRuns:
    """Return the runs named by JOB words; raise InputError for a word that names none."""
    return AfterRuns(
        succeeded=tuple(find_run(job, here) for job in after),
        ended=tuple(find_run(job, here) for job in after_any),
    )


def resolve_after(after: AfterRuns, scheduler: str) -> After:
    """Return the jobs that a run of this scheduler must wait for; raise InputError with all
    problems.

    Each scheduler is asked once, and runs that have ended are recorded.
    """
    runs = after.runs
    views = {str(view.run.path): view for view in (view_runs(runs) if runs else ())}
    problems: list[str] = []
    succeeded: list[str] = []
    ended: list[str] = []
    for run in runs:
        must_succeed = run in after.succeeded
        view = views.get(str(run.path))
        problem = _explain_problem(run, view, scheduler, must_succeed=must_succeed)
        if problem:
            problems.append(problem)
        elif view is not None and not is_over(view):
            jobs = [job.id for job in view.record.jobs]
            if must_succeed:
                succeeded += jobs[:1] if _may_lose_jobs(run) else jobs
            else:
                ended += jobs
    if problems:
        raise InputError("\n  ".join(["nothing was submitted:", *problems]))
    return After(succeeded=tuple(dict.fromkeys(succeeded)), ended=tuple(dict.fromkeys(ended)))


def _explain_problem(
    run: RunFolder, view: RunView | None, scheduler: str, *, must_succeed: bool
) -> str:
    """Return why a run cannot be waited for; empty if it can."""
    if view is None:
        return f"{run.path} holds no readable record.json; is it a run folder of vjob?"
    if view.record.state == records.INTENT:
        return (
            f"{run.name} is being submitted, and its job is not known yet; `vjob list` shows when "
            "it is, then submit again"
        )
    if is_over(view):
        if not must_succeed or view.state == JobState.COMPLETED.value:
            return ""
        why = fold(view.record.message)
        how = "was refused" if view.record.state == records.REFUSED else f"has ended {view.state}"
        return (
            f"{run.name} {how}{f': {why}' if why else ''}; a run --after it would never start; "
            "use --after-any to start anyway"
        )
    theirs, ours = map(schedulers.get_scheduler, (view.record.scheduler, scheduler))
    if not ours.can_wait_for(theirs):
        return (
            f"{run.name} is a run of {theirs.title}, but this one would be of {ours.title}: "
            "they cannot wait for each other; set the same cluster.scheduler, or submit when "
            "it has ended"
        )
    return ""


def _may_lose_jobs(run: RunFolder) -> bool:
    """Return True for a run that may morph, of which only the first job tells how it ended."""
    plan = read_plan(run.plan)
    return plan is not None and bool(plan.morph)
