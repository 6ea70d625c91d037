"""Ends of a run on this machine are named as what they are, in words of one machine."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest

from varuna_core.facts.catalogue.ends import list_remedies
from varuna_core.facts.cause import End, EndCause
from varuna_core.facts.known import Evidence
from varuna_core.facts.remedy import Context, render_all
from varuna_core.facts.sentences import SCHEDULER, describe_end
from varuna_core.records.machine import identify_machine, start_time
from vjob.jobs.schedulers.job import JobState
from vjob.jobs.schedulers.local.scheduler import START_S, judge_state

OF_A_CLUSTER = re.compile(r"queue|nodes\[|exclude|squeue|scontrol|sinfo|node was lost|admin")
HERE = {"machine": identify_machine(), "pid": os.getpid(), "pid_start": start_time(os.getpid())}


@pytest.mark.parametrize(
    ("state", "found", "cause", "reason"),
    [
        ({"state": "PENDING"}, JobState.PENDING, None, "its supervisor starts"),
        (
            {"state": "PENDING", "time": time.time() - 2 * START_S},
            JobState.FAILED,
            EndCause.SUPERVISOR_NOT_STARTED,
            "scheduler.out of the run says why, unless the run folder had no room",
        ),
        ({**HERE, "state": "RUNNING"}, JobState.RUNNING, None, ""),
        (
            {**HERE, "state": "RUNNING", "pid_start": "0"},
            JobState.FAILED,
            EndCause.SUPERVISOR_DIED,
            "the supervisor of this job exited without recording an end",
        ),
        ({**HERE, "state": "TIMEOUT"}, JobState.TIMEOUT, EndCause.TIME_LIMIT, ""),
        ({**HERE, "state": "CANCELLED"}, JobState.CANCELLED, EndCause.CANCELLED, ""),
    ],
)
def test_the_state_file_tells_what_became_of_a_job(
    state: dict[str, Any], found: JobState, cause: EndCause | None, reason: str
) -> None:
    job = judge_state({"job": "L1", "time": time.time(), **state})
    assert (job.state, job.end_cause, job.reason_text) == (found, cause, reason)


@pytest.mark.parametrize(
    ("cause", "says", "advice"),
    [
        (
            EndCause.SUPERVISOR_DIED,
            "the job's supervisor exited without recording an end",
            "submit again",
        ),
        (
            EndCause.SUPERVISOR_NOT_STARTED,
            "the supervisor of the job did not start (why)",
            "look at `vjob logs JOB`",
        ),
        (EndCause.NO_ROOM, "why", "make room"),
        (EndCause.TIME_LIMIT, "the time limit was reached", "raise cluster.walltime_min"),
        (EndCause.OOM_HOST, "the memory of a node was used up", "lower the number of data work"),
        (EndCause.AGENT_DIED, "why", "submit again"),
        (EndCause.NODE_SILENT, "why", "submit again"),
    ],
)
def test_an_end_here_has_a_sentence_and_a_remedy(cause: EndCause, says: str, advice: str) -> None:
    end = End(cause, evidence=(Evidence(SCHEDULER, text="why"),))
    assert describe_end(end).startswith(says) or cause is EndCause.OOM_HOST
    assert render_all(list_remedies(end), Context.LOCAL).startswith(advice)


@pytest.mark.parametrize("cause", EndCause)
def test_no_remedy_of_an_end_here_is_of_a_cluster(cause: EndCause) -> None:
    assert not OF_A_CLUSTER.search(render_all(list_remedies(End(cause)), Context.LOCAL))
