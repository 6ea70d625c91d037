"""How a run ended, from what its ranks left and what the scheduler says."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from varuna_core.agent.setup.known_lines import get_context, read_known_lines
from varuna_core.facts.catalogue.tables import match_rows
from varuna_core.facts.remedy import render_all
from varuna_core.records.exits import NODE_LOST, Outcome, judge_exits, read_exits, read_outcome
from varuna_core.records.files import list_names, read_json
from varuna_core.records.logs.tail import last_lines
from varuna_core.records.plan import Plan, read_attempt_plan, read_plan
from varuna_core.records.record import BY_VJOB_CANCEL, is_cancel_asked
from varuna_core.records.requests import BY_SCHEDULER, HAS_LEFT, read_stop
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.reasons import explain_launch

FROM_OUTSIDE = frozenset(OVER - {JobState.COMPLETED, JobState.FAILED})
TOLD_SIGNALS = ("SIGTERM", "SIGINT", "SIGKILL")
"""What ranks die of as the scheduler ends their job."""
LAST_LINES = 400
"""Of a log, looked through for a known message."""


def judge_run(run: RunFolder, infos: Sequence[SchedulerJob]) -> Outcome | None:
    """The last attempt's outcome, judged here if its own batch script could not."""
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1]
    list_names(attempt.outcome.parent)  # a listing makes NFS look again
    written = read_outcome(attempt)
    if written is not None:
        return written
    plan = read_attempt_plan(run, attempt.number)
    if plan is None or all(info.state is JobState.COMPLETED for info in infos):
        return None  # the batch script judged; its file is on its way
    exits = read_exits(attempt, plan.world)
    outcome = judge_exits(
        plan,
        exits,
        read_json(attempt.stop),
        read_node_names(attempt, plan),
        time.time(),
    )
    if outcome.code == 0:
        words = ", ".join(sorted({info.native_word for info in infos}))
        return replace(outcome, code=1, reason=f"the scheduler ended the job: {words}")
    killed = [why for why in map(explain_launch, infos) if why]
    if killed and not exits:  # then no node was lost: nobody ever told the ranks to begin
        return replace(outcome, reason=killed[0], culprit_rank=None, culprit_node=None)
    return outcome


def read_node_names(attempt: AttemptFolder, plan: Plan) -> dict[int, str]:
    """Host names by node index, as far as nodes reported."""
    names = {}
    for number in range(plan.num_nodes):
        report = read_json(attempt.node_report(number))
        if isinstance(report, dict) and report.get("host"):
            names[number] = str(report["host"])
    return names


def explain_end(run: RunFolder, verdict: str, outcome: Outcome | None) -> str:
    """One sentence for the record; empty where neither ranks nor scheduler tell enough.

    The ranks know only that the scheduler told them to end; why, the scheduler's word says.
    """
    was_asked = is_cancel_asked(run)
    by_scheduler = {
        JobState.TIMEOUT.value: "the time limit was reached",
        JobState.PREEMPTED.value: "preempted",
        JobState.CANCELLED.value: BY_VJOB_CANCEL if was_asked else "cancelled",
    }
    attempts = run.attempts()
    if not attempts:
        return f"{by_scheduler[verdict]} before it started" if verdict in by_scheduler else ""
    if outcome is None:
        return ""
    if verdict in by_scheduler and not has_own_cause(attempts[-1], outcome):
        return by_scheduler[verdict]
    if verdict == JobState.COMPLETED.value and was_asked:
        return f"{outcome.reason}, after vjob cancel"
    return add_remedy(run, attempts[-1], outcome)


def has_own_cause(attempt: AttemptFolder, outcome: Outcome) -> bool:
    """True where a rank failed by itself, or a node was lost: not the echo of what the scheduler
    did to the job. Whoever it ends first leaves no exit, or is missed by the others."""
    if outcome.culprit_rank is not None and outcome.code != NODE_LOST:
        return outcome.culprit_signal not in TOLD_SIGNALS
    stop = read_stop(attempt) or {}
    said = str(stop.get("reason"))
    is_lost = stop.get("kind") == "lost" and HAS_LEFT not in said and BY_SCHEDULER not in said
    return outcome.code == 0 or is_lost or stop.get("kind") in ("rank", "not-ready")


def find_ended(infos: Sequence[SchedulerJob], *, has_cause: bool) -> SchedulerJob:
    """The job, of those of a run that is over, whose word is the run's.

    The first that did not end well; but a split run whose jobs left because one of them was ended
    from outside has that one's word, unless its ranks have a cause of their own.
    """
    bad = [info for info in infos if info.state is not JobState.COMPLETED]
    from_outside = [info for info in bad if info.state in FROM_OUTSIDE]
    return [*([] if has_cause else from_outside), *bad, *infos][0]


def add_remedy(run: RunFolder, attempt: AttemptFolder, outcome: Outcome) -> str:
    """The reason and, where a known message of the container's runtime is behind it, what to do.

    Such a message may stand in the reason, in the last lines of the culprit's node, or, where srun
    itself started the container, in the batch script's.
    """
    plan = read_plan(run.plan)
    rows = () if plan is None else read_known_lines(run, plan)
    if plan is None or not rows or outcome.code == 0:
        return outcome.reason
    logs = sorted(run.path.glob("scheduler*.out"))
    if outcome.culprit_node is not None:
        logs.insert(0, attempt.node_log(outcome.culprit_node, "err"))
    said = ("\n".join(last_lines(path, LAST_LINES)) for path in logs)
    for text in itertools.chain([outcome.reason], said):
        row = match_rows(rows, text)
        if row is not None:
            remedy = render_all(row.remedies, get_context(plan))
            is_told = not remedy or remedy in outcome.reason
            return outcome.reason if is_told else f"{outcome.reason} -> {remedy}"
    return outcome.reason
