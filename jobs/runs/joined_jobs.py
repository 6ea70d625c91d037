"""The jobs that joined a run: what the scheduler says of them, and their end with the run.

They stand beside the run's own jobs, not among them: one that is cancelled or fails is lost nodes,
and says nothing of how the run is or ended.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from varuna_core.records.machine import start_time
from varuna_core.records.morphing import Join, JoinJob, read_join_job, read_joins, write_join_job
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import VjobError
from vjob.jobs.schedulers import choose as schedulers
from vjob.jobs.schedulers.slurm_commands import OVER, JobState

if TYPE_CHECKING:
    from vjob.jobs.runs.find import RunView

FRESH_S = 120.0
"""A `vjob grow` on another host may still be at work for so long, and the scheduler show no job."""


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
    executor = schedulers.choose_executor(view.record.scheduler)
    over = find_joined_over(view)
    for join in read_joins(folder) if joins is None else joins:
        said = read_join_job(folder, join)
        if said is None or said.job is None or join.number in over:
            continue
        with suppress(VjobError):
            executor.cancel(said.job)
            write_join_job(folder, join, JoinJob(job=None, reason="cancelled"))


def end_joined(view: RunView) -> None:
    """The run has just ended. After a good end those that run go home by themselves."""
    states = {info.leader: info.state for info in view.joined}
    is_well = view.record.verdict == JobState.COMPLETED.value
    joins = []
    for join in read_joins(view.run.morph):
        said = read_join_job(view.run.morph, join)
        state = states.get(said.job) if said is not None and said.job is not None else None
        if state is JobState.PENDING or not is_well:
            joins.append(join)
    cancel_joined(view, joins)
