"""Slurm's reasons for a job that pends, or ended before our script began, and what to do.

Up to 22.05, and wherever EnforcePartLimits is off, sbatch accepts what can never start.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

from vjob.jobs.schedulers.job import JobInfo, JobState

_UNSEEN = "is log_folder on a file system that the nodes see, and may you write there?"
_SINFO = "`sinfo -R` shows why"


class Fate(Enum):
    """What becomes of a job that pends for a reason."""

    PASSES = "passes"
    """Time, other jobs or an admin end it; the job then starts as it is."""
    NEVER = "never"
    """The job, or what it asks for, has to be changed first."""
    ENDED = "ended"
    """No reason to wait: how a job ended, kept by Slurm in the same field."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One row of the table: a reason of Slurm, its fate, and its meaning or the remedy."""

    pattern: str
    fate: Fate
    text: str


def _passes(pattern: str, text: str) -> Reason:
    return Reason(pattern=pattern, fate=Fate.PASSES, text=text)


def _never(pattern: str, text: str) -> Reason:
    return Reason(pattern=pattern, fate=Fate.NEVER, text=text)


REASONS: tuple[Reason, ...] = (
    _never("PartitionConfig", "its queue has fewer nodes or allows less time than it asks for: "
           "lower count or cluster.walltime_min (see `scontrol show partition`)"),
    _never("PartitionNodeLimit", "its queue allows or has fewer nodes: lower count"),
    _never("PartitionTimeLimit", "its queue allows less time: lower cluster.walltime_min"),
    _never("BadConstraints", "no node has these features: check sbatch.constraint with "
           "`sinfo -o %f`"),
    _never("InvalidAccount|AccountNotAllowed|Job.s.account.not.permitted",
           "set cluster.account to one that the queue allows"),
    _never("InvalidQOS|QOSNotAllowed|Job.s.QOS.not.permitted",
           "set cluster.qos to one that the queue allows"),
    _never(r".*\bnot.permitted.to.use.this.partition", "take another queue, or ask an admin"),
    _never("DependencyNeverSatisfied", "the job it depends on failed: cancel this one"),
    _never(r"(Assoc|QOS)\w*Max\w*(PerJob|PerNode)\w*|QOSMin\w+|MaxMemPerLimit",
           "a limit for single jobs: see `sacctmgr show qos` and `show assoc user=$USER`"),
    _never("DeadLine", "it cannot end before its deadline: change sbatch.deadline"),
    _never("ReservationDeleted", "its reservation is gone: change sbatch.reservation"),
    _never("BurstBufferOperation", "its burst buffer failed, and it is held: ask an admin"),
    _never("JobHeldUser", "it is held: `scontrol release` it"),
    _never("JobHoldMaxRequeue", "it was requeued too often (max_batch_requeue), and is held: "
           "find out why it fails, then `scontrol release` it"),
    _never("launch.failed.requeued.held", f"no node could start it: {_UNSEEN} Then release it"),
    _never("job.requeued.in.held.state", "it is held: `scontrol release` it"),
    _never("JobHeldAdmin", "it is held by Slurm: ask an admin"),
    _passes("Priority", "jobs of higher priority are before it"),
    _passes("Resources", "no nodes are free for it yet"),
    _passes("Constraints", "no nodes that have what it asks for are free yet"),
    _passes("Dependency", "it waits for another job"),
    _passes("BeginTime", "it waits for its begin time"),
    _passes("Reservation", "it waits for its reservation"),
    _passes("ReqNodeNotAvail,.Reserved.for.maintenance",
            "nodes that it needs are reserved for maintenance"),
    _passes("ReqNodeNotAvail,.May.be.reserved", "nodes that it needs are kept for another job"),
    _passes("ReqNodeNotAvail", f"nodes that it needs are down, drained or in use; {_SINFO}"),
    _passes("Nodes.required.for.job.are.DOWN",
            f"nodes that it needs are down or drained, until an admin or they themselves return, "
            f"or are kept for jobs of a higher queue; {_SINFO}"),
    _passes("PartitionDown|PartitionInactive", "its queue is closed for now"),
    _passes("NodeDown", f"a node that it needs is down; {_SINFO}"),
    _passes("Licenses", "no licence is free"),
    _passes(r"(Assoc|QOS)Grp\w*Minutes(Limit)?",
            "the budget of your account or QOS is used up by jobs of the past too: it passes only "
            "where use is forgotten with time; ask an admin"),
    _passes(r"(Assoc|QOS)\w*(Grp|Max)\w*|Max\w+PerAccount|QOSUsageThreshold|"
            r"(Association|QOS)(Job|Resource|Time)Limit|AccountingPolicy",
            "a limit of your account or QOS is used up by other jobs"),
    _passes("JobArrayTaskLimit", "as many jobs of its sweep run as may at once"),
    _passes("BurstBufferResources|BurstBufferStageIn", "its burst buffer is not ready yet"),
    _passes("None|Cleaning|Prolog|FedJobLock|SchedDefer",
            "the scheduler has yet to look at it, or to tidy up"),
    Reason(pattern="InactiveLimit|JobLaunchFailure|NonZeroExitCode|OutOfMemory|SystemFailure|"
           r"TimeLimit|RaisedSignal\S*", fate=Fate.ENDED, text="that was the end of it before"),
)  # fmt: skip
"""Slurm's job_reason_codes.html, all of it, and the sentences that slurmctld writes in place of a
code. The first row that fits counts."""


@cache
def find_reason(reason: str) -> Reason | None:
    """The row of a reason as squeue or scontrol writes it; None for one that is not known."""
    for row in REASONS:
        if re.match(rf"(?:{row.pattern})(?![A-Za-z])", reason):
            return row
    return None


def is_permanent(info: JobInfo) -> bool:
    """True for a job that pends and will not start as it was submitted."""
    row = find_reason(info.reason)
    return info.state is JobState.PENDING and row is not None and row.fate is Fate.NEVER


LAUNCH: tuple[tuple[str, str], ...] = (
    (r"JobLaunchFailure|launch.failed", f"the node could not start the batch script: {_UNSEEN}"),
    # How slurmd spells that it could not make the output file: its error 4021 & 127.
    (r"RaisedSignal:53\b", f"the batch script's output could not be made on its node: {_UNSEEN}"),
)
"""Pattern of the reason of a job that ended without a word of our script, and the remedy."""
_NO_OUTPUT = "RaisedSignal:53"
_NO_START = "0:53"


def explain_reason(infos: Sequence[JobInfo]) -> str:
    """One sentence for a job that will not start by itself; empty for all others."""
    for info in infos:
        row = find_reason(info.reason)
        if row is not None and is_permanent(info):
            return f"job {info.id} will not start: {info.reason}; {row.text}"
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
