"""Submit a conf: write its run folder and give it to the scheduler, in an order that loses no job.

    1 run folder   2 conf, plan, scripts, agent   3 record: intent   4 sbatch   5 record: ids

An interruption between 4 and 5 leaves a job whose comment has the run id; the next command adopts
it (`jobs.runs`). Ctrl-C is deferred from 4 to 5.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core import __version__
from varuna_core.agent.gpu.accelerator import GROUP as ACCELERATORS
from varuna_core.agent.setup.known_lines import write_known_lines
from varuna_core.plugins import list_plugins
from varuna_core.records import record as records
from varuna_core.records.files import write_atomic, write_json
from varuna_core.records.machine import start_time
from varuna_core.records.plan import Plan, escape_placeholders, write_plan
from varuna_core.records.record import (
    ArrayPlace,
    JobLimits,
    JobRecord,
    RunRecord,
    append_event,
    read_record,
    write_record,
)
from varuna_core.records.runfolder import RunFolder, make_run_folder
from vjob.jobs.conf.references import fill_references
from vjob.jobs.conf.schema import BUILT_IN, FUNCTION, JobConf
from vjob.jobs.errors import InputError, RefusedError, UncertainError, VjobError
from vjob.jobs.images.image import classify_image, resolve_image, stamp_image
from vjob.jobs.interrupts import defer_interrupts
from vjob.jobs.planning.resolve_auto import Resolved
from vjob.jobs.programs import start
from vjob.jobs.programs.code.packages import find_site_folders, list_packages, render_packages
from vjob.jobs.runs.find import view_run
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.base import Scheduler, Submission
from vjob.jobs.schedulers.job import NOTHING, After
from vjob.jobs.schedulers.reasons import explain_reason, is_provisional
from vjob.jobs.submit.build_plan import (
    PlanContext,
    build_plan,
    get_python,
    list_known_lines,
    reserve_spare_nodes,
)
from vjob.jobs.submit.chain import NO_RUNS, AfterRuns, resolve_after
from vjob.jobs.submit.here import check_here
from vjob.jobs.submit.scripts import Scripts, build_limits, render_scripts
from vjob.jobs.submit.snapshot import Snapshot, choose_python, relocate, take_snapshot

if TYPE_CHECKING:
    from vjob.jobs.schedulers.script_executor import ScriptExecutor

log = logging.getLogger(__name__)

Fill = Callable[[RunFolder], None]
"""Function that writes further files of a run before its job is submitted."""


def no_more(run: RunFolder) -> None:
    """Write no further files: the default of `fill`."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that a submit needs, before anything is written."""

    resolved: Resolved
    conf: JobConf
    """The resolved conf, with image and machines as found here."""
    here: PlanContext
    words: Sequence[str]
    """Further arguments of the program."""
    plan: Plan
    scripts: Scripts
    files: Mapping[str, str]
    """Files in the run folder that the program reads, by name."""
    snapshot: Snapshot
    """Snapshot of the user's code."""
    run: RunFolder
    notes: Sequence[str] = ()
    """Notes of the scheduler for the user."""

    @property
    def launch(self) -> start.Launch:
        """How the processes of the program are started, with the reason."""
        return start.choose_launch(self.conf, self.here.found, self.here.written)


def prepare(
    resolved: Resolved,
    words: Sequence[str] = (),
    *,
    run_id: str | None = None,
    for_preview: bool = False,
    snapshot: Snapshot | None = None,
) -> Prepared:
    """Build the plan and the scripts of a run; a preview stops here, and needs no Slurm.

    `run_id` is by default made from the conf's name and the time. `snapshot` is the copy of the
    code that another run made of the same code.
    """
    conf = resolved.conf
    if "%" in conf.log_folder:
        raise InputError(f"log_folder {conf.log_folder}: Slurm reads % as a pattern; rename it")
    conf = replace(conf, container=resolve_image(conf.container, os.environ))
    scheduler = choose_scheduler(conf, for_preview=for_preview)
    chosen = schedulers.get_scheduler(scheduler)
    conf, notes = chosen.adapt(conf, resolved.written, is_preview=for_preview)
    if not chosen.can.starts_steps and ":" in conf.log_folder:  # a folder of the run leads PATH
        raise InputError(f"log_folder {conf.log_folder}: PATH cannot hold a colon; rename it")
    run_id = run_id or make_run_id(conf.name, time.localtime())
    run = RunFolder(Path(conf.log_folder) / run_id)
    image = conf.container.image
    here = PlanContext(
        run=run.name,
        scheduler=scheduler,
        python=sys.executable,
        base=str(resolved.path.parent),
        user_id=os.getuid(),
        environ=os.environ,
        folder=str(run.path),
        image_kind=classify_image(image or ""),
        image_stamp=stamp_image(image or ""),
        found=start.get_starter(conf).read_files(conf),
        written=resolved.written,
    )
    if snapshot is None:
        snapshot = take_snapshot(conf, resolved.path.parent, os.environ)
    return replace(_build(resolved, conf, here, words, run, snapshot), notes=notes)


def move(ready: Prepared, run: RunFolder) -> Prepared:
    """Return the same run in another folder, rebuilding only what depends on the folder."""
    here = replace(ready.here, run=run.name, folder=str(run.path))
    moved = _build(ready.resolved, ready.conf, here, ready.words, run, ready.snapshot)
    return replace(moved, notes=ready.notes)


def _build(
    resolved: Resolved,
    conf: JobConf,
    here: PlanContext,
    words: Sequence[str],
    run: RunFolder,
    snapshot: Snapshot,
) -> Prepared:
    moved, there = relocate(conf, here, snapshot, run.code)
    chosen, plan = resolved.chosen, build_plan(moved, there)
    plan = replace(
        plan,
        planned=chosen.why,
        queues=dict(resolved.queues) or None,
        prediction=chosen.prediction,
        command=(*plan.command, *map(escape_placeholders, words)),
    )
    if chosen.layouts is not None:
        steps = dict(chosen.layout_steps or {})
        plan = replace(plan, layouts=dict(chosen.layouts), layout_steps=steps)
    return Prepared(
        resolved=resolved,
        conf=conf,
        here=here,
        words=words,
        plan=reserve_spare_nodes(plan),
        scripts=render_scripts(moved, plan, run),
        files=start.build_files(fill_references(moved), there.found, here.folder),
        run=run,
        snapshot=snapshot,
    )


def make_run_id(name: str, now: time.struct_time) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"


def choose_scheduler(conf: JobConf, *, for_preview: bool = False) -> str:
    """Return the scheduler's name for the plan; a preview does not require its presence."""
    scheduler = schedulers.choose_for(conf.cluster)
    obstacle = "" if for_preview else scheduler.find_obstacle()
    if obstacle:
        raise InputError(f"cluster.scheduler is {conf.cluster.scheduler}, but {obstacle}")
    return scheduler.name


def submit(
    resolved: Resolved,
    words: Sequence[str] = (),
    *,
    after: AfterRuns = NO_RUNS,
    executor: ScriptExecutor | None = None,
    fill: Fill = no_more,
    snapshot: Snapshot | None = None,
) -> tuple[RunFolder, RunRecord]:
    """Make and write the run folder, and submit its jobs; on VjobError no job is lost.

    `fill` writes what else the run needs; if it fails, nothing is left and nothing submitted.
    """
    ready = prepare(resolved, words, snapshot=snapshot)
    return submit_prepared(ready, after=after, executor=executor, fill=fill)


def submit_prepared(
    ready: Prepared,
    *,
    after: AfterRuns = NO_RUNS,
    executor: ScriptExecutor | None = None,
    fill: Fill = no_more,
    sweep: str = "",
    swept: Mapping[str, str] | None = None,
) -> tuple[RunFolder, RunRecord]:
    """Submit a prepared run, as `submit` does; `swept` has its values of a sweep's keys."""
    if schedulers.get_capabilities(ready.plan.scheduler).one_host:
        check_here(ready.conf, ready.plan)
    if fill is no_more:  # the pickle would not be written
        start.refuse_function(ready.conf)
    waits = resolve_after(after, ready.plan.scheduler)
    try:
        run = make_run_folder(ready.run.path)
    except OSError as error:
        raise VjobError(explain_write(ready.run.path, error)) from None
    if run.name != ready.run.name:  # another submit of this second has the name
        ready = move(ready, run)
    record = write_run(ready, run, fill, after, sweep=sweep, swept=swept)
    if not sweep:
        tell_notes(ready)
    return run, submit_jobs(run, record, list(ready.scripts.batch), waits, executor)


def tell_notes(ready: Prepared) -> None:
    """Tell the user what the scheduler noted about the conf."""
    for note in ready.notes:
        log.warning("%s", note)


def write_run(
    ready: Prepared,
    run: RunFolder,
    fill: Fill = no_more,
    after: AfterRuns = NO_RUNS,
    array: ArrayPlace | None = None,
    sweep: str = "",
    swept: Mapping[str, str] | None = None,
) -> RunRecord:
    """Write a run's files and its record into its new folder; remove the folder on failure."""
    record = RunRecord(
        run=run.name,
        name=ready.conf.name,
        state=records.INTENT,
        scheduler=ready.plan.scheduler,
        layout=ready.plan.layout,
        num_jobs=len(ready.scripts.batch),
        jobs=(),
        submitted=time.time(),
        user=_read_user(),
        host=platform.node(),
        conf=str(ready.resolved.path),
        version=__version__,
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        after=tuple(str(run.path) for run in after.succeeded),
        after_any=tuple(str(run.path) for run in after.ended),
        array=array,
        sweep=sweep,
        swept=dict(swept or {}),
        code=ready.snapshot.build_record(),
        limits=build_limits(ready.conf, ready.plan.scheduler),
    )
    try:
        write_run_folder(ready, run)
        fill(run)
        write_record(run, record)
        append_event(run.vjob_events, "intent", scheduler=record.scheduler, layout=record.layout)
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise VjobError(explain_write(run.path, error)) from None
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    _add_to_index(run, ready.conf.name, sweep)
    return record


def submit_jobs(
    run: RunFolder,
    record: RunRecord,
    groups: Sequence[str | None],
    after: After = NOTHING,
    executor: ScriptExecutor | None = None,
) -> RunRecord:
    """Submit each batch script; after a refusal, cancel the jobs submitted before."""
    from vjob.jobs.schedulers.script_executor import ScriptExecutor  # submitit: only a submit pays

    executor = executor or ScriptExecutor(run.path)
    scheduler = schedulers.get_scheduler(record.scheduler)
    with defer_interrupts():
        for group in groups:
            started = tuple(job.id for job in record.jobs[:1])
            submission = Submission(
                run=run,
                group=group,
                after=replace(after, started=(*after.started, *started)),
                limits=record.limits or JobLimits(),
            )
            try:
                job = executor.submit_script(submission, record.scheduler)
            except UncertainError:
                raise  # the record says intent, so that the next command looks for the job
            except VjobError as error:
                kept = cancel_submitted(scheduler, record)
                note = f"\n  The scripts are in {run.path}{kept}"
                message = f"{error}{note}"
                if not kept:
                    write_record(run, records.refuse(record, str(error)))
                    run.agent.unlink(missing_ok=True)
                    shutil.rmtree(run.code, ignore_errors=True)
                append_event(run.vjob_events, "refused", message=message)
                if isinstance(error, RefusedError):
                    raise error.with_note(note) from None
                raise VjobError(message) from None
            record = replace(record, jobs=(*record.jobs, JobRecord(id=job, group=group)))
            _write_submitted(run, record)
            with suppress(OSError):  # logged when the run was added
                index.add_job(run, job)
        record = record_submitted(run, record)
    return record


def record_submitted(run: RunFolder, record: RunRecord) -> RunRecord:
    """Record that all jobs of a run are with the scheduler."""
    record = replace(record, state=records.SUBMITTED)
    _write_submitted(run, record)
    append_event(run.vjob_events, "submitted", jobs=[job.id for job in record.jobs])
    link_run(run, record)
    return record


def cancel_submitted(scheduler: Scheduler, record: RunRecord) -> str:
    """Cancel the run's jobs; return a text that names those that could not be cancelled."""
    kept = []
    for job in record.jobs:
        try:
            scheduler.cancel(job.id)
        except VjobError:
            kept.append(job.id)
    return f"\n  Could not be cancelled: job {', '.join(kept)}; cancel it by hand" if kept else ""


def _write_submitted(run: RunFolder, record: RunRecord) -> None:
    try:
        write_record(run, record)
    except OSError as error:
        jobs = ", ".join(job.id for job in record.jobs)
        raise VjobError(
            f"job {jobs} was submitted, but {run.record} cannot be written: {error.strerror}; "
            "make room, and the next vjob command records the job"
        ) from None


def find_warnings(run: RunFolder, plan: Plan) -> list[str]:
    """Return warnings about the scheduler's settings, and from its first answer about the jobs."""
    texts = schedulers.get_scheduler(plan.scheduler).list_warnings(plan)
    return [text for text in (*texts, check_start(run)) if text]


def check_start(run: RunFolder) -> str:
    """Return the scheduler's reason why a job may never start; empty if it gives none at once."""
    record = read_record(run)
    if record is None:
        return ""
    scheduler = schedulers.get_scheduler(record.scheduler)
    trouble = ""
    for wait_s in scheduler.list_start_checks_s(len(record.jobs)):
        time.sleep(wait_s)
        infos = view_run(run, after=time.time()).infos
        trouble = explain_reason(infos)
        if not any(map(is_provisional, infos)):
            break
    return f"{trouble}; `vjob cancel {run.path.name}` ends the run" if trouble else ""


def write_run_folder(ready: Prepared, run: RunFolder) -> None:
    """Write every file that the scheduler and the nodes will read."""
    from varuna_core.agent.bundle import write_bundle, write_function, write_program
    from vjob.jobs.conf.redact import redact_text
    from vjob.jobs.conf.write import render_resolved

    ready.snapshot.write(run)  # first: it needs the most room
    write_atomic(run.conf, redact_text(ready.resolved.text))
    written = ready.resolved.written
    write_atomic(run.resolved, render_resolved(ready.conf, redact=True, written=written))
    write_plan(run.plan, ready.plan)
    containers = ready.plan.containers
    python = get_python(ready.conf, containers, ready.here.python)
    write_known_lines(run, list_known_lines(python, containers))
    for group, text in ready.scripts.batch.items():
        write_atomic(run.batch_script(group), text)
    write_atomic(run.node_script, ready.scripts.node)
    for name, text in ready.files.items():
        write_atomic(run.path / name, text)
    write_code(ready, run)
    trackers = ready.conf.track.plugins
    if trackers:
        write_json(run.trackers, {name: dict(values) for name, values in trackers.items()})
    needed = {ACCELERATORS: list_plugins(ACCELERATORS), "vjob.trackers": [*trackers]}
    write_bundle(run.agent, plan=ready.plan, plugins=needed)
    if ready.conf.program.kind in BUILT_IN:
        write_program(run.program)
    if ready.conf.program.kind == FUNCTION:
        write_function(run.function)


def write_code(ready: Prepared, run: RunFolder) -> None:
    """Write the code's changes and the list of packages, for later; not synced to disk."""
    diff = ready.snapshot.state.diff
    if diff:
        write_atomic(run.code_diff, diff, lasts=False)
    python = find_rank_python(ready)
    packages = list_packages(find_site_folders(python)) if python else []
    if packages:
        write_atomic(run.packages, render_packages(python, packages), lasts=False)


def find_rank_python(ready: Prepared) -> str:
    """Return the ranks' interpreter as known on this machine; empty if it is in a container."""
    if ready.plan.containers:
        return ""
    return choose_python(ready.conf, ready.here.python)


def link_run(run: RunFolder, record: RunRecord) -> None:
    """Link <log_folder>/<jobid> and <log_folder>/<name> to the run; a link that fails is logged."""
    for name in [*(job.id for job in record.jobs), record.name]:
        link = run.path.with_name(name)
        part = link.with_name(f".{name}.{os.getpid()}.part")
        try:
            if os.path.lexists(link) and not _is_own_link(link):
                continue  # something of the user's own
            os.symlink(run.name, part)
            os.replace(part, link)
        except OSError as error:
            log.warning("no link %s: %s", link, error.strerror)


def _is_own_link(link: Path) -> bool:
    """Return True for a link to a run folder beside it."""
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return "/" not in target and RunFolder(link.with_name(target)).record.exists()


def _add_to_index(run: RunFolder, name: str, sweep: str) -> None:
    """Add the run to the user's index; log a failure, since the index is only a shortcut."""
    try:
        index.add_run(run, name, sweep)
    except OSError as error:
        log.warning(
            "the index in %s cannot be written: %s; `vjob list` and `last` will not show this run: "
            "name it by its folder, %s",
            index.folder(),
            error.strerror,
            run.path,
        )


def _read_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without an entry in the user database
        return str(os.getuid())


def explain_write(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be written: {error.strerror}; nothing was submitted. Set log_folder to "
        "a folder on the shared file system with room that you can write"
    )
