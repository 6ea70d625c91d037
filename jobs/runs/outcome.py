"""Determine how a run ended, from what its ranks left and the scheduler's answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from varuna_core.agent.setup.known_lines import get_context, read_known_lines
from varuna_core.facts.catalogue.ends import refine_end
from varuna_core.facts.catalogue.tables import match_rows
from varuna_core.facts.cause import Actor, End, EndCause
from varuna_core.facts.deciding import choose_end
from varuna_core.facts.known import Evidence
from varuna_core.facts.remedy import render_all
from varuna_core.facts.sentences import REMEDY, SCHEDULER
from varuna_core.records.checkpoints import find_newest
from varuna_core.records.exits import (
    Judgement,
    conclude,
    judge_exits,
    name_signal,
    read_exits,
    read_judgement,
)
from varuna_core.records.files import list_names, read_json
from varuna_core.records.logs.rank_output import find_node_failure
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.plan import Plan, find_store, read_attempt_plan, read_plan
from varuna_core.records.record import is_cancel_asked, read_record
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.jobs.schedulers.job import END_CAUSES, JobState, SchedulerJob

NOT_BEGUN = (EndCause.LAUNCH_FAILED, EndCause.NO_OUTPUT, EndCause.BATCH_KILLED)
LAST_LINES = 400
"""The most last lines of a log that are searched for a known message."""
TELLS_REMEDY = (EndCause.PREFLIGHT, EndCause.CONTAINER)
"""Causes of an end for which the agent that reports them already names the remedy."""
ACTORS = {
    EndCause.COMPLETED: Actor.RANK,
    EndCause.NODE_FAIL: Actor.NODE,
    EndCause.SUPERVISOR_DIED: Actor.UNKNOWN,
    EndCause.SUPERVISOR_NOT_STARTED: Actor.UNKNOWN,
    EndCause.BATCH_KILLED: Actor.UNKNOWN,
}
"""Who or what ended the job, for causes in which the scheduler did not end it."""


def judge_run(run: RunFolder, infos: Sequence[SchedulerJob]) -> Judgement | None:
    """Return how the last attempt ended, judged here if its batch script could not judge it."""
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1]
    list_names(attempt.outcome.parent)  # a listing makes NFS look again
    written = read_judgement(attempt)
    if written is not None:
        return written
    plan = read_attempt_plan(run, attempt.number)
    if plan is None or all(info.state is JobState.COMPLETED for info in infos):
        return None  # the batch script judged; its file is on its way
    exits = read_exits(attempt, plan.world)
    judged = judge_exits(
        plan,
        exits,
        read_json(attempt.stop),
        read_node_names(attempt, plan),
        time.time(),
    )
    if judged.outcome.code == 0:
        words = ", ".join(sorted({info.native_word for info in infos}))
        said = Evidence(SCHEDULER, text=f"the scheduler ended the job: {words}")
        end = End(EndCause.STOPPED, Actor.SCHEDULER, code=1, evidence=(said,))
        return conclude(replace(end, at=judged.end.at, started=True), judged.outcome.missing_ranks)
    killed = [info for info in infos if info.end_cause in NOT_BEGUN]
    if killed and not exits:  # then no node was lost: nobody ever told the ranks to begin
        end = replace(end_of_job(killed[0]), code=judged.outcome.code, at=judged.end.at)
        return conclude(end, judged.outcome.missing_ranks)
    return conclude(refine_end(judged.end), judged.outcome.missing_ranks)


def find_own_checkpoint(run: RunFolder) -> int | None:
    """Return the step of the newest checkpoint if this run wrote it; else None. Submitted again,
    the run would resume from it."""
    plan = read_plan(run.plan)
    store = None if plan is None else find_store(run, plan)
    newest = None if store is None else find_newest(store)
    record = read_record(run)
    if newest is None or record is None or newest.is_of_other(run.name, record.submitted):
        return None
    return newest.step if newest.written >= record.submitted else None


def read_node_names(attempt: AttemptFolder, plan: Plan) -> dict[int, str]:
    """Return host names by node index, for the nodes that have reported."""
    names = {}
    for number in range(plan.num_nodes):
        report = read_json(attempt.node_report(number))
        if isinstance(report, dict) and report.get("host"):
            names[number] = str(report["host"])
    return names


def end_of_job(
    job: SchedulerJob,
    *,
    is_asked: bool = False,
    started: bool | None = None,
    ask_canceller: Callable[[], str] = str,
) -> End:
    """Return the end of a job as known from its scheduler alone.

    `is_asked`: `vjob cancel` was called. `started` is False if the job ended before an attempt
    began. `ask_canceller` returns the user who cancelled it, empty if not known.
    """
    cause = job.end_cause or END_CAUSES.get(job.state, EndCause.UNKNOWN)
    actor, by, text = ACTORS.get(cause, Actor.SCHEDULER), "", job.reason_text or job.native_word
    if cause is EndCause.UNKNOWN:
        actor, text = Actor.UNKNOWN, job.reason_text or f"the scheduler says {job.native_word}"
    elif cause is EndCause.CANCELLED:
        is_asked = is_asked and not job.within
        by = "" if is_asked else ask_canceller()
        actor = Actor.ADMIN if by == "root" else Actor.USER if by else Actor.UNKNOWN
        actor, text = (Actor.VJOB if is_asked else actor), ""
    name = name_signal(job.signal or 0) or f"signal {job.signal}"
    return End(
        cause,
        actor,
        by=by,
        code=job.code or None,
        signal=name if cause is EndCause.BATCH_KILLED else "",
        within=job.within,
        started=started,
        evidence=(Evidence(SCHEDULER, text=text),),
    )


def decide_end(run: RunFolder, judged: Judgement | None, job: End | None) -> End:
    """Return the end of a run, from those of its last attempt and of its job."""
    attempts = run.attempts()
    if job is not None and job.cause is EndCause.NODE_FAIL and attempts:
        failure = find_node_failure(run.batch_logs(), attempts[-1].number)
        job = replace(job, node=job.node if failure is None else failure.node)
    end = choose_end(None if judged is None else judged.end, job)
    if end.cause is EndCause.COMPLETED and is_cancel_asked(run):
        return replace(end, cause=EndCause.CANCELLED, actor=Actor.VJOB, code=0, started=True)
    if judged is None or judged.outcome.code == 0 or end.cause is not judged.end.cause:
        return end
    remedy = "" if end.cause in TELLS_REMEDY else match_container_message(run, judged)
    return replace(end, evidence=(*end.evidence, Evidence(REMEDY, text=remedy))) if remedy else end


def choose_deciding_job(infos: Sequence[SchedulerJob], *, has_cause: bool) -> SchedulerJob:
    """Return the job that decides how a finished run ended: the first job that did not end well. If
    one job of a split run was ended from outside, that job decides, since the others left because
    of it, unless the ranks have a cause of their own.

    It is the first that did not end well. If one job of a split run was ended from outside, it is
    that one, since the others left because of it; not if the ranks have a cause of their own.
    """
    bad = [info for info in infos if info.state is not JobState.COMPLETED]
    from_outside = [info for info in bad if info.end_cause is not None]
    return [*([] if has_cause else from_outside), *bad, *infos][0]


def match_container_message(run: RunFolder, judged: Judgement) -> str:
    """Return the remedy for a known message of the container's runtime that caused this end.

    The message may be in the reason, in the last lines of the node at fault, or, if srun itself
    started the container, in the batch script's output.
    """
    plan, attempts = read_plan(run.plan), run.attempts()
    rows = () if plan is None else read_known_lines(run)
    if plan is None or not rows or not attempts:
        return ""
    logs = run.batch_logs()
    if judged.outcome.culprit_node is not None:
        logs.insert(0, attempts[-1].node_log(judged.outcome.culprit_node, "err"))
    said = ("\n".join(last_lines(path, LAST_LINES)) for path in logs)
    texts = (one.text for one in judged.end.evidence)
    for text in itertools.chain(texts, said):
        row = match_rows(rows, text)
        if row is not None:
            return render_all(row.remedies, get_context(plan))
    return ""
