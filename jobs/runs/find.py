"""Finds a run by what the user types, and brings its record up to date with the scheduler.

Adopts the jobs of a submit that was cut off, records how a run ended, and ends the jobs that joined
it. Those stand beside the run's own jobs, not among them: one that is cancelled or fails is lost
nodes, and says nothing of how the run is or ended.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from varuna_core.records import record as records
from varuna_core.records.exits import Outcome, read_outcome
from varuna_core.records.files import read_json
from varuna_core.records.machine import start_time
from varuna_core.records.morphing import Join, JoinJob, read_join_job, read_joins, write_join_job
from varuna_core.records.plan import read_plan
from varuna_core.records.record import (
    JobRecord,
    RunRecord,
    append_event,
    is_cancel_asked,
    read_events,
    read_record,
    write_record,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.runs.outcome import explain_end, judge_run
from vjob.jobs.runs.owner import is_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.slurm_commands import OVER, JobInfo, JobState
from vjob.jobs.schedulers.slurm_reasons import explain_launch

log = logging.getLogger(__name__)
LIVE = (
    JobState.RUNNING,
    JobState.COMPLETING,
    JobState.CONFIGURING,
    JobState.SUSPENDED,
    JobState.PENDING,
    JobState.REQUEUED,
)
"""The first of these that a job of the run has is the run's own state."""
SUBMIT_S = 120.0
"""A submit on another host may still be at work for so long."""
ORPHAN_S = 600.0
"""An intent without a job after this long was never given to the scheduler."""
NOT_OURS = "; a job that vjob did not submit has no run"
FRESH_S = 120.0
"""A `vjob grow` on another host may still be at work for so long, and the scheduler show no job."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, and the state of its jobs by the scheduler."""

    run: RunFolder
    record: RunRecord
    infos: tuple[JobInfo, ...]
    """One a component; empty where the scheduler has forgotten."""
    joined: tuple[JobInfo, ...] = ()
    """Components of the jobs that brought more nodes to it."""
    problem: str = ""
    """Why the scheduler did not answer."""

    @property
    def state(self) -> str:
        """One word for the run."""
        if self.record.state == records.ENDED:
            return self.record.verdict
        if self.record.state in (records.REFUSED, records.INTENT):
            return self.record.state.upper()
        words = [info.state for info in self.infos]
        for state in LIVE:
            if state in words:
                return str(state.value)
        return str((words[0] if words else JobState.UNKNOWN).value)


def is_over(view: RunView) -> bool:
    """True where nothing of the run goes on."""
    return view.record.state in (records.ENDED, records.REFUSED)


def find_run(job: str, here: Path) -> RunFolder:
    """JOB is an id, a name, a run id, `last`, or the path of a run folder."""
    path = Path(job).expanduser()
    try:
        if (path / "record.json").is_file() or (path / "plan.json").is_file():
            return RunFolder(path.resolve())
    except PermissionError as error:
        raise InputError(
            f"you may not read {path}: permission denied for {error.filename}"
        ) from None
    found: RunFolder | None = None
    if job == "last":
        found = index.find_latest(None)
    elif re.fullmatch(r"[\w.-]+(\+\d+)?", job):
        found = (
            index.find_job(job.partition("+")[0]) or index.find_run(job) or index.find_latest(job)
        )
        if found is None:
            found = _find_link(here, job.partition("+")[0])
    if found is None:
        index.check_readable()
        raise InputError(
            _explain_removed(job)
            or f"no run {job!r} is known: give a job id, a run's name, `last`, or the path of a "
            f"run folder; `vjob list` shows them{NOT_OURS if job.isdecimal() else ''}"
        )
    return found


def _explain_removed(job: str) -> str:
    """A sentence for a run whose folder is gone and whose jobs go on; else empty."""
    with contextlib.suppress(VjobError):
        for run, infos in schedulers.get_scheduler("slurm").find_orphans().items():
            ids = sorted({info.leader for info in infos})
            if job == run or job.partition("+")[0] in ids:
                words = " ".join(ids)
                return f"the folder of run {run} was removed, its job goes on: scancel {words}"
    return ""


def _find_link(here: Path, name: str) -> RunFolder | None:
    """<log>/<jobid> below this folder, for runs that another user's or machine's index holds."""
    for folder in (here / "log", here):
        path = folder / name
        if name not in (".", "..") and (path / "plan.json").is_file():
            return RunFolder(path.resolve())
    return None


def view_run(run: RunFolder, *, warn: bool = True) -> RunView:
    """The run as it is now; adopts, ends and records what has changed."""
    views = view_runs([run], warn=warn)
    if not views:
        raise InputError(f"{run.path} holds no readable record.json; is it a run folder of vjob?")
    return views[0]


def view_runs(runs: Sequence[RunFolder], *, warn: bool = True) -> list[RunView]:
    """Many runs with one query to each scheduler; runs without a record are left out.

    With `warn` a scheduler that does not answer is logged too.
    """
    known: list[tuple[RunFolder, RunRecord]] = []
    for run in runs:
        record = read_record(run)
        if record is not None:
            known.append((run, bring_up_to_date(run, record)))
    asked: dict[str, list[str]] = {}
    joined: dict[str, list[str]] = {}
    for run, record in known:
        if record.state == records.SUBMITTED:
            joined[str(run.path)] = list(list_joined(run))
            ids = [*(job.id for job in record.jobs), *joined[str(run.path)]]
            asked.setdefault(record.scheduler, []).extend(ids)
    found: dict[str, dict[str, list[JobInfo]]] = {}
    problems: dict[str, str] = {}
    for name, jobs in asked.items():
        try:
            found[name] = schedulers.get_scheduler(name).poll(jobs)
        except UncertainError as error:  # then nothing is concluded about any run
            problems[name] = str(error)
            if warn:
                log.warning("%s", error)
    views = []
    for run, record in known:
        infos: list[JobInfo] = []
        more: list[JobInfo] = []
        looked = found.get(record.scheduler)
        if record.state == records.SUBMITTED and looked is not None:
            infos = [info for job in record.jobs for info in looked[job.id]]
            more = [info for job in joined[str(run.path)] for info in looked[job]]
            record = record_end(run, record, infos)
        problem = problems.get(record.scheduler, "") if record.state == records.SUBMITTED else ""
        view = RunView(
            run=run, record=record, infos=tuple(infos), joined=tuple(more), problem=problem
        )
        if more and record.state == records.ENDED:
            end_joined(view)
        views.append(view)
    return views


def bring_up_to_date(run: RunFolder, record: RunRecord) -> RunRecord:
    """Update a record by what needs no scheduler: a submit cut off, an outcome that came late."""
    if not is_ours(run):
        return record
    if record.state == records.INTENT:
        return adopt(run, record)
    if record.state == records.ENDED:
        attempts = run.attempts()
        late = read_outcome(attempts[-1]) if attempts else None
        if late is not None and late != record.outcome:
            message = explain_end(run, record.verdict, late)
            record = replace(record, outcome=late, message=message)
            _save(run, record)
    return record


def adopt(run: RunFolder, record: RunRecord) -> RunRecord:
    """Take over the jobs of a submit that was cut off: those that carry this run's id."""
    if _is_submitting(record):
        return record
    try:
        jobs = find_jobs(run, record)
    except UncertainError as error:
        log.warning("%s may have a job that is not known yet: %s", run.name, error)
        return record
    if read_record(run) != record:  # another command was faster
        return read_record(run) or record
    if not jobs:
        if time.time() - record.submitted < ORPHAN_S:
            return record
        changed = _refuse(record, "the submit was cut off before the scheduler had the job")
    elif len(jobs) < record.num_jobs:
        for job in jobs:
            schedulers.get_scheduler(record.scheduler).cancel(job.id)
        done = f"after {len(jobs)} of {record.num_jobs} jobs"
        changed = _refuse(record, f"the submit was cut off {done}, now cancelled; submit again")
    else:
        changed = replace(record, state=records.SUBMITTED, jobs=jobs)
    _save(run, changed)
    with contextlib.suppress(OSError):  # said by _save; and the index is a shortcut only
        append_event(run.vjob_events, "adopted", jobs=[job.id for job in jobs], state=changed.state)
        for job in jobs:
            index.add_job(run, job.id)
    return changed


def _refuse(record: RunRecord, message: str) -> RunRecord:
    return replace(record, state=records.REFUSED, message=message)


def _is_submitting(record: RunRecord) -> bool:
    """True while the submit runs; on another host, while it may still run by its age."""
    if record.host == platform.node():
        return start_time(record.pid) == record.pid_start is not None
    return time.time() - record.submitted < SUBMIT_S


def find_jobs(run: RunFolder, record: RunRecord) -> tuple[JobRecord, ...]:
    """Every job of the run that shows anywhere: in the record, the queue, or the run folder."""
    groups = {job.id: job.group for job in record.jobs}
    place = record.array
    comment = run.name if place is None else place.name
    orphans = schedulers.get_scheduler(record.scheduler).find_orphans()
    for info in orphans.get(comment, []):
        if place is None or info.leader.endswith(f"_{place.index}"):
            groups.setdefault(info.leader, None)
    for event in read_events(run):
        if event.get("kind") == "started" and event.get("job_id"):
            groups.setdefault(str(event["job_id"]), event.get("group") or None)
    for path in run.path.glob("local*.json"):
        state = read_json(path)
        if isinstance(state, dict) and state.get("pid"):
            groups.setdefault(str(state["job"]), None)
    return tuple(JobRecord(id=job, group=group) for job, group in groups.items())


def record_end(run: RunFolder, record: RunRecord, infos: Sequence[JobInfo]) -> RunRecord:
    """Once every job is over, record how the run ended and who was the culprit."""
    if any(info.state not in OVER for info in infos):
        _end_rest(run, record, infos)
        return record
    known = {info.leader for info in infos}
    if not known.issuperset(job.id for job in record.jobs):
        return _record_forgotten(run, record)
    outcome = judge_run(run, infos)
    plan = read_plan(run.plan)
    if plan is not None and plan.morph:  # the others are nodes that it may lose
        infos = infos[:1]
    worst = next((i for i in infos if i.state is not JobState.COMPLETED), infos[0])
    fallback = explain_launch(worst) or worst.reason or f"the scheduler says {worst.word}"
    return _end(run, record, worst.state.value, fallback, outcome)


def _end_rest(run: RunFolder, record: RunRecord, infos: Sequence[JobInfo]) -> None:
    """A split run whose first job is over needs no other job to start any more."""
    if not is_ours(run):
        return
    over = {info.leader for info in infos if info.state in OVER}
    if record.layout != "split" or record.jobs[0].id not in over:
        return
    for info in infos:
        if info.state is JobState.PENDING:
            with contextlib.suppress(VjobError):  # gone meanwhile
                schedulers.get_scheduler(record.scheduler).cancel(info.leader)


def _record_forgotten(run: RunFolder, record: RunRecord) -> RunRecord:
    """The scheduler has forgotten a job: our own outcome is the last word, if there is one."""
    attempts = run.attempts()
    outcome = read_outcome(attempts[-1]) if attempts else None
    if outcome is not None:
        verdict = JobState.COMPLETED.value if outcome.code == 0 else JobState.FAILED.value
        return _end(run, record, verdict, "", outcome)
    was_asked = is_cancel_asked(run)
    if was_asked and not attempts:  # Slurm forgets at once an array's element that never began
        return _end(run, record, JobState.CANCELLED.value, "", None)
    if time.time() - record.submitted < ORPHAN_S:
        return record
    message = f"{record.scheduler} has forgotten the job, and it left no outcome"
    return _end(run, record, JobState.UNKNOWN.value, message, None)


def _end(
    run: RunFolder, record: RunRecord, verdict: str, fallback: str, outcome: Outcome | None
) -> RunRecord:
    message = _explain_chain(run, record, verdict) or explain_end(run, verdict, outcome)
    message = message or fallback
    ended = replace(record, state=records.ENDED, verdict=verdict, message=message, outcome=outcome)
    _save(run, ended)
    return ended


def _explain_chain(run: RunFolder, record: RunRecord, verdict: str) -> str:
    """A sentence for a run that was cancelled as one before it did not end well; else empty."""
    if not record.after or verdict != JobState.CANCELLED.value or run.attempts():
        return ""
    views = view_runs([RunFolder(Path(path)) for path in record.after])
    ends = dict.fromkeys(record.after, "its folder was removed")
    for view in views:
        # One job of a split run that failed is enough, though the others go on.
        jobs = (info.state.value for info in view.infos if info.state in OVER)
        well = JobState.COMPLETED.value
        bad = next((state for state in jobs if state != well), well)
        ends[str(view.run.path)] = view.state if is_over(view) else bad
    for path, end in ends.items():
        if end != JobState.COMPLETED.value:
            name = Path(path).name
            return f"never started: {name}, which it waited for, did not end well ({end})"
    return ""


def _save(run: RunFolder, record: RunRecord) -> None:
    """A full disk, or a colleague's run, is no reason not to show what is known."""
    if not is_ours(run):
        return
    try:
        write_record(run, record)
    except OSError as error:
        log.warning("%s: what is shown could not be recorded: %s", run.name, error.strerror)


def name_host(run: RunFolder, seat: int) -> str:
    """The host of a node of a run that may morph, as the node itself says."""
    value = read_json(run.morph.node(seat))
    return str(value.get("host")) if isinstance(value, dict) else f"node {seat}"


def list_joined(run: RunFolder) -> dict[str, str]:
    """Ids of the jobs that were given to the scheduler, and their groups."""
    found = {}
    for join in read_joins(run.morph):
        said = read_join_job(run.morph, join)
        if said is not None and said.job is not None:
            found[said.job] = join.name
    return found


def find_joined_over(view: RunView) -> set[int]:
    """Numbers of the joins whose nodes are gone for good, or never come."""
    folder = view.run.morph
    states = {info.leader: info.state for info in view.joined}
    over = set()
    for join in read_joins(folder):
        said = read_join_job(folder, join)
        is_fresh = time.time() - join.asked < FRESH_S
        if said is None:
            is_over = not _is_asking(join)
        elif said.job is None:
            is_over = True
        elif said.job in states:
            is_over = states[said.job] in OVER
        else:  # forgotten, or asked for since the scheduler was
            is_over = not is_fresh and not view.problem
        if is_over:
            over.add(join.number)
    return over


def _is_asking(join: Join) -> bool:
    if join.host == platform.node():
        return start_time(join.pid) == join.pid_start is not None
    return time.time() - join.asked < FRESH_S


def cancel_joined(view: RunView, joins: Sequence[Join] | None = None) -> None:
    """End the jobs that joined, or these; those that are over already are no matter."""
    folder = view.run.morph
    scheduler = schedulers.get_scheduler(view.record.scheduler)
    over = find_joined_over(view)
    for join in read_joins(folder) if joins is None else joins:
        said = read_join_job(folder, join)
        if said is None or said.job is None or join.number in over:
            continue
        with contextlib.suppress(VjobError):
            scheduler.cancel(said.job)
            write_join_job(folder, join, JoinJob(job=None, reason="cancelled"))


def end_joined(view: RunView) -> None:
    """The run has just ended. After a good end those that run go home by themselves."""
    if not is_ours(view.run):
        return
    states = {info.leader: info.state for info in view.joined}
    is_well = view.record.verdict == JobState.COMPLETED.value
    joins = []
    for join in read_joins(view.run.morph):
        said = read_join_job(view.run.morph, join)
        state = states.get(said.job) if said is not None and said.job is not None else None
        if state is JobState.PENDING or not is_well:
            joins.append(join)
    cancel_joined(view, joins)
