"""Jobs that vjob did not submit: what a scheduler says of them, and where their output goes.

The scheduler's word alone is taken: nothing of such a job is executed, and what its output says
decides nothing but what is shown.
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
    """Its own number, which elements and components have beside their common one."""
    name: str = ""
    user: str = ""
    uid: int | None = None
    """None where the scheduler does not say it beyond doubt."""
    queue: str = ""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    limit_s: float | None = None
    work_dir: str = ""
    out: str = ""
    err: str = ""
    """Paths of its output; empty where they are not known. Equal where both go to one file."""
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
    """The name of the scheduler that has it."""
    word: str
    """As the user typed it."""
    parts: tuple[JobPart, ...]
    asked: float
    """When the scheduler's answer was good."""
    notes: tuple[str, ...] = ()
    """What is not known of it, and why."""

    @property
    def is_over(self) -> bool:
        return all(part.info.state in OVER for part in self.parts)

    @property
    def files(self) -> dict[str, dict[str, str]]:
        """Paths of output by kind, for each part that has its own, by the part's name."""
        found: dict[str, dict[str, str]] = {}
        seen: set[str] = set()
        for part in self.parts:
            kinds = {"out": part.out, "err": part.err if part.err != part.out else ""}
            new = {kind: path for kind, path in kinds.items() if path and path not in seen}
            if new and part.started is not None:
                found[part.info.id] = new
                seen |= set(new.values())
        return found
