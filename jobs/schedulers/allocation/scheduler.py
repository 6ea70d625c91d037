"""A scheduler for the job that this shell is in: runs are steps of this job.

A run's id joins the id of the Slurm job and a number of ours, `4711.L3`. It is not the id of a
Slurm step, since a run has two steps, and more with restarts. The state of a run is read from its
supervisor's state file, unless the enclosing job has ended: then Slurm is asked how.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import NodeState
from varuna_core.records.machine import KEPT, identify_machine
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.allocation import held_job
from vjob.jobs.schedulers.base import (
    FLOOR_S,
    NO_CHANGES,
    SELDOM_S,
    Capabilities,
    ScriptRequest,
)
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.jobs.schedulers.job import END_CAUSES, OVER, JobState, SchedulerJob
from vjob.jobs.schedulers.local.scheduler import LocalScheduler
from vjob.jobs.schedulers.slurm.commands import parse_state
from vjob.jobs.schedulers.slurm.scheduler import SlurmScheduler

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import JobConf

RENEW = """\
for name in "${!SLURM_@}"; do # of the step that runs this script; srun would take them for options
  case $name in
    SLURM_CONF | SLURM_JWT | SLURM_JOB_ID | SLURM_LAUNCH_NODE_IPADDR) ;;
    *) unset "$name" ;;
  esac
done"""


def name_allocation(job: str) -> str:
    """Return the id of the Slurm job from the id of a run inside this job."""
    return job.partition(".")[0]


def cancel_marker(run: RunFolder, job: str) -> Path:
    """Return the path of a job's marker file: any host can make this file to ask the supervisor to
    end the job."""
    return run.path / f"local-cancel.{job}"


class AllocationScheduler(LocalScheduler):
    """Scheduler that runs batch scripts as steps of the job that this shell is in."""

    name = "allocation"
    title = "the job of this shell"
    can = Capabilities(het=True, starts_steps=True, time_limit=False, inside_job=True)
    supervisor = "vjob.jobs.schedulers.allocation.supervisor"

    def find_obstacle(self) -> str:
        if not held_job.find_job_id(os.environ):
            return "this shell is in no job of Slurm: SLURM_JOB_ID is not set"
        return "" if shutil.which("srun") is not None else "srun is not on PATH"

    def adapt(
        self, conf: JobConf, written: Collection[str], *, is_preview: bool
    ) -> tuple[JobConf, list[str]]:
        job = held_job.find_job_id(os.environ)
        if is_preview and not job:
            return conf, []
        parts = held_job.ask_held_job(job, floor_s=held_job.JUST_S)
        return held_job.adapt_conf(conf, written, job, parts)

    def render_prologue(self, asked: ScriptRequest) -> list[str]:
        """Return shell lines that clear the step's variables and restore SLURM_HET_SIZE, since
        inside a step srun would not know that the job has several components."""
        size = len(asked.groups)
        return [*RENEW.splitlines(), *([f"export SLURM_HET_SIZE={size}"] if size > 1 else [])]

    def list_step_options(self, asked: ScriptRequest) -> list[str]:
        options = [
            f"--job-name={asked.run} # what squeue --steps shows",
            "--relative=0         # the job's first nodes; this script runs on the first of them",
        ]
        if held_job.is_step(os.environ):
            options.append("--overlap            # the step of the shell has the job's resources")
        return options

    def make_job_id(self) -> str:
        return f"{held_job.find_job_id(os.environ)}.{index.next_local_job()}"

    def list_kept(self) -> Collection[str]:
        return {*KEPT, "XDG_STATE_HOME"}

    def poll(
        self,
        jobs: Sequence[str],
        *,
        user: int | None = None,
        floor_s: float = FLOOR_S,
        after: Mapping[str, float] = NO_CHANGES,
    ) -> dict[str, list[SchedulerJob]]:
        """Read the state files of the jobs; ask Slurm about the enclosing job of those that are not
        over."""
        found = super().poll(jobs)
        for job, infos in found.items():
            if infos:
                state, since = self.read_state(job) or {}, after.get(job, 0.0)
                found[job] = [_complete(infos[0], state, user, floor_s, since)]
        return found

    def cancel(self, job: str) -> None:
        state = self.read_state(job) or {}
        if self.run is None or state.get("machine") in (None, identify_machine()):
            super().cancel(job)
        else:
            cancel_marker(self.run, job).touch(mode=0o600)

    def build_beside(
        self,
        job: str,
        parts: Sequence[tuple[int | None, int]],
        group: str,
        command: Sequence[str],
        names: Sequence[str] = (),
    ) -> list[str]:
        allocation = name_allocation(job)
        return SlurmScheduler().build_beside(allocation, parts, group, command, names)

    def explain_step(self, text: str) -> str:
        return SlurmScheduler().explain_step(text)

    def build_shell(
        self, job: SchedulerJob, host: str, group: str, command: Sequence[str], *, tty: bool
    ) -> list[str]:
        part = _find_part(name_allocation(job.id), host)
        return SlurmScheduler().build_shell(part, host, group, command, tty=tty)

    def ask_node_states(
        self, nodes: Sequence[str], *, floor_s: float = SELDOM_S
    ) -> list[NodeState]:
        return SlurmScheduler().ask_node_states(nodes, floor_s=floor_s)

    def ask_canceller(self, job: str) -> str:
        return SlurmScheduler().ask_canceller(name_allocation(job))

    def spell_cancel(self, jobs: Sequence[str]) -> str:
        return f"vjob cancel {' '.join(jobs)}"

    def find_other_machine(self, run: RunFolder, group: str | None) -> str:
        return ""  # steps are started from anywhere

    def examine(self) -> list[Diagnosis]:
        return held_job.examine(os.environ)


def _find_part(allocation: str, host: str) -> SchedulerJob:
    """Return the allocation's component that has the node; raise InputError if none has it now."""
    infos = SlurmScheduler().poll([allocation])[allocation]
    for info in infos:
        if host in info.nodes:
            return info
    raise InputError(f"job {allocation} no longer has {host}")


def _complete(
    info: SchedulerJob, state: dict[str, Any], user: int | None, floor_s: float, after: float
) -> SchedulerJob:
    """Return the run's state with the time left of the enclosing job, or that job's end."""
    allocation, word = name_allocation(info.id), str(state.get("within") or "")
    if word:
        return end_within(info, allocation, parse_state(word), word)
    has_died = info.end_cause is EndCause.SUPERVISOR_DIED
    if info.state in OVER and not has_died:
        return info
    is_here = state.get("machine") in (None, identify_machine())
    try:
        found = SlurmScheduler().poll(
            [allocation], user=user, floor_s=floor_s, after={allocation: after}
        )
    except UncertainError as error:
        if is_here and not has_died:
            return info
        if allocation not in error.found:
            raise
        found = {allocation: list(error.found[allocation])}
    around = next(iter(found[allocation]), None)
    if around is not None and around.state not in OVER:
        info = replace(info, ends=around.ends, preempted=around.preempted)
        return replace(info, left=around.left, asked=around.asked)
    if is_here and not has_died:
        return info  # its supervisor says so in a moment
    if around is None:
        return replace(info, state=JobState.UNKNOWN, end_cause=EndCause.FORGOTTEN)
    return end_within(info, allocation, around.state, around.native_word)


def end_within(info: SchedulerJob, allocation: str, state: JobState, word: str) -> SchedulerJob:
    """Return the state of a run that ended because the enclosing job ended. A job that completed or
    failed by itself interrupted the run too, which then counts as cancelled."""
    if state in (JobState.COMPLETED, JobState.FAILED):
        cause, state = EndCause.ALLOCATION_ENDED, JobState.CANCELLED
    else:
        cause = END_CAUSES.get(state, EndCause.ALLOCATION_ENDED)
    reason = f"job {allocation}, which the run was inside, is {word}"
    return replace(
        info, state=state, native_word=word, reason_text=reason, end_cause=cause, within=allocation
    )
