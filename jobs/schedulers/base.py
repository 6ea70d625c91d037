"""The interface of a scheduler: the command that submits a job, poll and cancel.

Jobs are submitted by `script_executor.ScriptExecutor`, with that command.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna_core.facts.known import Known, NotKnown
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import UncertainError, VjobError
from vjob.jobs.schedulers.job import NOTHING, After, IdleNode, SchedulerJob

FLOOR_S = 25.0
"""Between two questions about a user's jobs, whoever asks: a squeue is two requests (22.05), and a
minute has six at most."""
SELDOM_S = 60.0
"""Between two questions about nodes, about jobs that squeue does not show any more, and of those
who have time."""
NO_CHANGES: Mapping[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A batch script that is to become a job."""

    run: RunFolder
    group: str | None = None
    """The group of a split run, or of nodes that join; None where one job holds all."""
    after: After = NOTHING
    array: Path | None = None
    """The script of a Slurm array, where this submits one; its elements are runs of their own."""

    @property
    def script(self) -> Path:
        return self.array or self.run.batch_script(self.group)


class Scheduler(ABC):
    """One scheduler, and the questions that vjob has for it."""

    name: str

    @abstractmethod
    def make_command(self, submission: Submission) -> list[str]:
        """The command that submits a script and prints the job's id."""

    def parse_job_id(self, text: str) -> str:
        """The new job's id from what that command printed: the last word."""
        words = text.split()
        if not words:
            raise UncertainError(
                "no job id was printed\n  `vjob list` adopts the job if it was made"
            )
        return words[-1]

    def explain_failure(self, code: int, text: str) -> VjobError:
        """The error for a command that failed; UncertainError where the job may have been made."""
        return VjobError(f"the job could not be started (exit code {code}): {text.strip()[-300:]}")

    @abstractmethod
    def poll(
        self,
        jobs: Sequence[str],
        *,
        user: int | None = None,
        floor_s: float = FLOOR_S,
        after: Mapping[str, float] = NO_CHANGES,
    ) -> dict[str, list[SchedulerJob]]:
        """The state of each job, one item a component; empty for a job that it has forgotten.

        The jobs are those of `user`, else ours. The answer may be `floor_s` old; of a job in
        `after` one from before that time is no use. Raises UncertainError where the scheduler does
        not answer: that says nothing of any job.
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

    def ask_time_left(self, job: str) -> Known[float]:
        """Seconds until the job's time limit."""
        return NotKnown(f"{self.name} does not tell it")

    def ask_canceller(self, job: str) -> str:
        """Name of the user who cancelled a job; empty where that is not known."""
        return ""

    @abstractmethod
    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        """This user's live jobs that carry a run id in their comment, by run id, as of `after`.

        Raises UncertainError where the scheduler does not answer.
        """
