"""This machine as a scheduler, for local runs and runs on a list of machines: the same scripts,
under a supervisor of our own.

The supervisor (supervisor.py) runs the batch script with stand-ins for srun and scontrol
(srun.py) first on PATH; the "nodes" are process groups here. It is detached, so it survives
the terminal, and writes its state to local.json (local.<group>.json) in the run folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from varuna_core.facts.cause import EndCause
from varuna_core.launch.errors import LaunchError
from varuna_core.launch.machines import Machine, read_machine_list
from varuna_core.launch.process import local_environment
from varuna_core.launch.ssh import keep_ssh_agent
from varuna_core.records.files import as_number, as_whole, read_json, write_json
from varuna_core.records.machine import identify_machine, start_time
from varuna_core.records.record import JobLimits
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import InputError, VjobError
from vjob.jobs.schedulers import run_index as index
from vjob.jobs.schedulers.base import FLOOR_S, NO_CHANGES, Capabilities, Scheduler, Submission
from vjob.jobs.schedulers.job import END_CAUSES, OVER, JobState, SchedulerJob, parse_name
from vjob.jobs.schedulers.node_names import expand_nodes

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import JobConf


def read_machines(path: str) -> tuple[Machine, ...]:
    """Read the file that cluster.machine_list names; raise InputError if it is not valid."""
    try:
        return read_machine_list(Path(path))
    except LaunchError as error:
        raise InputError(f"cluster.machine_list: {error}") from None


START_S = 30.0
"""Seconds after which a supervisor that has not written its state counts as never started."""
NOT_STARTED = "scheduler.out of the run says why, unless the run folder had no room"
POLL_S = 0.1
NUMBERS = ("pid", "time", "restarts")
"""Fields of a state file that must be numbers."""
DETACH = """\
job=$1 log=$2; shift 2
setsid "$@" </dev/null >>"$log" 2>&1 &
echo "$job"
"""


def state_file(run: RunFolder, group: str | None) -> Path:
    """Return the path of the file in which the supervisor of a job keeps its state."""
    return run.path / (f"local.{group}.json" if group else "local.json")


def read_limits(run: RunFolder, group: str | None) -> JobLimits:
    """Read the limits of a job from its state file."""
    state = _read_file(state_file(run, group))
    walltime_s = as_number(state.get("walltime_s"))
    return JobLimits(
        walltime_s=walltime_s,
        warn_s=as_number(state.get("warn_s")) or 0.0,
        may_requeue=state.get("may_requeue") is True,
    )


def is_alive(state: dict[str, Any]) -> bool:
    """Return True while the supervisor that wrote this state is running."""
    pid = int(state.get("pid") or 0)
    began = start_time(pid) if pid > 0 else None
    return began is not None and began == state.get("pid_start")


class LocalScheduler(Scheduler):
    """Scheduler that runs batch scripts on this machine.

    Job ids are counted per user and index, so L1 of another user is another job. The jobs of a run
    are therefore looked up only in the run's own folder.
    """

    name = "local"
    title = "this machine"
    can = Capabilities(one_host=True)
    supervisor = "vjob.jobs.schedulers.local.supervisor"
    """The module that supervises a job."""

    def make_job_id(self) -> str:
        """Return the id of a new job."""
        return index.next_local_job()

    def list_kept(self) -> Collection[str]:
        """Return the names of the shell's variables that the supervisor inherits."""
        return {*local_environment(os.environ), *keep_ssh_agent(os.environ)} - {"SLURM_JWT"}

    def make_command(self, submission: Submission) -> list[str]:
        """Return a shell command that starts the supervisor in a session of its own and prints the
        job's id."""
        run, group = submission.run, submission.group
        waits = {
            "succeeded": [_find_awaited(job) for job in submission.after.succeeded],
            "ended": [_find_awaited(job) for job in submission.after.ended],
        }
        try:
            job = self.make_job_id()
            index.add_job(run, job)
        except OSError as error:
            raise VjobError(
                f"{index.folder()} cannot be written: {error.strerror}; local jobs are counted "
                "there: set XDG_STATE_HOME to a folder that you can write"
            ) from None
        limits = asdict(submission.limits)
        state = {"job": job, "state": "PENDING", "time": time.time(), "after": waits, **limits}
        write_json(state_file(run, group), state)
        command = process.build_own_command("-m", self.supervisor, str(run.path), job, group or "")
        words = process.build_clean_command(command, sorted(self.list_kept()))
        return ["sh", "-c", DETACH, "sh", job, str(run.scheduler_log(group)), *words]

    def poll(
        self,
        jobs: Sequence[str],
        *,
        user: int | None = None,
        floor_s: float = FLOOR_S,
        after: Mapping[str, float] = NO_CHANGES,
    ) -> dict[str, list[SchedulerJob]]:
        """Read the jobs' state files, which costs little, so the answer is always current."""
        states = {job: self.read_state(job) for job in jobs}
        return {job: [judge_state(state)] if state else [] for job, state in states.items()}

    def cancel(self, job: str) -> None:
        deadline = time.monotonic() + START_S
        state = self.read_state(job)
        while state and not state.get("pid") and time.monotonic() < deadline:
            time.sleep(POLL_S)
            state = self.read_state(job)
        if state is None or not state.get("pid"):
            raise VjobError(f"job {job} has no supervisor; scheduler.out of the run says why")
        if state.get("machine") != identify_machine():
            host = str(state.get("machine")).partition(" ")[0]
            raise VjobError(f"job {job} runs on {host}; run this command there")
        if not is_alive(state):
            raise VjobError(f"job {job} is no longer running")
        os.kill(int(state["pid"]), SIGTERM)

    def can_wait_for(self, other: Scheduler) -> bool:
        return isinstance(other, LocalScheduler)  # both read state files

    def find_other_machine(self, run: RunFolder, group: str | None) -> str:
        state = read_json(state_file(run, group))
        machine = state.get("machine") if isinstance(state, dict) else None
        if machine is None or machine == identify_machine():
            return ""
        return str(machine).partition(" ")[0]

    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        return {}  # the supervisor's state file lies in the run folder itself

    def read_state(self, job: str) -> dict[str, Any] | None:
        path = find_state_file(self.run, job) if self.run is not None else _find_indexed(job)
        return None if path is None else _read_file(path)


class MachinesScheduler(LocalScheduler):
    """Scheduler for a list of machines: the batch script runs here, the agents over ssh."""

    name = "ssh"
    can = Capabilities(remote_shell=True, time_limit=False)

    def adapt(
        self, conf: JobConf, written: Collection[str], *, is_preview: bool
    ) -> tuple[JobConf, list[str]]:
        """Return the conf, with `requeue` set if the run may morph, since there is no queue to wait
        in.

        A preview does not read the list, since it may be made on another host. A run that may morph
        watches the list afterwards (varuna_core/launch/watch.py); any other run reads it at each
        attempt (varuna_core/launch/step.py).
        """
        listed, wanted = conf.cluster.machine_list, sum(group.count for group in conf.cluster.nodes)
        found = wanted if is_preview or listed is None else len(read_machines(listed))
        if found < wanted and not conf.morph.enabled:
            raise InputError(
                f"cluster.machine_list: {listed} lists {found} of the {wanted} machines of "
                "cluster.nodes; add the others, or change count"
            )
        requeue = conf.cluster.requeue or conf.morph.enabled
        return replace(conf, cluster=replace(conf.cluster, requeue=requeue)), []


def find_state_file(run: RunFolder, job: str) -> Path | None:
    """Return the state file of a job of this run; None if there is none."""
    found = run.local_states()
    return next((path for path in found if _read_file(path).get("job") == job), None)


def _find_indexed(job: str) -> Path | None:
    """Return the state file of a job in this user's index; None if there is none."""
    run = index.find_job(job)
    return None if run is None else find_state_file(run, job)


def _find_awaited(job: str) -> str:
    """Return the state file of a job that another job is to wait for."""
    path = _find_indexed(job)
    if path is None:
        raise VjobError(f"this run would wait for job {job}, whose run folder no longer exists")
    return str(path)


def _read_file(path: Path) -> dict[str, Any]:
    """Read a state file, dropping fields that should be numbers and are not."""
    state = read_json(path)
    found = state if isinstance(state, dict) else {}
    return {k: v for k, v in found.items() if k not in NUMBERS or as_number(v) is not None}


def judge_state(state: dict[str, Any]) -> SchedulerJob:
    """Return the job's state from its state file; a job whose supervisor has died has failed."""
    word, reason = str(state.get("state", "")), str(state.get("reason", ""))
    is_here = state.get("machine") == identify_machine()
    cause = None
    if word in ("PENDING", "RUNNING") and is_here and not is_alive(state):
        word, reason = "FAILED", "the supervisor of this job exited without recording an end"
        cause = EndCause.SUPERVISOR_DIED
    if word == "PENDING" and not state.get("pid"):
        reason = "its supervisor starts"
        if time.time() - state.get("time", 0) > START_S:
            word, reason, cause = "FAILED", NOT_STARTED, EndCause.SUPERVISOR_NOT_STARTED
    code = str(state.get("exit_code", "")).partition(":")[0]
    return SchedulerJob(
        id=str(state.get("job", "")),
        state=parse_name(word),
        native_word=word,
        nodes=tuple(expand_nodes(str(state.get("nodes", "")))),
        reason_text=reason,
        restarts=int(state.get("restarts", 0)),
        code=as_whole(code),
        end_cause=cause or END_CAUSES.get(parse_name(word)),
    )


def is_waiting(after: dict[str, list[str]]) -> bool:
    """Return True while a job of these state files is not over; a job without a folder is over."""
    states = [_read_file(Path(path)) for paths in after.values() for path in paths]
    return any(state and judge_state(state).state not in OVER for state in states)


def find_failed(after: dict[str, list[str]]) -> str:
    """Return the name of a run whose job had to succeed and did not; empty if there is none."""
    for path in map(Path, after.get("succeeded", ())):
        state = _read_file(path)
        end = judge_state(state).state if state else JobState.UNKNOWN
        if not state or end in OVER - {JobState.COMPLETED}:
            return path.parent.name
    return ""
