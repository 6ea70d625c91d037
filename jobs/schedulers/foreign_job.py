"""Jobs that vjob did not submit: their state in the scheduler, and the paths of their output.

Only the scheduler is trusted: nothing of such a job is executed, and its output affects only what
is shown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from vjob.jobs.schedulers.job import OVER, JobState, SchedulerJob


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """One job, one component of a het job, or one element of an array."""

    info: SchedulerJob
    raw_id: str
    """The number of this job itself; array tasks and components also have a common job id."""
    name: str = ""
    user: str = ""
    uid: int | None = None
    """The user's number; None if the scheduler does not report it unambiguously."""
    queue: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    limit_s: float | None = None
    work_dir: str = ""
    out: str = ""
    err: str = ""
    """Paths of standard output and standard error; empty if not known, equal if both go to one
    file."""
    num_nodes: int | None = None
    has_gpus: bool = False

    @property
    def is_ours(self) -> bool:
        return self.uid == os.geteuid()

    @property
    def is_running(self) -> bool:
        return self.info.state in (JobState.RUNNING, JobState.COMPLETING)


@dataclass(frozen=True, kw_only=True)
class ForeignJob:
    """A job that vjob did not submit."""

    scheduler: str
    """The name of the job's scheduler."""
    word: str
    """The job's id as the user typed it."""
    parts: tuple[JobPart, ...]
    asked: float
    """Time as of which the scheduler's answer is true."""
    notes: tuple[str, ...] = ()
    """Sentences about facts that are not known, and why."""

    @property
    def is_over(self) -> bool:
        return all(part.info.state in OVER for part in self.parts)

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """Return the output paths by kind (out, err), keyed by the id of each started part with
        files of its own."""
        found: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for part in self.parts:
            kinds = {"out": part.out, "err": part.err if part.err != part.out else ""}
            new = {kind: path for kind, path in kinds.items() if path and path not in seen}
            if new and part.started is not None:
                found[part.info.id] = new
                seen |= set(new.values())
        return found
