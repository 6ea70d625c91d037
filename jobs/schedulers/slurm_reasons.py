"""Slurm's reasons for a job that pends, or ended before our script began, and what to do.

Up to 22.05, and wherever EnforcePartLimits is off, sbatch accepts what can never start.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from vjob.jobs.schedulers.slurm_commands import JobInfo, JobState

_UNSEEN = "is log_folder on a file system that the nodes see, and may you write there?"
NEVER: tuple[tuple[str, str], ...] = (
    (r"PartitionConfig|PartitionNodeLimit", "its queue has too few nodes: lower count"),
    (r"PartitionTimeLimit", "its queue allows less time: lower cluster.walltime_min"),
    (r"BadConstraints", "no node has these features: check sbatch.constraint with `sinfo -o %f`"),
    (r"InvalidAccount|AccountNotAllowed", "set cluster.account to one that the queue allows"),
    (r"InvalidQOS|QOSNotAllowed", "set cluster.qos to one that the queue allows"),
    (r"DependencyNeverSatisfied", "the job it depends on failed: cancel this one"),
    (r"(Assoc|QOS)\w*Max\w*PerJob\w*", "a limit for single jobs: see `sacctmgr show qos`"),
    (r"JobHeldUser", "it is held: `scontrol release` it"),
    (r"launch.failed.requeued.held", f"no node could start it: {_UNSEEN} Then release it"),
    (r"JobHeldAdmin", "it is held by Slurm: ask an admin"),
)
"""Pattern of the reason, and the remedy."""
LAUNCH: tuple[tuple[str, str], ...] = (
    (r"JobLaunchFailure|launch.failed", f"the node could not start the batch script: {_UNSEEN}"),
    # How slurmd spells that it could not make the output file: its error 4021 & 127.
    (r"RaisedSignal:53\b", f"the batch script's output could not be made on its node: {_UNSEEN}"),
)
"""The same for a job that ended without a word of our script."""
_NO_OUTPUT = "RaisedSignal:53"
_NO_START = "0:53"


def explain_reason(infos: Sequence[JobInfo]) -> str:
    """One sentence for a job that will not start by itself; empty for all others."""
    for info in infos:
        if info.state is not JobState.PENDING:
            continue
        for pattern, remedy in NEVER:
            if re.match(pattern, info.reason):
                return f"job {info.id} will not start: {info.reason}; {remedy}"
    return ""


def explain_launch(info: JobInfo) -> str:
    """One sentence for a job whose batch script never ran, or was killed; empty for all others."""
    killer = find_killer(info)
    if killer:  # Slurm calls that a launch failure too
        return f"the batch script was ended by {killer}"
    # sacct keeps the reason of its pending, and says it in the exit code alone.
    reasons = [info.reason, _NO_OUTPUT if info.exit_code == _NO_START else ""]
    for reason in reasons:
        for pattern, remedy in LAUNCH:
            if re.match(pattern, reason):
                return f"{reason}: {remedy}"
    return ""


def find_killer(info: JobInfo) -> str:
    """The signal that ended the batch script of a failed job; empty where none did."""
    match = re.fullmatch(r"0:(\d+)", info.exit_code)
    if match is None or info.state is not JobState.FAILED or info.exit_code in ("0:0", _NO_START):
        return ""
    try:
        return signal.Signals(int(match[1])).name
    except ValueError:
        return f"signal {match[1]}"
