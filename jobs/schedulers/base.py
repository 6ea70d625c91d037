"""The interface of a scheduler: submit, poll and cancel jobs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from varuna_core.records.runfolder import RunFolder
from vjob.jobs.schedulers.slurm_commands import JobInfo
from vjob.jobs.schedulers.slurm_nodes import IdleNode


class Executor(ABC):
    """One scheduler, and the questions that vjob has for it."""

    name: str

    @abstractmethod
    def submit(self, run: RunFolder, group: str | None, after: str | None) -> str:
        """Submit the batch script of the group; returns the job id. `after` must start first.

        Raises UncertainError where the job may have been made all the same.
        """

    @abstractmethod
    def poll(self, jobs: Sequence[str]) -> dict[str, list[JobInfo]]:
        """The state of each job, one item a component; empty for a job that it has forgotten.

        Raises UncertainError where the scheduler does not answer: that says nothing of any job.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End the job."""

    def find_lost_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """The nodes among these that the scheduler itself calls lost, with its word for each."""
        return {}

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        """Idle nodes of these queues; none where the scheduler has no queues."""
        return []

    def find_left_s(self, job: str) -> float | None:
        """Seconds until the job's time limit; None where that is not known."""
        return None

    @abstractmethod
    def find_orphans(self) -> dict[str, list[JobInfo]]:
        """This user's live jobs that carry a run id in their comment, by run id.

        Raises UncertainError where the scheduler does not answer.
        """
