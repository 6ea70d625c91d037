"""Submit many runs of one conf: as a Slurm array if possible, else as one job each.

    one conf, many fills ─► run folders name-0, name-1, ... ─► array.sh ─► sbatch --array
                                                            └► batch.sh ─► sbatch, one by one

A het job or a run that may morph cannot be an array element, and this machine has no arrays. Such
runs are separate jobs, of which at most a given number run at once.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.facts.cause import Actor
from varuna_core.records import record as records
from varuna_core.records.files import PRIVATE_FOLDER, write_atomic
from varuna_core.records.record import (
    ArrayPlace,
    JobLimits,
    JobRecord,
    RunRecord,
    append_event,
    read_record,
    write_record,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.base import Submission
from vjob.jobs.schedulers.job import After
from vjob.jobs.submit.chain import NO_RUNS, AfterRuns, resolve_after
from vjob.jobs.submit.scripts import ArrayShape, render_array
from vjob.jobs.submit.submit import (
    Fill,
    Prepared,
    cancel_submitted,
    explain_write,
    move,
    prepare,
    record_submitted,
    submit_jobs,
    write_run,
)

if TYPE_CHECKING:
    from vjob.jobs.schedulers.script_executor import ScriptExecutor

log = logging.getLogger(__name__)


def submit_array(
    resolved: Resolved,
    fills: Sequence[Fill],
    *,
    at_most: int,
    executor: ScriptExecutor,
    after: AfterRuns = NO_RUNS,
) -> list[RunFolder]:
    """Submit one run for each function in `fills`, which writes further files of that run: all runs
    or none. At most `at_most` runs run at once."""
    ready = prepare(resolved)
    waits = resolve_after(after, ready.plan.scheduler)
    obstacle = find_obstacle(ready)
    name, runs = make_folders(ready.run.path, len(fills))
    written = []
    try:
        for number, (run, fill) in enumerate(zip(runs, fills, strict=True)):
            place = None if obstacle else ArrayPlace(name=name, index=number)
            written.append(write_run(move(ready, run), run, fill, after, place))
    except BaseException:
        for run in runs:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    if not obstacle:
        first = move(ready, runs[0])
        script = runs[0].path / "array.sh"
        shape = ArrayShape(name=name, size=len(runs), at_most=at_most)
        write_atomic(script, render_array(first.conf, first.plan, runs[0], shape, first.plan.name))
        try:
            submit_elements(runs, written, script, waits, executor)
        except UncertainError:
            raise
        except VjobError as error:
            refuse_elements(runs, written, error)
            raise VjobError(f"{error}\n  The script is {script}") from None
    else:
        log.warning(
            "%s: submitted as %d jobs of their own, at most %d at once",
            obstacle, len(runs), at_most,
        )  # fmt: skip
        submit_one_by_one(runs, written, list(ready.scripts.batch), at_most, waits, executor)
    return runs


def find_obstacle(ready: Prepared) -> str:
    """Return why these runs cannot be one array; empty if they can."""
    scheduler = schedulers.get_scheduler(ready.plan.scheduler)
    if not scheduler.can.arrays:
        return f"{scheduler.title} has no job arrays"
    if ready.plan.layout != "single":
        return f"{scheduler.title} has no arrays of het jobs"
    if ready.plan.morph:
        return "a run that may change its nodes (morph) cannot be a job array task"
    return ""


def make_folders(path: Path, count: int) -> tuple[str, list[RunFolder]]:
    """Make new folders path-0, path-1, ...; return their common prefix, and the folders."""
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        for number in range(1000):
            base = path if number == 0 else path.with_name(f"{path.name}-{number}")
            made: list[RunFolder] = []
            try:
                for element in range(count):
                    folder = base.with_name(f"{base.name}-{element}")
                    folder.mkdir(mode=PRIVATE_FOLDER)
                    made.append(RunFolder(folder))
                return base.name, made
            except FileExistsError:
                for run in made:
                    run.path.rmdir()
        raise OSError(errno.EEXIST, "all names for an array of this second are taken")
    except OSError as error:
        raise VjobError(explain_write(path.parent, error)) from None


def submit_elements(
    runs: Sequence[RunFolder],
    written: Sequence[RunRecord],
    script: Path,
    after: After,
    executor: ScriptExecutor,
) -> list[RunRecord]:
    """Submit the array. After UncertainError the records say intent, and the next command looks for
    the jobs. After a refusal no record has changed."""
    limits = written[0].limits or JobLimits()
    submission = Submission(run=runs[0], array=script, after=after, limits=limits)
    done = []
    with defer_interrupts():
        job = executor.submit_script(submission, written[0].scheduler)
        for run, record in zip(runs, written, strict=True):
            assert record.array is not None, "a record of an element"
            element = JobRecord(id=f"{job}_{record.array.index}", group=None)
            done.append(record_submitted(run, replace(record, jobs=(element,))))
            with suppress(OSError):  # logged when the run was added
                index.add_job(run, element.id)
    return done


def refuse_elements(
    runs: Sequence[RunFolder], written: Sequence[RunRecord], error: VjobError
) -> None:
    for run, record in zip(runs, written, strict=True):
        write_record(run, records.refuse(record, str(error)))
        append_event(run.vjob_events, "refused", message=str(error))


def submit_one_by_one(
    runs: Sequence[RunFolder],
    written: Sequence[RunRecord],
    groups: Sequence[str | None],
    at_most: int,
    after: After,
    executor: ScriptExecutor,
) -> None:
    """Submit runs one after another; if one is refused, or at Ctrl-C, cancel the runs submitted
    before."""
    done: list[RunRecord] = []
    try:
        for number, (run, record) in enumerate(zip(runs, written, strict=True)):
            before = done[number - at_most].jobs if number >= at_most else ()
            waits = replace(after, ended=(*after.ended, *(job.id for job in before)))
            done.append(submit_jobs(run, record, groups, waits, executor))
    except BaseException as error:
        scheduler = schedulers.get_scheduler(written[0].scheduler)
        for record in done:
            cancel_submitted(scheduler, record)
        message = str(error) or type(error).__name__
        for run, record in list(zip(runs, written, strict=True))[len(done) :]:
            if read_record(run) == record:  # never given to the scheduler
                write_record(run, records.refuse(record, message, actor=Actor.VJOB))
        raise
