"""Find a run by what the user types, and update its record from the scheduler.

This adopts the jobs of an interrupted submit, records how a run ended, and ends the jobs that
joined it. Joined jobs are kept apart from the run's own: if one is cancelled or fails, nodes are
lost, but it does not tell how the run is or ended.
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

from varuna_core.facts.catalogue.ends import explain_end
from varuna_core.facts.cause import Actor, End, EndCause
from varuna_core.facts.deciding import has_own_cause
from varuna_core.facts.known import Evidence, Sure, Value
from varuna_core.facts.remedy import context_of
from varuna_core.facts.sentences import SCHEDULER
from varuna_core.records import record as records
from varuna_core.records.exits import Judgement, read_judgement
from varuna_core.records.files import read_json
from varuna_core.records.formatting import fold_names
from varuna_core.records.machine import start_time
from varuna_core.records.morphing import Join, JoinJob, read_join_job, read_joins, write_join_job
from varuna_core.records.plan import read_plan
from varuna_core.records.record import (
    JobEnd,
    JobRecord,
    RunRecord,
    append_event,
    is_cancel_asked,
    read_canceller,
    read_events,
    read_record,
    read_requeues,
    read_run_end,
    write_record,
)
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.runs.outcome import choose_deciding_job, decide_end, end_of_job, judge_run
from vjob.jobs.runs.owner import explain_closed, find_owner, is_ours
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.base import FLOOR_S, Scheduler
from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob

log = logging.getLogger(__name__)
LIVE = (
    JobState.RUNNING,
    JobState.COMPLETING,
    JobState.CONFIGURING,
    JobState.SUSPENDED,
    JobState.PENDING,
    JobState.REQUEUED,
)
"""States of a live run, in order: the first that any job of the run has is the run's state."""
SUBMIT_S = 120.0
"""Seconds for which a submit on another host may still be running."""
ORPHAN_S = 600.0
"""An intent without a job after this many seconds never reached the scheduler."""
AFTER_A_SAVE = {
    EndCause.CANCELLED: JobState.CANCELLED.value,
    EndCause.TIME_LIMIT: JobState.TIMEOUT.value,
}
"""Verdicts of runs whose ranks exited 0 because they were asked to."""
NOT_OURS = "; a job that vjob did not submit has no run"
Asked = tuple[str, int | None, Path | None]
"""Scheduler, user and folder by which jobs are queried together."""
ENDING_S = (1.0, 5.0)
"""Seconds, usual and most, until Slurm ends a job after its batch script wrote the outcome."""
FRESH_S = 120.0
"""Seconds for which a `vjob grow` on another host may be running without showing a job."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run, with the state of its jobs by the scheduler."""

    run: RunFolder
    record: RunRecord
    infos: tuple[SchedulerJob, ...]
    """State of each component; empty if the scheduler has forgotten the job."""
    joined: tuple[SchedulerJob, ...] = ()
    """Components of jobs that brought more nodes to the run."""
    problem: str = ""
    """Why the scheduler did not answer."""

    @property
    def asked(self) -> float | None:
        """The time at which the states were true; None for now."""
        times = [info.asked for info in (*self.infos, *self.joined) if info.asked is not None]
        return min(times, default=None)

    @property
    def is_under_way(self) -> bool:
        """True once the ranks of the last attempt were started, so that no job is waited for."""
        attempts = self.run.attempts()
        return bool(attempts) and read_mtime(attempts[-1].go) > 0

    @property
    def state(self) -> str:
        """One word for the state of the run."""
        if self.record.state == records.ENDED:
            return self.record.verdict
        if self.record.state in (records.REFUSED, records.INTENT):
            return self.record.state.upper()
        words = [info.state for info in self.infos]
        if self.record.layout == "split" and JobState.PENDING in words and not self.is_under_way:
            return str(JobState.PENDING.value)
        for state in LIVE:
            if state in words:
                return str(state.value)
        return str((words[0] if words else JobState.UNKNOWN).value)


def is_over(view: RunView) -> bool:
    """Return True if nothing of the run goes on."""
    return view.record.state in (records.ENDED, records.REFUSED)


def refuse_empty(job: str) -> None:
    """Raise InputError for an empty word, such as `vjob status "$UNSET"`."""
    if not job.strip():
        raise InputError(
            "JOB is empty: give a job id, a run's name, `last`, or a folder, such as `.`"
        )


def find_run(job: str, here: Path) -> RunFolder:
    """Return the run of JOB: an id, a name, a run id, `last`, or the path of a run folder."""
    refuse_empty(job)
    path = Path(job).expanduser()
    try:
        if (path / "record.json").is_file() or (path / "plan.json").is_file():
            return RunFolder(path.resolve())
    except PermissionError as error:
        raise InputError(explain_closed(path, str(error.filename))) from None
    found: RunFolder | None = None
    if job == "last":
        found = _find_latest(None)
    elif re.fullmatch(r"[\w.-]+(\+\d+)?", job):
        found = index.find_job(job.partition("+")[0]) or index.find_run(job) or _find_latest(job)
        if found is None:
            found = _find_link(here, job.partition("+")[0])
    if found is None:
        index.check_readable()
        if job == "last":
            raise InputError("no runs yet; `vjob submit conf.yaml` makes one")
        raise InputError(
            _explain_removed(job)
            or f"no run {job!r} is known: give a job id, a run's name, `last`, or the path of a "
            f"run folder; `vjob list` shows them{NOT_OURS if job.isdecimal() else ''}"
        )
    return found


def _find_last() -> RunFolder | None:
    """Return the newest run that was not refused, logging skipped ones; else the newest."""
    passed: list[str] = []
    newest = None
    for run in index.list_newest():
        newest = newest or run
        record = read_record(run)
        if record is None or record.state != records.REFUSED:
            if passed:
                more = f" and {len(passed) - 1} more" if len(passed) > 1 else ""
                said = "`last` skips %s%s, which the scheduler refused, and means %s"
                log.warning(said, passed[0], more, run.name)
            return run
        passed.append(run.name)
    return newest


def _find_latest(name: str | None) -> RunFolder | None:
    """Return the newest run, of this name if given. Raise InputError if the folder of a newer run
    is gone while its job goes on, since the user may mean that run and another one would be shown
    or cancelled."""
    found = index.find_latest(name) if name is not None else _find_last()
    for removed in find_removed(index.list_removed(name, found)):
        raise InputError(removed.explain())
    return found


@dataclass(frozen=True, kw_only=True)
class RemovedRun:
    """A run whose folder is gone and whose jobs go on."""

    run: str
    infos: tuple[SchedulerJob, ...]
    scheduler: Scheduler

    @property
    def jobs(self) -> list[str]:
        return sorted({info.leader for info in self.infos}, key=lambda job: (len(job), job))

    def explain(self) -> str:
        how = self.scheduler.spell_cancel(self.jobs)
        return f"the folder of run {self.run} was removed, but its job still exists: {how}"


def find_removed(runs: Sequence[str]) -> list[RemovedRun]:
    """Return those runs without a folder that still have a job known to a scheduler."""
    removed = []
    for scheduler in schedulers.list_with_queue() if runs else ():
        found: dict[str, list[SchedulerJob]] = {}
        with contextlib.suppress(VjobError):  # it is not here, or does not answer
            found = scheduler.find_orphans()
        for run in runs:
            jobs = index.list_removed_jobs(run) if run in found else ()
            infos = [x for x in found.get(run, ()) if x.state not in OVER and x.leader in jobs]
            if infos:
                removed.append(RemovedRun(run=run, infos=tuple(infos), scheduler=scheduler))
    return removed


def _explain_removed(job: str) -> str:
    """Explain a run whose folder is gone; empty if `job` names no such run."""
    for scheduler in schedulers.list_with_queue():
        with contextlib.suppress(VjobError):
            for run, infos in scheduler.find_orphans().items():
                removed = RemovedRun(run=run, infos=tuple(infos), scheduler=scheduler)
                if job == run or job.partition("+")[0] in removed.jobs:
                    return removed.explain()
    path = index.find_removed(job.partition("+")[0])
    if path is None:
        return ""
    return (
        f"the folder of this run, {path}, was moved or deleted: after a move give its new path, as "
        "in `vjob status NEW/PATH`"
    )


def _find_link(here: Path, name: str) -> RunFolder | None:
    """Return the run linked by <log>/<jobid> here, as for runs in another user's index."""
    for folder in (here / "log", here):
        path = folder / name
        if name not in (".", "..") and (path / "plan.json").is_file():
            return RunFolder(path.resolve())
    return None


def view_run(
    run: RunFolder, *, warn: bool = True, floor_s: float = FLOOR_S, after: float = 0.0
) -> RunView:
    """Return the present view of a run, after updating its record."""
    views = view_runs([run], warn=warn, floor_s=floor_s, after=after)
    if not views:
        raise InputError(f"{run.path} holds no readable record.json; is it a run folder of vjob?")
    return views[0]


def view_runs(
    runs: Sequence[RunFolder], *, warn: bool = True, floor_s: float = FLOOR_S, after: float = 0.0
) -> list[RunView]:
    """Return views of many runs, with one query to each scheduler; skip those without a record.

    With `warn`, a scheduler that does not answer is logged too. Its answer may be `floor_s` old,
    but not from before `after` or from before the last change in a run's files.
    """
    known: list[tuple[RunFolder, RunRecord]] = []
    for run in runs:
        record = read_record(run)
        if record is not None:
            known.append((run, bring_up_to_date(run, record)))
    asked: dict[Asked, dict[str, float]] = {}
    joined: dict[str, list[str]] = {}
    for run, record in known:
        if record.state == records.SUBMITTED:
            joined[str(run.path)] = list(list_joined(run))
            since = max(after, read_change_time(run))
            jobs = asked.setdefault(_find_asked(run, record), {})
            jobs.update({job.id: since for job in record.jobs})
            jobs.update({job: after for job in joined[str(run.path)]})
    found: dict[Asked, dict[str, list[SchedulerJob]]] = {}
    problems: dict[str, str] = {}
    for who, jobs in asked.items():
        name, user, path = who
        try:
            scheduler = schedulers.get_scheduler(name, None if path is None else RunFolder(path))
            found[who] = scheduler.poll(list(jobs), user=user, floor_s=floor_s, after=jobs)
        except (InputError, UncertainError) as error:  # then nothing is concluded about any run
            problems[name] = str(error)
            found[who] = {job: list(infos) for job, infos in getattr(error, "found", {}).items()}
            if warn:
                log.warning("%s", error)
    views = []
    for run, record in known:
        infos: list[SchedulerJob] = []
        more: list[SchedulerJob] = []
        looked = None
        if record.state == records.SUBMITTED:
            looked = found.get(_find_asked(run, record))
        if looked is not None and all(job.id in looked for job in record.jobs):
            infos = [info for job in record.jobs for info in looked[job.id]]
            more = [info for job in joined[str(run.path)] for info in looked.get(job, ())]
            record = record_end(run, record, infos)
        problem = problems.get(record.scheduler, "") if record.state == records.SUBMITTED else ""
        view = RunView(
            run=run, record=record, infos=tuple(infos), joined=tuple(more), problem=problem
        )
        if more and record.state == records.ENDED:
            end_joined(view)
        views.append(view)
    return views


def _find_asked(run: RunFolder, record: RunRecord) -> Asked:
    """Return how a run's jobs are queried: together by user, or by the folder of a local run."""
    if schedulers.has_queue(record.scheduler):
        return record.scheduler, find_owner(run), None
    return record.scheduler, None, run.path


def read_change_time(run: RunFolder) -> float:
    """Return when the run's files last changed in a way that its scheduler reflects; 0 if never.

    Such changes: a job was submitted, an attempt began, its ranks ended. The job ends a little
    later than its ranks; answers up to then count as earlier.
    """
    attempts = run.attempts()
    started = read_mtime(attempts[-1].master) if attempts else 0.0
    ended = read_mtime(attempts[-1].outcome) if attempts else 0.0
    ends = (ended + wait_s for wait_s in ENDING_S if 0 < ended + wait_s <= time.time())
    return max(read_mtime(run.record), started, *ends, 0.0)


def read_mtime(path: Path) -> float:
    """Return the time of the last change by the file server's clock; 0 if there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def bring_up_to_date(run: RunFolder, record: RunRecord) -> RunRecord:
    """Update a record without the scheduler: an interrupted submit, or a late outcome."""
    if not is_ours(run):
        return record
    if record.state == records.INTENT:
        return adopt(run, record)
    if record.state == records.ENDED:
        attempts = run.attempts()
        late = read_judgement(attempts[-1]) if attempts else None
        if late is not None and late.outcome != record.outcome:
            job = read_run_end(run, record)
            record = _end(run, record, record.verdict, decide_end(run, late, job), late)
    return record


def adopt(run: RunFolder, record: RunRecord) -> RunRecord:
    """Adopt the jobs of an interrupted submit, which have this run's id as a comment."""
    if _is_submitting(record):
        return record
    cut_off = _cut_off.setdefault(str(run.path), time.time())
    try:
        jobs = find_jobs(run, record)
        if len(jobs) < record.num_jobs:  # perhaps by an answer from before the last submit
            jobs = find_jobs(run, record, after=cut_off)
    except UncertainError as error:
        log.warning("%s may have submitted a job whose id is not known yet: %s", run.name, error)
        return record
    if read_record(run) != record:  # another command was faster
        return read_record(run) or record
    if not jobs:
        if time.time() - record.submitted < ORPHAN_S:
            return record
        changed = _refuse(record, "the submit was cut off before the scheduler had the job")
    elif len(jobs) < record.num_jobs:
        for job in jobs:
            schedulers.get_scheduler(record.scheduler, run).cancel(job.id)
        done = f"after {len(jobs)} of {record.num_jobs} jobs"
        changed = _refuse(record, f"the submit was cut off {done}, all now cancelled; submit again")
    else:
        changed = replace(record, state=records.SUBMITTED, jobs=jobs)
    _save(run, changed)
    with contextlib.suppress(OSError):  # said by _save; and the index is a shortcut only
        append_event(run.vjob_events, "adopted", jobs=[job.id for job in jobs], state=changed.state)
        for job in jobs:
            index.add_job(run, job.id)
    return changed


_cut_off: dict[str, float] = {}
"""Time at which this process first saw that the submit of a run is no longer running, keyed by
run."""


def _refuse(record: RunRecord, message: str) -> RunRecord:
    return records.refuse(record, message, EndCause.SUBMIT_LOST, Actor.UNKNOWN)


def _is_submitting(record: RunRecord) -> bool:
    """Return True while the submit runs or, on another host, may still run by its age."""
    if record.host == platform.node():
        return start_time(record.pid) == record.pid_start is not None
    return time.time() - record.submitted < SUBMIT_S


def find_jobs(run: RunFolder, record: RunRecord, after: float = 0.0) -> tuple[JobRecord, ...]:
    """Return every known job of the run, from the record, the queue, or the run folder."""
    groups = {job.id: job.group for job in record.jobs}
    place = record.array
    comment = run.name if place is None else place.name
    orphans = schedulers.get_scheduler(record.scheduler).find_orphans(after)
    for info in orphans.get(comment, []):
        if place is None or info.leader.endswith(f"_{place.index}"):
            groups.setdefault(info.leader, None)
    for event in read_events(run):
        if event.get("kind") == "started" and event.get("job_id"):
            groups.setdefault(str(event["job_id"]), event.get("group") or None)
    for path in run.local_states():
        state = read_json(path)
        if isinstance(state, dict) and state.get("pid"):
            groups.setdefault(str(state["job"]), None)
    return tuple(JobRecord(id=job, group=group) for job, group in groups.items())


def record_end(run: RunFolder, record: RunRecord, infos: Sequence[SchedulerJob]) -> RunRecord:
    """Record how the run ended and which node was at fault, once every job is over."""
    if any(info.state not in OVER for info in infos):
        _end_rest(run, record, infos)
        return record
    known = {info.leader for info in infos}
    if not known.issuperset(job.id for job in record.jobs):
        return _record_forgotten(run, record)
    earlier = list_earlier(run, record, infos) if is_ours(run) else {}
    kept = tuple(keep_end(info, earlier.get(info.id, ())) for info in infos)
    record = replace(record, job_ends=kept)
    judged = judge_run(run, infos)
    plan = read_plan(run.plan)
    if plan is not None and plan.morph:  # the others are nodes that it may lose
        infos = infos[:1]
    has_cause = judged is not None and has_own_cause(judged.end)
    worst = choose_deciding_job(infos, has_cause=has_cause)
    job = _explain_chain(run, record, worst.state.value) or end_of_job(
        worst,
        is_asked=is_cancel_asked(run),
        started=None if run.attempts() else False,
        ask_canceller=lambda: _ask_canceller(record),
    )
    return _end(run, record, worst.state.value, decide_end(run, judged, job), judged)


def list_earlier(
    run: RunFolder, record: RunRecord, infos: Sequence[SchedulerJob]
) -> dict[str, tuple[EndCause, ...]]:
    """Return the known ends of the earlier starts of each requeued job, oldest first.

    A batch script that is preempted requeues its job itself before Slurm does. Accounting then says
    REQUEUED only, and the reason is taken from the run's events.
    """
    found: dict[str, tuple[EndCause, ...]] = {}
    for leader in dict.fromkeys(info.leader for info in infos if info.restarts):
        own = read_requeues(run, leader)
        asked = schedulers.get_scheduler(record.scheduler).ask_earlier(leader)
        for info in infos:
            if info.leader == leader:
                causes = list(asked.get(info.id, ())[: info.restarts])
                for start, cause in sorted(own.items()):
                    if start < len(causes) and causes[start] is EndCause.REQUEUED:
                        causes[start] = cause
                    elif start == len(causes) < info.restarts:
                        causes.append(cause)
                found[info.id] = tuple(causes)
    return found


def keep_end(info: SchedulerJob, earlier: Sequence[EndCause] = ()) -> JobEnd:
    return JobEnd(
        id=info.id,
        state=info.state.value,
        word=info.native_word,
        nodes=fold_names(info.nodes),
        reason=info.reason_text,
        exit_code=info.exit_text,
        restarts=info.restarts,
        started=info.start,
        ended=info.ends,
        limit_s=info.limit.value if isinstance(info.limit, Value) else None,
        earlier=" ".join(cause.value for cause in earlier),
    )


def _end_rest(run: RunFolder, record: RunRecord, infos: Sequence[SchedulerJob]) -> None:
    """Cancel pending jobs of a split run whose first job is over."""
    if not is_ours(run):
        return
    over = {info.leader for info in infos if info.state in OVER}
    if record.layout != "split" or record.jobs[0].id not in over:
        return
    for info in infos:
        if info.state is JobState.PENDING:
            with contextlib.suppress(VjobError):  # gone meanwhile
                schedulers.get_scheduler(record.scheduler, run).cancel(info.leader)


def _record_forgotten(run: RunFolder, record: RunRecord) -> RunRecord:
    """Record the end of a run that the scheduler has forgotten, by its outcome if it has one."""
    attempts = run.attempts()
    judged = read_judgement(attempts[-1]) if attempts else None
    if judged is not None:
        is_well = judged.outcome.code == 0
        verdict = JobState.COMPLETED if is_well else JobState.FAILED
        return _end(run, record, verdict.value, decide_end(run, judged, None), judged)
    if is_cancel_asked(run) and not attempts:  # Slurm forgets an array's element that never began
        end = End(EndCause.CANCELLED, Actor.VJOB, started=False)
        awaited = _explain_chain(run, record, JobState.CANCELLED.value)
        return _end(run, record, JobState.CANCELLED.value, awaited or end, None)
    if time.time() - record.submitted < ORPHAN_S or not is_ours(run):
        return record  # a site may hide a colleague's jobs: PrivateData of Slurm
    message = f"{record.scheduler} has forgotten the job, and it left no outcome"
    end = End(EndCause.FORGOTTEN, evidence=(Evidence(SCHEDULER, Sure.INFERRED, text=message),))
    return _end(run, record, JobState.UNKNOWN.value, end, None)


def _end(
    run: RunFolder, record: RunRecord, verdict: str, end: End, judged: Judgement | None
) -> RunRecord:
    # The scheduler calls it FAILED if its ranks saved first.
    verdict = AFTER_A_SAVE.get(end.cause, verdict)
    if end.cause is EndCause.CANCELLED and end.actor is Actor.VJOB:
        end = replace(end, by=read_canceller(run))
    ended = replace(
        record,
        state=records.ENDED,
        verdict=verdict,
        end=end,
        message=explain_end(end, context_of(record.scheduler)),
        outcome=None if judged is None else judged.outcome,
    )
    _save(run, ended)
    return ended


def _ask_canceller(record: RunRecord) -> str:
    """Return the names of the users who cancelled the run's jobs, according to the scheduler; empty
    if not known."""
    scheduler = schedulers.get_scheduler(record.scheduler)
    names = {scheduler.ask_canceller(job.id) for job in record.jobs}
    return " and ".join(sorted(names - {""}))


def _explain_chain(run: RunFolder, record: RunRecord, verdict: str) -> End | None:
    """Return the end of a run cancelled because one before it did not end well; None for others."""
    if not record.after or verdict != JobState.CANCELLED.value or run.attempts():
        return None
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
            return End(
                EndCause.DEPENDENCY_FAILED,
                Actor.SCHEDULER,
                by=Path(path).name,
                started=False,
                evidence=(Evidence(SCHEDULER, text=end),),
            )
    return None


def _save(run: RunFolder, record: RunRecord) -> None:
    """Save the record if possible; on a full disk or for another user's run, it is only shown."""
    if not is_ours(run):
        return
    try:
        write_record(run, record)
    except OSError as error:
        log.warning("%s: the state shown could not be recorded: %s", run.name, error.strerror)


def name_host(run: RunFolder, seat: int) -> str:
    """Return the host of a node of a morphing run, as the node itself reports."""
    value = read_json(run.morph.node(seat))
    return str(value.get("host")) if isinstance(value, dict) else f"node {seat}"


def list_joined(run: RunFolder) -> dict[str, str]:
    """Return the ids of joined jobs that were given to the scheduler, with their groups."""
    found = {}
    for join in read_joins(run.morph):
        said = read_join_job(run.morph, join)
        if said is not None and said.job is not None:
            found[said.job] = join.name
    return found


def find_joined_over(view: RunView) -> set[int]:
    """Return the numbers of joins whose nodes are gone for good, or never come."""
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
    """Cancel the jobs that joined, or these joins; skip those that are over."""
    folder = view.run.morph
    scheduler = schedulers.get_scheduler(view.record.scheduler, view.run)
    over = find_joined_over(view)
    for join in read_joins(folder) if joins is None else joins:
        said = read_join_job(folder, join)
        if said is None or said.job is None or join.number in over:
            continue
        with contextlib.suppress(VjobError):
            scheduler.cancel(said.job)
            write_join_job(folder, join, JoinJob(job=None, reason="cancelled"))


def end_joined(view: RunView) -> None:
    """End the joined jobs of a run that has just ended; after a good end they end themselves."""
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
