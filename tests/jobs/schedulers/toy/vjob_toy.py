"""A scheduler of another distribution: a table of jobs, a JSON file each, on this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import vjob_toy_job as table

from varuna_core.facts.known import Evidence, Known, NotKnown, Value
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers.base import (
    FLOOR_S,
    NO_CHANGES,
    Capabilities,
    Scheduler,
    ScriptRequest,
    Submission,
)
from vjob.jobs.schedulers.job import END_CAUSES, OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.local.srun import render_stand_ins

STATES = {
    "queued": JobState.PENDING,
    "busy": JobState.RUNNING,
    "fine": JobState.COMPLETED,
    "broken": JobState.FAILED,
    "stopped": JobState.CANCELLED,
    "late": JobState.TIMEOUT,
}
"""The table's own words; another one is UNKNOWN, and shown as it is."""


class ToyScheduler(Scheduler):
    """Jobs of the table in $TOY_TABLE."""

    name = "toy"
    title = "the toy"
    can = Capabilities(one_host=True, has_queue=True, dependencies=False)

    def find_obstacle(self) -> str:
        return "" if "TOY_TABLE" in os.environ else "TOY_TABLE is not set; set it to a folder"

    def render_header(self, asked: ScriptRequest) -> list[list[str]]:
        return [[f"#TOY name={asked.name}"], *([] for _ in asked.groups[1:])]

    def render_prologue(self, asked: ScriptRequest) -> list[str]:
        return ["export SLURM_JOB_ID=$TOY_JOB", *render_stand_ins()]

    def make_command(self, submission: Submission) -> list[str]:
        limit_s = submission.limits.walltime_s
        run, script = submission.run, submission.script
        words = [run.name, str(script), str(run.scheduler_log(submission.group))]
        return [
            sys.executable,
            table.__file__,
            *words,
            *([] if limit_s is None else [f"{limit_s}"]),
        ]

    def poll(
        self,
        jobs: Sequence[str],
        *,
        user: int | None = None,
        floor_s: float = FLOOR_S,
        after: Mapping[str, float] = NO_CHANGES,
    ) -> dict[str, list[SchedulerJob]]:
        rows = {job: table.read(job) for job in jobs}
        return {job: [parse_row(job, row)] if row else [] for job, row in rows.items()}

    def cancel(self, job: str) -> None:
        row = table.read(job)
        if row.get("state") != "busy":
            raise VjobError(f"job {job} is {row.get('state', 'not in the table')}")
        table.write(job, {**row, "asked": "stopped"})
        os.kill(row["pid"], signal.SIGTERM)

    def ask_time_left(self, job: str) -> Known[float]:
        row = table.read(job)
        return parse_row(job, row).left if row else NotKnown(f"the table has no job {job}")

    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        found: dict[str, list[SchedulerJob]] = {}
        for path in sorted(table.find_folder().glob("*.json")):
            job, row = path.stem, json.loads(path.read_text())
            if STATES.get(row["state"]) not in OVER:
                found.setdefault(row["run"], []).append(parse_row(job, row))
        return found


def parse_row(job: str, row: dict[str, Any]) -> SchedulerJob:
    """A row of the table."""
    state, now = STATES.get(row["state"], JobState.UNKNOWN), time.time()
    left: Known[float] = NotKnown("it has no limit")
    if row.get("limit_s") is not None:
        seconds = max(0.0, row["start"] + row["limit_s"] - now)
        left = Value(seconds, (Evidence("the table of the toy"),))
    return SchedulerJob(
        id=job,
        state=state,
        native_word=row["state"],
        nodes=(os.uname().nodename,),
        code=row.get("code"),
        start=row["start"],
        left=left,
        end_cause=END_CAUSES.get(state),
        asked=now,
    )
