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
"""Least seconds between two queries about a user's jobs, from all of his commands. A squeue is two
requests (22.05); this allows six requests a minute, and two more about nodes."""
SELDOM_S = 60.0
"""Least seconds between two queries about nodes, about jobs that squeue no longer shows, and from
callers that can wait."""
NO_LIMITS = JobLimits()
NO_CHANGES: Mapping[str, float] = {}


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """Resources and limits that the header of a batch script asks for."""

    run: str
    """The run's id; `find_orphans` must be able to read it back from the job."""
    name: str
    output: str
    """The file of the script's own output, relative to the folder of the script."""
    groups: Sequence[GroupPlan]
    """The groups in the order of their nodes; several if one job holds all of them."""
    nodes: Sequence[NodeGroup]
    """The groups of `groups`, as the conf spells them."""
    cluster: Cluster
    morph: bool = False
    """True if the run continues without lost nodes."""
    min_nodes: int | None = None
    """The fewest nodes to start with, if fewer than all."""
    array: str = ""
    """Value of `--array`, such as `0-7%2`; empty for a job that is not an array."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A batch script to be submitted as a job."""

    run: RunFolder
    group: str | None = None
    """The group of a split run, or of nodes that join; None if one job holds all groups."""
    after: After = NOTHING
    limits: JobLimits = NO_LIMITS
    array: Path | None = None
    """The script of a Slurm array, if an array is submitted; each array task is a run of its
    own."""

    @property
    def script(self) -> Path:
        return self.array or self.run.batch_script(self.group)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features of a scheduler. Callers test these features and never compare scheduler names."""

    arrays: bool = False
    """Supports job arrays, with one task for each of several similar runs."""
    dependencies: bool = True
    """Supports jobs that wait for other jobs."""
    het: bool = False
    """Supports heterogeneous jobs, with several kinds of nodes."""
    test_only: bool = False
    """Can estimate when a job would start, without submitting the job."""
    starts_steps: bool = False
    """Has its own `srun`, which starts the agents, containers, and further steps beside the job's
    own. Other schedulers put a program of that name first on PATH."""
    requeues: bool = False
    """A running job can be requeued from outside."""
    one_host: bool = False
    """All nodes of its jobs are this machine."""
    remote_shell: bool = False
    """Nodes are reached over ssh."""
    has_queue: bool = False
    """Jobs wait in a queue for nodes that other users share, so the scheduler is queried
    sparingly."""
    time_limit: bool = True
    """Its jobs end at `cluster.walltime_min`."""
    inside_job: bool = False
    """Its jobs are steps of the job that this shell is in, and end when that job ends."""


class Scheduler(ABC):
    """Interface of a scheduler, through which vjob submits jobs, controls them and asks for their
    state.

    A method that raises NotImplementedError is called only if `can` has its feature.
    """

    API = 1
    name: str
    """The scheduler's name in the plan."""
    title: str
    """The scheduler's name in sentences."""
    can = Capabilities()

    def __init__(self, run: RunFolder | None = None) -> None:
        self.run = run
        """The run whose jobs are queried; None for all jobs of the user."""

    def find_obstacle(self) -> str:
        """Return the reason why this machine cannot submit jobs, with the remedy; else empty."""
        return ""

    def adapt(
        self, conf: JobConf, written: Collection[str], *, is_preview: bool
    ) -> tuple[JobConf, list[str]]:
        """Return the conf adapted to this scheduler, and notes on the changes for the user. Raise
        InputError for a conf that cannot run here. `written` are the keys that the conf writes; a
        preview may be made on another machine than the submit."""
        return conf, []

    def render_header(self, asked: ScriptRequest) -> list[list[str]]:
        """Return options as lines of the batch script, one list for each group of nodes."""
        return [[] for _ in asked.groups]

    def render_prologue(self, asked: ScriptRequest) -> list[str]:
        """Return shell lines for the start of the batch script. They set the variables that the
        script reads (docs/plugins.md) from the scheduler's own, and may put a stand-in for srun on
        PATH."""
        return []

    def list_step_options(self, asked: ScriptRequest) -> list[str]:
        """Return extra srun options for each component of the step that starts the agents."""
        return []

    @abstractmethod
    def make_command(self, submission: Submission) -> list[str]:
        """Return the command that submits a script and prints the job's id."""

    def parse_job_id(self, text: str) -> str:
        """Parse the new job's id from the output of the submit command: the last word."""
        words = text.split()
        if not words:
            raise UncertainError(
                "no job id was printed\n  `vjob list` adopts the job if it was made"
            )
        return words[-1]

    def explain_failure(self, code: int, text: str) -> VjobError:
        """Return the error for a failed submit command: UncertainError if the job may exist."""
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
        """Return the state of each job, one item per component; empty for a job that the scheduler
        has forgotten.

        The jobs belong to `user`, by default to the caller. The answer may be `floor_s` old, but
        for a job in `after` not from before that time. Raise UncertainError if the scheduler does
        not answer: then only the jobs in the error's `found` are known.
        """

    @abstractmethod
    def cancel(self, job: str) -> None:
        """End the job."""

    def requeue(self, job: str) -> None:
        """Start the job again from the queue."""
        raise NotImplementedError

    def test(self, run: RunFolder, group: str | None, text: str) -> StartEstimate:
        """Return a start estimate for this batch script; RefusedError if it is refused."""
        raise NotImplementedError

    def build_beside(
        self,
        job: str,
        parts: Sequence[tuple[int | None, int]],
        group: str,
        command: Sequence[str],
        names: Sequence[str] = (),
    ) -> list[str]:
        """Return the command for a step beside the job's own step, with one task on each node, that
        takes none of the job's resources.

        `parts` are pairs of component (None outside het jobs) and number of nodes; `names` are the
        nodes, if not all nodes of the job.
        """
        raise NotImplementedError

    def explain_step(self, text: str) -> str:
        """Return why a step beside the job's own step did not begin, if the tool's own output
        `text` does not show the reason; else an empty text."""
        return ""

    def build_shell(
        self, job: SchedulerJob, host: str, group: str, command: Sequence[str], *, tty: bool
    ) -> list[str]:
        """Return the command that runs `command` on one node of the job, on this terminal."""
        raise NotImplementedError

    def can_wait_for(self, other: Scheduler) -> bool:
        """Return True if a job of this scheduler may depend on a job of `other`."""
        return self.can.dependencies and self.name == other.name

    def find_other_machine(self, run: RunFolder, group: str | None) -> str:
        """Return the machine that runs the job of this group; empty if this machine or a cluster
        does."""
        return ""

    def ask_foreign_job(self, word: str) -> ForeignJob | None:
        """Return a job that vjob did not submit, by the id that a user typed, or None."""
        return None

    def find_run_id(self, comment: str) -> str:
        """Return the run that a job's comment names; empty if vjob did not submit the job."""
        return ""

    def list_warnings(self, plan: Plan) -> list[str]:
        """Return warnings about settings of the scheduler that may harm a run with this plan."""
        return []

    def list_start_checks_s(self, num_jobs: int) -> Sequence[float]:
        """Return the pause before each poll of new jobs, since the reason for a wait may appear a
        little later."""
        return (0.0,)

    def examine(self) -> list[Diagnosis]:
        """Return the diagnoses that `vjob doctor` prints."""
        return []

    def list_queues(self) -> list[str]:
        """Return the names of queues, for shell completion."""
        return []

    def describe_queues(self) -> list[tuple[str, Queue]]:
        """Return the queues with the resources of their nodes, the default queue first and each
        queue once for each kind of node; empty if not known."""
        return []

    def list_nodes(self, queue: str | None = None) -> list[NodeGroup]:
        """Return the nodes with GPUs that a job could get, with equal nodes as one group; raise
        InputError if there are none."""
        raise InputError(f"{self.title} lists no nodes: set cluster.nodes in the conf")

    def suggest_nodes(self) -> tuple[list[NodeGroup], str]:
        """Suggest node groups for a first conf, the most frequent kind first, with a note."""
        return [], ""

    def ask_node_states(
        self, nodes: Sequence[str], *, floor_s: float = SELDOM_S
    ) -> list[NodeState]:
        """Return the states of the given nodes that are lost, draining or under maintenance; the
        scheduler is asked at most once in `floor_s` seconds."""
        return []

    def find_idle(self, queues: Sequence[str | None]) -> list[IdleNode]:
        """Return the idle nodes of these queues; empty if the scheduler has no queues."""
        return []

    def ask_time_left(self, job: str) -> Known[float]:
        """Return the seconds until the job's time limit."""
        return NotKnown(f"{self.name} does not report the time left")

    def ask_earlier(self, job: str) -> dict[str, tuple[EndCause, ...]]:
        """Return the known ends of the starts of a job, or of its components, oldest first."""
        return {}

    def ask_canceller(self, job: str) -> str:
        """Return the name of the user who cancelled a job; empty if not known."""
        return ""

    def spell_cancel(self, jobs: Sequence[str]) -> str:
        """Return the scheduler's own command that ends these jobs, for the user to type."""
        return f"cancel job {' '.join(jobs)} with the commands of {self.title}"

    @abstractmethod
    def find_orphans(self, after: float = 0.0) -> dict[str, list[SchedulerJob]]:
        """Return this user's live jobs whose comment has a run id, keyed by run id, as of `after`
        or later.

        Raise UncertainError if the scheduler does not answer.
        """
