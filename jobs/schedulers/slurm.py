"""Slurm as the scheduler: submits with sbatch; finds a job by squeue, then scontrol, then sacct,
as accounting is not everywhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from varuna_core.records.machine import clean_environment
from varuna_core.records.runfolder import RunFolder
from vjob.jobs import process
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.schedulers import slurm_commands as slurm
from vjob.jobs.schedulers.base import Scheduler, Submission
from vjob.jobs.schedulers.slurm_commands import COMMENT_PREFIX, JobInfo
from vjob.jobs.schedulers.slurm_nodes import IdleNode, build_sinfo_idle_command, parse_idle_nodes


class SlurmScheduler(Scheduler):
    """The cluster's scheduler."""

    name = "slurm"

    def make_command(self, submission: Submission) -> list[str]:
        """sbatch in the environment of a fresh login, whatever ours is; ended after `SUBMIT_S`."""
        script = submission.script
        text = script.read_text(encoding="utf-8")
        sbatch = slurm.build_sbatch_command(
            str(script),
            str(script.parent),
            after=submission.after,
            expedite="#SBATCH --requeue\n" in text and _can_expedite(),
        )
        words = [f"{k}={v}" for k, v in clean_environment(os.environ).items()]
        return ["timeout", f"{SUBMIT_S:g}", "sh", "-c", SHIELD, "sh", *words, *sbatch]

    def explain_failure(self, code: int, text: str) -> VjobError:
        if code == TIMED_OUT:
            return explain_failure(f"timed out after {SUBMIT_S:g} s")
        return explain_failure(text)

    def test(self, run: RunFolder, group: str | None, text: str) -> str:
        """`sbatch --test-only`: Slurm's estimate of when and where the job would start."""
        with tempfile.TemporaryDirectory(prefix="vjob-") as folder:
            script = Path(folder) / run.batch_script(group).name
            script.write_text(text, encoding="utf-8")
            command = slurm.build_sbatch_command(str(script), folder, test_only=True)
            result = process.run(command, env=clean_environment(os.environ))
        said = (result.err + result.out).strip()
        if result.code != 0:
            raise VjobError(explain_refusal(said))
        return said

    def poll(self, jobs: Sequence[str]) -> dict[str, list[JobInfo]]:
        """squeue for all in one call; what it has forgotten from scontrol, then sacct."""
        found: dict[str, list[JobInfo]] = {job: [] for job in jobs}
        if not jobs:
            return found
        text = _ask_surely(slurm.build_squeue_command(jobs))
        _fill(found, slurm.parse_squeue_output(text))
        for job in [job for job in jobs if not found[job]]:
            text = _ask_surely(slurm.build_show_job_command(job))
            _fill(found, slurm.parse_show_job_output(text))
        forgotten = [job for job in jobs if not found[job]]
        if forgotten:
            text = _ask(slurm.build_sacct_command(forgotten))
            # sacct lags: it said PENDING of jobs that ran (22.05). It is asked for the dead alone.
            ended = [info for info in slurm.parse_sacct_output(text) if info.state in slurm.OVER]
            _fill(found, ended)
        # squeue lists components in no order of ours.
        return {job: sorted(infos, key=lambda info: info.component) for job, infos in found.items()}

    def find_lost_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """The nodes among these that Slurm itself calls lost; none where it does not answer."""
        return slurm.parse_lost_nodes(_ask(slurm.build_sinfo_command(nodes)))

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        return parse_idle_nodes(_ask(build_sinfo_idle_command(queues)))

    def find_left_s(self, job: str) -> float | None:
        return slurm.parse_time_left(_ask(slurm.build_time_left_command(job)))

    def cancel(self, job: str) -> None:
        _tell(slurm.build_scancel_command(job))

    def find_orphans(self) -> dict[str, list[JobInfo]]:
        user = str(os.getuid())
        text = _ask_surely(slurm.build_squeue_command([], user=user))
        found: dict[str, list[JobInfo]] = {}
        for info in slurm.parse_squeue_output(text):
            if info.comment.startswith(COMMENT_PREFIX):
                found.setdefault(info.comment[len(COMMENT_PREFIX) :], []).append(info)
        return found


def _can_expedite() -> bool:
    from vjob.jobs.schedulers.slurm_settings import read_slurm_config

    return slurm.can_expedite(read_slurm_config() or {})


REFUSALS = (
    (
        "invalid partition",
        "the queue does not exist: `sinfo -s` lists them; set cluster.nodes[].queue",
    ),
    ("invalid account", "set cluster.account to one of `sacctmgr show assoc user=$USER`"),
    ("invalid qos", "set cluster.qos to one that your account has"),
    ("invalid generic resource", "no node has these GPUs: see `sinfo -o '%P %G'`; set gpus"),
    ("node count specification invalid", "the queue has fewer nodes: lower count"),
    (
        "requested node configuration is not available",
        "no node of the queue has all that was asked: `sinfo -o '%P %N %c %m %G'` shows CPUs, "
        "memory and GPUs; lower cpus or memory_gb, or ask for other gpus",
    ),
    # Before the next: the words of any such limit end with "user's size and/or time limits".
    (
        "submitjob",
        "so many jobs may not wait and run at once (MaxSubmitJobs, `sacctmgr show assoc "
        "user=$USER` or `show qos`): submit fewer, or later",
    ),
    ("maxwall", "lower cluster.walltime_min, or take another qos"),
    (
        "violates accounting/qos policy",
        "a limit of your account or QOS: `sacctmgr show assoc user=$USER`, `sacctmgr show qos`",
    ),
    ("time limit", "lower cluster.walltime_min, or take another queue"),
    (
        "unable to contact slurm controller",
        "the controller is down or SLURM_CONF points elsewhere: try `scontrol ping`",
    ),
    (
        "dependency problem",
        "Slurm has forgotten a job that this one is to wait for: `vjob status` of that run shows "
        "how it ended; then submit again",
    ),
    (
        "configuration source",
        "Slurm's commands are here and know no cluster: submit where `sinfo` answers, or set "
        "cluster.scheduler: local to run on this machine",
    ),
)
"""What sbatch says when it refuses, and what to do."""


SUBMIT_S = 600.0
"""A controller under load answers after minutes; Slurm's own patience ends sooner."""
TIMED_OUT = 124
"""What `timeout` exits with where it ended the command."""
SHIELD = 'trap "" INT; exec env -i "$@" </dev/null'
"""Ctrl-C goes to the whole foreground group: sbatch must not die of it after its job was made."""

UNCERTAIN = ("timed out", "zero bytes were transmitted", "unexpected message")
"""What sbatch says where the controller may have made the job and only its answer was lost."""


def explain_failure(text: str) -> VjobError:
    """The error for what a failed sbatch said."""
    if any(words in text.lower() for words in UNCERTAIN):
        return UncertainError(
            f"sbatch had no answer, and the job may exist all the same: {text.strip()[-300:]}\n"
            "  `vjob list` adopts it if so, and calls the run refused if not"
        )
    return VjobError(explain_refusal(text))


def explain_refusal(text: str) -> str:
    """sbatch's own words, indented, and the remedy below."""
    told = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in told if "error" in line.lower() or "sbatch" in line] or told
    said = "".join(f"\n    {line}" for line in lines)
    remedies = [f"\n  {remedy}" for words, remedy in REFUSALS if words in text.lower()]
    return f"sbatch refused the job:{said}{''.join(remedies[:1])}"


def _ask(command: Sequence[str]) -> str:
    """A question's answer; empty where the tool is not there or out of order."""
    try:
        return process.run(command, env=process.tool_environment(os.environ)).out
    except VjobError:
        return ""


def _ask_surely(command: Sequence[str]) -> str:
    """The controller's answer; empty where it knows no such job, UncertainError without one."""
    try:
        result = process.run(command, env=process.tool_environment(os.environ))
    except VjobError as error:
        raise UncertainError(str(error)) from None
    if result.code != 0 and "invalid job id" not in result.err.lower():
        raise UncertainError(f"{command[0]} failed: {result.err.strip()[:300]}")
    return result.out


def _tell(command: Sequence[str]) -> None:
    result = process.run(command, env=process.tool_environment(os.environ))
    if result.code != 0:
        raise VjobError(f"{' '.join(command)}: {(result.err or result.out).strip()}")


def _fill(found: dict[str, list[JobInfo]], infos: Sequence[JobInfo]) -> None:
    for info in infos:
        if info.leader in found:
            found[info.leader].append(info)
