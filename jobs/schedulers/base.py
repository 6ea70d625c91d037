"""The interface of a scheduler: the command that submits a job, poll and cancel.

Jobs are submitted by `script_executor.ScriptExecutor`, with that command. A scheduler of another
distribution is a class like those of slurm/ and local/: docs/plugins.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import NodeState
from varuna_core.facts.known import Known, NotKnown
from varuna_core.records.plan import GroupPlan, Plan
from varuna_core.records.record import JobLimits
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.errors import InputError, UncertainError, VjobError
from vjob.jobs.schedulers.diagnosis import Diagnosis
from vjob.jobs.schedulers.foreign_job import ForeignJob
from vjob.jobs.schedulers.job import (
    NOTHING,
    After,
    IdleNode,
    SchedulerJob,
    StartEstimate,
)

if TYPE_CHECKING:
    from vjob.jobs.conf.schema import Cluster, JobConf, NodeGroup, Queue

FLOOR_S = 25.0
"""Between two questions about a user's jobs, whoever asks: a squeue is two requests (22.05), and a
minute has six at most, and two about nodes."""
SELDOM_S = 60.0
"""Between two questions about nodes, about jobs that squeue does not show any more, and of those
who have time."""
NO_LIMITS = JobLimits()
NO_CHANGES: Mapping[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """Resources and limits that the header of a batch script asks for."""

    run: str
    """The run's id; it must be found again by `find_orphans`."""
    name: str
    output: str
    """The file of the script's own output, from the folder of the script."""
    groups: Sequence[GroupPlan]
    """In the order of their nodes; several where the job holds all of them."""
    nodes: Sequence[NodeGroup]
    """The groups as the conf has them."""
    cluster: Cluster
    morph: bool = False
    """The run goes on without nodes that are lost."""
    min_nodes: int | None = None
    """The fewest nodes to start with, where it is fewer than all."""
    array: str = ""
    """`0-7%2` for an array of runs."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A batch script that is to become a job."""

    run: RunFolder
    group: str | None = None
    """The group of a split run, or of nodes that join; None where one job holds all."""
    after: After = NOTHING
    limits: JobLimits = NO_LIMITS
    array: Path | None = None
    """The script of a Slurm array, where this submits one; its elements are runs of their own."""

    @property
    def script(self) -> Path:
        return self.array or self.run.batch_script(self.group)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features of a scheduler. Code asks for these; it never compares names of schedulers."""

    arrays: bool = False
    """One job with an element for each of several runs that are alike."""
    dependencies: bool = True
    """A job that waits for others."""
    het: bool = False
    """One job with several kinds of nodes."""
    test_only: bool = False
    """An estimate of when a job would start, without submitting it."""
    starts_steps: bool = False
    """`srun` of its own: it starts the agents, containers, and steps beside those of a job. Others
    put a program of that name first on PATH."""
    requeues: bool = False
    """A job that runs is put back into the queue from outside."""
    one_host: bool = False
    """All nodes of its jobs are this machine."""
    remote_shell: bool = False
    """Nodes are reached over ssh."""
    has_queue: bool = False
    """Jobs wait for nodes that others use too; it is asked sparingly."""
    time_limit: bool = True
    """Its jobs end at `cluster.walltime_min`."""
    inside_job: bool = False
    """Its jobs are steps of a job that this shell is in, and end with that one."""


class Scheduler(ABC):
    """One scheduler, and the questions that vjob has for it.

    The methods that raise NotImplementedError are called only where `can` says so.
    """

    API = 1
    name: str
    """Its name in the plan."""
    title: str
    """Its name in sentences."""
    can = Capabilities()

    def __init__(self, run: RunFolder | None = None) -> None:
        self.run = run
        """The run whose jobs it is asked about; None for all jobs of the user."""

    def find_obstacle(self) -> str:
        """Return the reason why this machine cannot submit jobs, with the remedy; else empty."""
        return ""

    def adapt(
        self, conf: JobConf, written: Collection[str], *, is_preview: bool
    ) -> tuple[JobConf, list[str]]:
        """The conf as it holds here, and notes on that for the user; InputError for one that cannot
        run here. `written` are the keys that the conf writes; a preview may be made elsewhere."""
        return conf, []

    def render_header(self, asked: ScriptRequest) -> list[list[str]]:
        """Options as lines of the batch script, a list for each group of nodes."""
        return [[] for _ in asked.groups]

    def render_prologue(self, asked: ScriptRequest) -> list[str]:
        """Shell lines at the start of the batch script: they make the scheduler's own variables
        those that the script reads (docs/plugins.md), and may put stand-ins of srun on PATH."""
        return []

    def list_step_options(self, asked: ScriptRequest) -> list[str]:
        """Extra srun options for each component of the step that starts the agents."""
        return []

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
        not answer: that says nothing of any job but those in its `found`.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End the job."""

    def requeue(self, job: str) -> None:
        """Start the job again from the queue."""
        raise NotImplementedError

    def test(self, run: RunFolder, group: str | None, text: str) -> StartEstimate:
        """An estimate for this batch script; raises RefusedError for one that is refused."""
        raise NotImplementedError

    def build_beside(
        self,
        job: str,
        parts: Sequence[tuple[int | None, int]],
        group: str,
        command: Sequence[str],
        names: Sequence[str] = (),
    ) -> list[str]:
        """A step beside the job's own, with one task on each node, that takes nothing from it.

        `parts` are component (None outside het jobs) and number of nodes; `names` are the nodes,
        where they are not all of the job.
        """
        raise NotImplementedError

    def explain_step(self, text: str) -> str:
        """The reason why no such step began, where `text`, the tool's own, does not show it."""
        return ""

    def build_shell(
        self, job: SchedulerJob, host: str, group: str, command: Sequence[str], *, tty: bool
    ) -> list[str]:
        """A command on one node of the job, with this terminal."""
        raise NotImplementedError

    def can_wait_for(self, other: Scheduler) -> bool:
        """Return True if a job here may depend on a job of `other`."""
        return self.can.dependencies and self.name == other.name

    def find_other_machine(self, run: RunFolder, group: str | None) -> str:
        """The machine that has the job of this group; empty where it is this one, or a cluster."""
        return ""

    def ask_foreign_job(self, word: str) -> ForeignJob | None:
        """A job that vjob did not submit, by the id that a user typed; None where there is none."""
        return None

    def find_run_id(self, comment: str) -> str:
        """The run that a job's comment names; empty where vjob did not submit it."""
        return ""

    def list_warnings(self, plan: Plan) -> list[str]:
        """Settings of the scheduler that would trouble a run with this plan."""
        return []

    def list_start_checks_s(self, num_jobs: int) -> Sequence[float]:
        """Pauses before each look at new jobs: a reason to wait may come a little later."""
        return (0.0,)

    def examine(self) -> list[Diagnosis]:
        """Diagnoses of `vjob doctor`."""
        return []

    def list_queues(self) -> list[str]:
        """Names of queues, for completion."""
        return []

    def describe_queues(self) -> list[tuple[str, Queue]]:
        """Queues with what their nodes have, the default one first, and once for each kind of
        node; none where nothing tells."""
        return []

    def list_nodes(self, queue: str | None = None) -> list[NodeGroup]:
        """Nodes with GPUs that a job could get, alike ones as one group; InputError where there
        are none."""
        raise InputError(f"{self.title} lists no nodes: set cluster.nodes in the conf")

    def suggest_nodes(self) -> tuple[list[NodeGroup], str]:
        """Suggest node groups for a first conf, the most frequent kind first, with a note."""
        return [], ""

    def ask_node_states(
        self, nodes: Sequence[str], *, floor_s: float = SELDOM_S
    ) -> list[NodeState]:
        """The nodes among these that the scheduler calls lost, draining or under maintenance."""
        return []

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        """Idle nodes of these queues; none where the scheduler has no queues."""
        return []

    def ask_time_left(self, job: str) -> Known[float]:
        """Seconds until the job's time limit."""
        return NotKnown(f"{self.name} does not report it")

    def ask_earlier(self, job: str) -> dict[str, tuple[EndCause, ...]]:
        """Return the known ends of the starts of a job, or of its components, oldest first."""
        return {}

    def ask_canceller(self, job: str) -> str:
        """Name of the user who cancelled a job; empty where that is not known."""
        return ""

    def spell_cancel(self, jobs: Sequence[str]) -> str:
        """The scheduler's own command that ends these jobs, for a user to type."""
        return f"cancel job {' '.join(jobs)} with the commands of {self.title}"

    @abstractmethod
    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        """This user's live jobs that carry a run id in their comment, by run id, as of `after`.

        Raises UncertainError where the scheduler does not answer.
        """
