"""How a batch script ends: whether its job goes back into the queue.

A function that has checkpointed asks for that. So does a preemption with a grace (GraceTime): of
that Slurm tells the steps, and takes a script that ends before the grace is over for a job that
failed, or that is done where its ranks saved on the warning and left with 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Optional

REQUEUE_WORD = "requeue"
"""What `close` prints in place of a code where a function asks to be requeued."""
STOPPED = "143"


class Way(Enum):
    """What the batch script does next; the values are what it reads."""

    GO_ON = "go-on"
    """It ends with the code of its ranks, or starts them again."""
    REQUEUE = "requeue"
    LEAVE = "leave"
    """A later start of the job runs: the node was cut off, and the job is not ours to requeue."""
    ENDED = "ended"
    """Somebody ended the job meanwhile."""


@dataclass(frozen=True)
class JobFacts:
    """The scheduler's word on the job; None where it says nothing."""

    is_running: Optional[bool] = None
    is_preempted: Optional[bool] = None
    restarts: Optional[int] = None


def parse_job(text: str) -> JobFacts:
    """`scontrol --oneliner show job`."""
    if not text.strip():
        return JobFacts()
    restarts = re.search(r"\sRestarts=(\d+)(?:\s|$)", text)
    return JobFacts(
        is_running="JobState=RUNNING" in text,
        is_preempted=re.search(r"\sPreemptTime=\d", text) is not None,
        restarts=int(restarts[1]) if restarts else -1,
    )


def may_return(said: str, *, warned: bool) -> bool:
    """False where the scheduler need not be asked: the job does not come again."""
    return said in (REQUEUE_WORD, STOPPED) or (said == "0" and warned)


def choose_way(said: str, ended: str, job: JobFacts, restarts: int) -> Way:
    """`said` by `close`; `ended` is the signal that ended the script; `restarts` as it began."""
    if said == REQUEUE_WORD:
        if ended:
            return Way.ENDED
    elif not (job.is_running and job.is_preempted):
        return Way.GO_ON
    if job.restarts is not None and job.restarts != restarts:
        return Way.LEAVE
    return Way.REQUEUE
