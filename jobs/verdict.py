"""How a run ended, from what its ranks left and what the scheduler says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from jobs.slurm import JobInfo, JobState
from varuna_core.records.events import read_events
from varuna_core.records.exits import Outcome, judge_exits, read_exits, read_outcome
from varuna_core.records.files import list_names, read_json
from varuna_core.records.plan import Plan, read_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder
from varuna_core.records.stop import read_stop


def judge_run(run: RunFolder, infos: Sequence[JobInfo]) -> Outcome | None:
    """The last attempt's outcome, judged here if its own batch script could not."""
    attempts = run.attempts()
    plan = read_plan(run.plan)
    if not attempts or plan is None:
        return None
    attempt = attempts[-1]
    list_names(attempt.outcome.parent)  # makes NFS look anew
    written = read_outcome(attempt)
    if written is not None:
        return written
    if all(info.state is JobState.COMPLETED for info in infos):
        return None  # the batch script judged; its file is on its way
    outcome = judge_exits(
        plan,
        read_exits(attempt, plan.world),
        read_json(attempt.stop),
        read_node_names(attempt, plan),
        time.time(),
    )
    if outcome.code == 0:
        words = ", ".join(sorted({info.word for info in infos}))
        return replace(outcome, code=1, reason=f"the scheduler ended the job: {words}")
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
    was_asked = any(event.get("kind") == "cancel-asked" for event in read_events(run))
    told = {
        JobState.TIMEOUT.value: "the time limit was reached",
        JobState.PREEMPTED.value: "preempted",
        JobState.CANCELLED.value: "cancelled with vjob cancel" if was_asked else "cancelled",
    }
    attempts = run.attempts()
    if not attempts:
        return f"{told[verdict]} before it started" if verdict in told else ""
    if outcome is None:
        return ""
    stop = read_stop(attempts[-1]) or {}
    if stop.get("kind") == "signal" and stop.get("reason") == outcome.reason and verdict in told:
        return told[verdict]
    if verdict == JobState.COMPLETED.value and was_asked:
        return f"{outcome.reason}, after vjob cancel"
    return outcome.reason
