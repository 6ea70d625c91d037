"""Why a job pends: which of Slurm's reasons never pass by themselves, and what to do.

Up to 22.05, and wherever EnforcePartLimits is off, sbatch accepts what can never start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jobs.slurm import JobInfo, JobState

NEVER: tuple[tuple[str, str], ...] = (
    (r"PartitionConfig|PartitionNodeLimit", "its queue has too few nodes: lower count"),
    (r"PartitionTimeLimit", "its queue allows less time: lower cluster.walltime_min"),
    (r"BadConstraints", "no node has these features: check sbatch.constraint with `sinfo -o %f`"),
    (r"InvalidAccount|AccountNotAllowed", "set cluster.account to one that the queue allows"),
    (r"InvalidQOS|QOSNotAllowed", "set cluster.qos to one that the queue allows"),
    (r"DependencyNeverSatisfied", "the job it depends on failed: cancel this one"),
    (r"(Assoc|QOS)\w*Max\w*PerJob\w*", "a limit for single jobs: see `sacctmgr show qos`"),
    (r"JobHeldUser", "it is held: `scontrol release` it"),
    (r"JobHeldAdmin|launch failed requeued held", "it is held by Slurm: ask an admin"),
)
"""Pattern of the reason, and the remedy."""


def explain_reason(infos: Sequence[JobInfo]) -> str:
    """One sentence for a job that will not start by itself; empty for all others."""
    for info in infos:
        if info.state is not JobState.PENDING:
            continue
        for pattern, remedy in NEVER:
            if re.match(pattern, info.reason):
                return f"job {info.id} will not start: {info.reason}; {remedy}"
    return ""
