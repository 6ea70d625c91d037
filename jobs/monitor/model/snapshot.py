"""`Snapshot` and `Verdict`: the state of a job at one moment, and what the rules make of it. Plain
data, made by the readers and the rules, shown by others.

None and empty values mean "not known". Times are seconds since 1970 by the clock of the file
server, as far as it is known; `Snapshot.now` is that clock too, so that ages are differences.
docs/json.md has the JSON form, which is these fields by name.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeGuard

from varuna_core.facts.cause import End
from varuna_core.facts.cluster import NodeState
from varuna_core.facts.finding import Finding, dump_finding, dump_value
from varuna_core.facts.hang import Hang
from varuna_core.facts.known import Known, NotKnown
from varuna_core.facts.remedy import Context
from varuna_core.records.checkpoints import Damaged, Skipped
from varuna_core.records.exits import Outcome, RankExit
from varuna_core.records.files import as_whole
from varuna_core.records.logs.learner import Doubt
from varuna_core.records.logs.slow_ranks import WARM_UP_STEPS, SlowRank

FORMAT = 3
NO_LIMIT = NotKnown("the time limit is not known")


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job, or component of a het job, as the scheduler reports it.

    The form of `schedulers.job.SchedulerJob` in the JSON output: the state by its name.
    """

    id: str
    group: str = ""
    state: str
    """A name of `JobState`; UNKNOWN keeps the scheduler's own word in `word`."""
    word: str = ""
    nodes: str = ""
    reason: str = ""
    start: str = ""
    """Expected start of a pending job, as the scheduler writes it."""
    restarts: int = 0
    exit_code: str = ""
    end_cause: str = ""
    """Why the job ended, by the scheduler alone; empty while it is not over, or if a program of the
    job failed by itself."""
    left_s: float | None = None
    """Seconds until the time limit, by the scheduler's last answer; None if that answer has no
    limit."""
    limit_s: float | None = None
    """The job's present time limit, by the scheduler."""
    started: float | None = None
    ends: float | None = None
    """The job's end, or the time at which the scheduler will end it."""
    preempted: float | None = None
    """When the scheduler began to take the job's nodes for another job."""
    waiting: str = ""
    """Why the job waits: a name of `Waiting`; empty if it does not wait, or if not known."""
    dependency: str = ""
    """Jobs that this job waits for, as the scheduler writes them."""
    earlier: tuple[str, ...] = ()
    """Known ends of the job's earlier starts, oldest first: names of `EndCause`."""

    @property
    def code(self) -> int | None:
        """The batch script's exit code, without the signal; None if the scheduler reports none."""
        return as_whole(self.exit_code.partition(":")[0])


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The last answer of the scheduler, and its age."""

    name: str
    """slurm or local; empty for a bare folder of logs."""
    jobs: tuple[JobRow, ...] = ()
    joined: tuple[JobRow, ...] = ()
    """Jobs that joined the run with more nodes; they do not count for the state of the run."""
    age_s: float = 0.0
    """Age of `jobs` in seconds: all commands share the last good answer."""
    problem: str = ""
    """Why the scheduler did not answer this time."""
    lost_nodes: Mapping[str, str] = field(default_factory=dict)
    """Down nodes of the job, with the scheduler's word for their state."""
    node_states: tuple[NodeState, ...] = ()
    """Nodes of the job that are lost, draining or under maintenance."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one step, or means of several steps, from a log line or a trace."""

    step: int
    step_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: int = 0
    """Steps that were skipped since the previous point."""
    nan: int = 0
    at: float | None = None
    """When the point was printed, if known."""


def name_step(
    step: int,
    total: int | None = None,
    *,
    is_counted: bool = False,
    is_least: bool = False,
    unit: str = "step",
) -> str:
    """`step 30 of 50`, or `30 optimizer steps of this attempt` where only their number is known."""
    whole = f" of {total}" if total and step <= total else ""  # nanoGPT does one more
    if not is_counted:
        return f"{unit} {step}{' (at least)' if is_least else ''}{whole}"
    plural = "" if not whole and step == 1 else "s"
    return f"{step}{whole} optimizer step{plural}{'' if whole else ' of this attempt'}"


COUNTED = "optimizer"
"""The source of a step that was counted."""
PACE_STEPS = 10
"""Step times that the pace is computed from."""


def is_time(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of the training."""

    step: int
    num_steps: int | None = None
    is_asked: bool = False
    """True if `num_steps` comes from the conf and not from a line: good enough for the time left,
    but a script may count from 0 or may not print its last steps."""
    at: float | None = None
    """When the step was done, at the latest."""
    is_older: bool = False
    """True if the step was done before `at`, by how much is not known: its log went on without a
    step when it was first read."""
    points: tuple[Point, ...] = ()
    """The last steps that were reported, oldest first; a few hundred at most."""
    source: str = ""
    """`<node>.out`, `trace` or `optimizer`: where the step was read."""
    first_step: int | None = None
    """The first step that this attempt is known to have done."""
    done: int | None = None
    """Optimizer steps of this attempt, if they were counted."""
    is_counted: bool = False
    """True if `step` is only `done`: no line has the program's own number, which differs if the
    program continued from a checkpoint."""
    is_least: bool = False
    """True if later steps, or one epoch more, may have been done."""
    unit: str = "step"
    """What the lines count: `step`, `epoch` or `sample`."""
    other: int | None = None
    """Step of the other source, if log lines and the counter of optimizer steps disagree."""
    longest_s: float | None = None
    """Seconds of the longest step of this attempt, by the counter of optimizer steps."""
    median_s: float | None = None
    """Median of all counted steps of this attempt, once it is over, as in a report."""
    num_timed: int = 0
    """Number of steps that `median_s` is the median of."""
    early_times: tuple[float, ...] = ()
    """Seconds a step early in this attempt, by the counter of optimizer steps; for attempts whose
    `points` begin later."""

    @property
    def name(self) -> str:
        return name_step(
            self.step,
            self.num_steps,
            is_counted=self.is_counted,
            is_least=self.is_least,
            unit=self.unit,
        )

    @property
    def loss(self) -> float | None:
        """The last reported loss."""
        return next((point.loss for point in reversed(self.points) if point.loss is not None), None)

    @property
    def step_times(self) -> list[float]:
        """Seconds per step of the points after warm-up, oldest first."""
        first = self.first_step
        if first is None:
            first = self.points[0].step if self.points else 0
        later = [point for point in self.points if point.step >= first + WARM_UP_STEPS]
        return [point.step_s for point in later if is_time(point.step_s)]

    @property
    def recent_times(self) -> list[float]:
        """The step times from which the pace is computed; those of the first steps count only while
        there are no others."""
        first = [point.step_s for point in self.points if point.step_s is not None]
        return (self.step_times or first)[-PACE_STEPS:]

    @property
    def pace_s(self) -> float | None:
        """Seconds a step: the pace that `vjob status`, its page, the list and the screen show."""
        times = self.recent_times if self.median_s is None else [self.median_s]
        return statistics.median(times) if times else None

    @property
    def pace_covers(self) -> str:
        """Describe the steps of which the pace is the median; empty if there is no pace."""
        if self.median_s is not None:
            return f"(about the median of {self.num_timed:,} counted steps)"
        count = len(self.recent_times)
        of = "means over 1 s or more of steps" if self.source == COUNTED else "readings"
        return f"(the median of the last {count} {of})" if count > 1 else "in one reading" * count

    @property
    def knows_end(self) -> bool:
        """True if the lines themselves have the number of steps."""
        return bool(self.num_steps) and not self.is_asked

    @property
    def is_last(self) -> bool:
        """True once the last step, by the number of steps in the lines, is done."""
        return self.knows_end and max(self.step, self.done or 0) >= (self.num_steps or 0)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A checkpoint or an evaluation in which the ranks are, according to a line of a log."""

    name: str
    since: float | None
    line: Line


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a log, where it stands, and what is known about lines like it."""

    text: str
    """Text made safe for terminals."""
    node: str = ""
    rank: int | None = None
    file: str = ""
    """Path relative to the attempt."""
    kind: str = ""
    """Name of a row of the catalogue; empty for an ordinary line."""
    num_same: int = 1
    """How many ranks wrote the line, or how often a single rank wrote it."""
    at: float | None = None
    """Time with which the line itself begins; else None."""
    order: int = 0
    """Offset in its file: orders lines of the same file."""
    written_by: float | None = None
    """Latest time at which the line can have been written: the last change of its file, which may
    be much later than the line."""
    stream: str = ""
    """`stdout` or `stderr`, if the agent kept them apart."""
    last_at: float | None = None
    """When the line was last written, by the clock of its node's agent."""
    raised: str = ""
    """Place of an exception's line: `last` in the last traceback of its process, `earlier` in one
    before, `aside` in one of another thread or a destructor, `printed` without a traceback,
    `quoted` in the middle of a line. Empty for any other line."""
    is_before_steps: bool = False
    """True if lines about steps follow the line in its file."""
    doubt: str = ""
    """Why the line cannot be the cause: a name of `rules.doubts.Doubt`."""


@dataclass(frozen=True, kw_only=True)
class ReportedExit:
    """The end of a rank, or of a task of srun, according to a line of a launcher."""

    who: str
    """`rank 1`, `task 1` or `tasks 4-7`; a task may be a launcher of several ranks."""
    rank: int | None = None
    task: int | None = None
    node: str
    code: int
    """Exit code, or 128 + signal as in a shell."""
    text: str


ORDINARY = ("sw_power_cap",)
"""Throttle reasons of a GPU that works as hard as its power limit lets it."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The last sample of one GPU, or of a node's processors (`index` is `cpu`)."""

    index: str
    name: str = ""
    utilization: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    temperature: float | None = None
    power_w: float | None = None
    num_processes: int | None = None
    num_foreign: int | None = None
    """Processes on the GPU that do not belong to the ranks of the node."""
    ecc_errors: int | None = None
    """Uncorrected errors since the driver was loaded."""
    throttle: str = ""
    """Why the GPU's clock is held down: `hw_thermal`, `hw_power_brake`, ..."""
    history: tuple[float | None, ...] = ()
    """Utilization, oldest first."""
    ranks: tuple[int, ...] = ()
    """Ranks with a process on the GPU; empty if not known."""

    @property
    def held_down(self) -> str:
        """The reasons in `throttle` that are not ordinary under full load."""
        words = self.throttle.split(", ")
        return ", ".join(word for word in words if word not in ORDINARY)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of the attempt."""

    rank: int
    node: str = ""
    stage: int | None = None
    """The first of `stages`: with every schedule also the rank's position in its pipeline."""
    stages: tuple[int, ...] = ()
    """All stages of the rank: several with the schedules interleaved and zbv."""
    replica: int | None = None
    pid: int | None = None
    """Process id on its node, outside containers."""
    process_state: str = ""
    """The kernel's letter for the process: R, S, D (waits for a disk or a dead mount), T (stopped),
    Z."""
    cpu_percent: float | None = None
    """Use of one core, between the node's last two heartbeats."""
    step: int | None = None
    """The last step in the rank's trace, or the number of optimizer steps of this attempt."""
    is_counted: bool = False
    """True if `step` is the number of optimizer steps."""
    step_s: float | None = None
    """Median seconds of the rank's last steps."""
    work_s: float | None = None
    """Median seconds of the rank's own computation in these steps, without waits."""
    slow: SlowRank | None = None
    """Set if the rank computed longer than its peers in nearly all of its last steps."""
    step_at: float | None = None
    device: str = ""
    exit: RankExit | None = None


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A file system that the run writes to."""

    path: str
    what: str
    """`logs` or `checkpoints`."""
    free_bytes: int
    total_bytes: int
    free_inodes: int | None = None
    total_inodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class NewFiles:
    """Files that ranks left in the run's copy of their code."""

    folder: str
    names: tuple[str, ...]
    """The largest few, relative to the folder."""
    num_files: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the attempt."""

    name: str
    index: int | None = None
    group: str = ""
    ranks: tuple[int, ...] = ()
    phase: str = ""
    """container (being prepared), ready (waits for the others), running, done; empty: no report."""
    beat_at: float | None = None
    """Time of the node's last heartbeat."""
    beat_every_s: float | None = None
    """Announced seconds until the next heartbeat; None if not announced."""
    hears_usr1: bool | None = None
    """True if all its ranks at work had a handler for SIGUSR1 at the last heartbeat; None if not
    known."""
    log_at: float | None = None
    """When anything was last written to the node's .out or .err file."""
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    """The last lines of the node's GPU log, made safe for terminals."""
    num_lines: Mapping[str, int] = field(default_factory=dict)
    """Number of lines of the node's out, err and gpu files; only if the numbers were requested."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the node's files, by out, err and gpu."""
    gpus: tuple[Gpu, ...] = ()
    gpus_at: float | None = None
    gpus_not_known: str = ""
    """Why none of the node's GPUs could be read in the last sample."""
    gpus_lost: tuple[int, ...] = ()
    """Numbers of the job's GPUs that the driver lists and cannot access."""
    faults: tuple[Finding, ...] = ()
    """Faults of the node's hardware since the attempt began; the rule of each is a name of
    `Fault`."""
    cpu_percent: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    clock_offset_s: float | None = None
    """The file server's clock minus this node's."""
    checks: tuple[str, ...] = ()
    """What preflight warned of or refused."""


@dataclass(frozen=True, kw_only=True)
class Echo:
    """One setting as the run prints it, beside what the conf or the plan says."""

    name: str
    """WORLD_SIZE, PARTITION, ..."""
    said: str
    wanted: str | None
    """The value in the conf or the plan, None if neither has the setting."""
    line: Line


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the ranks that is over."""

    number: int
    reason: str
    """Why the attempt ended."""
    cause: str = ""
    """Name of the `EndCause` if the scheduler ended it; empty if it did not or was not asked."""
    step: int | None = None
    """The last step of the attempt."""


@dataclass(frozen=True, kw_only=True)
class AttemptView:
    """The state of one attempt, according to its own files."""

    attempt_started: float | None = None
    went_at: float | None = None
    """When all nodes were ready and the ranks were started."""
    nodes: tuple[Node, ...] = ()
    ranks: tuple[Rank, ...] = ()
    progress: Progress | None = None
    doubt: Doubt | None = None
    """Why there is no progress, although some lines may be about steps."""
    loss: Point | None = None
    """The last loss whose line names no step."""
    norms: tuple[Point, ...] = ()
    """Values of the last lines with a gradient norm and without a step."""
    phase: Phase | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """The longest that a checkpoint and an evaluation of this run took so far."""
    phase_ended_at: float | None = None
    """End of the last completed checkpoint or evaluation, as far as lines tell."""
    errors: tuple[Line, ...] = ()
    """Lines of a known kind, the likely earliest first; equal lines of ranks once."""
    saved: Line | None = None
    """The last line in which the program says that it saves or has saved its state."""
    fatal: Line | None = None
    """The line of a fatal error after the last step, only in a bare folder of logs."""
    stop: Mapping[str, Any] | None = None
    """The request to end the attempt, with the reason and who made it."""
    outcome: Outcome | None = None
    attempt_end: End | None = None
    """How the attempt ended: the end that `outcome` records."""
    hang: Hang | None = None
    """The hang that the agents found; None while the ranks make steps."""
    suspected: Hang | None = None
    """A silence that is not known to be a hang yet, and what will be done if it lasts; or a hang
    whose ranks are being ended."""
    partition: str = ""
    """The partition that Varuna chose for a script's model, in segments; empty for a given one."""
    skipped: Skipped | None = None
    """The last saves in a row that the folder of checkpoints could not take."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Files that could not be read, and why."""


@dataclass(frozen=True, kw_only=True)
class Snapshot(AttemptView):
    """A job at one moment."""

    now: float
    run: str
    """The run id, or the path of a bare folder."""
    folder: str
    record_state: str = ""
    """intent, submitted, refused, ended; empty for a bare folder."""
    record_verdict: str = ""
    end: End | None = None
    """How the run ended; None while it goes on, and of a bare folder."""
    message: str = ""
    """Why the run was refused, or how it ended."""
    layout: str = ""
    after: tuple[str, ...] = ()
    """Runs that must end well before this run starts."""
    after_any: tuple[str, ...] = ()
    """Runs that must be over before this run starts."""
    commit: str = ""
    """Commit of the user's code: `1a2b3c4d5e on main, dirty`."""
    submitted: float | None = None
    walltime_s: float | None = None
    """The value of `time_limit` in seconds; None if it is not known or unlimited."""
    time_limit: Known[float] = NO_LIMIT
    """The time limit that the job has now, according to the scheduler."""
    warn_s: float = 0.0
    """Seconds before the time limit at which ranks get SIGUSR1; 0 if they do not."""
    comes_back: bool = False
    """True if a job that reaches its time limit is requeued."""
    scheduler: Scheduler
    attempt: int | None = None
    earlier: tuple[Attempt, ...] = ()
    restarts: int = 0
    """How often failed attempts were restarted in the same job."""
    max_restarts: int | None = None
    """The limit of restarts (`cluster.restarts`); None without a limit, and in a run that may
    morph, which has rules of its own."""
    morph: str = ""
    """`8 x 4 to 6 x 4` while the run changes its nodes."""
    waits_for_room: str = ""
    """The folder without room for which the run's next attempt waits."""
    left_out: tuple[str, ...] = ()
    """Sentences on why a run that may morph does not use nodes that are or were present."""
    morphs: tuple[str, ...] = ()
    """`from 8 x 4 to 6 x 4, 12 s`: the completed morphs of this job."""
    world: int | None = None
    without_log: tuple[int, ...] = ()
    """Nodes of a bare folder's job that left no log there, by NODE_RANK."""
    other_jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Nodes of other jobs that have logs in the same folder, which no run of vjob made, by the
    master node of each job; their steps are ignored."""
    num_nodes: int | None = None
    """Nodes that the plan has; fewer in `nodes` means that some have left nothing yet."""
    echoes: tuple[Echo, ...] = ()
    info: Mapping[str, str] = field(default_factory=dict)
    """The settings that the run printed, in its order."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    damaged: tuple[Damaged, ...] = ()
    """Checkpoints that could not be loaded, and were set aside."""
    disks: tuple[Disk, ...] = ()
    new_files: NewFiles | None = None
    """New files in the copy of the code; looked for once the run is over."""
    clock_skew_s: float | None = None
    """The file server's clock minus this machine's, if the difference is worth showing."""
    scheduler_lines: tuple[str, ...] = ()
    """The last lines of the batch script's output."""
    reported_exits: tuple[ReportedExit, ...] = ()
    """Ends that launchers report in the logs of a job that vjob did not submit, once it is over."""
    num_gpus: int | None = None
    """Total of GPUs that the plan requests; 0 if ranks run on processors."""
    state: str = ""
    """State of the run in one word: of its jobs, or how it ended; empty for a bare folder."""


class Health(Enum):
    """Health of a job."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    """The ranks run, but no step is known, they may hang, or their GPUs cannot be read."""
    HEALTHY = "HEALTHY"
    SLOW = "SLOW"
    STALLED = "STALLED"
    FAILING = "FAILING"
    CHECKPOINTING = "CHECKPOINTING"
    MORPHING = "MORPHING"
    REQUEUED = "REQUEUED"
    DONE = "DONE"
    DEAD = "DEAD"
    CANCELLED = "CANCELLED"
    REFUSED = "REFUSED"
    UNKNOWN = "UNKNOWN"


EXIT_CODES = {Health.DEAD: 10, Health.UNKNOWN: 11, Health.SLOW: 13, Health.STALLED: 14}
EXIT_CODES |= {Health.FAILING: 15, Health.CANCELLED: 16, Health.REFUSED: 17}
ENDED = (Health.DONE, Health.DEAD, Health.CANCELLED, Health.REFUSED)
"""Healths of a job that is over."""
NEVER_STARTS = 12
"""Exit code of a pending job that will not start by itself."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Health of a job, and the findings that say why and what to do.

    The rules make a verdict without sentences; `judge` adds those for the job's context.
    """

    health: Health
    main: Finding
    """The finding of the rule that applied; its `rule` is a heading of docs/verdicts.md."""
    details: tuple[Finding, ...] = ()
    """Further findings that belong to `main`."""
    others: tuple[Finding, ...] = ()
    """Secondary observations that do not change the verdict: a warm GPU, a full disk."""
    end: End | None = None
    """How the job ended, once it has."""
    phase: str = ""
    """Phase of STARTING: container, rendezvous or warm-up."""
    evidence: tuple[Line, ...] = ()
    """Log lines that show it, the most telling first."""
    node: str = ""
    rank: int | None = None
    never_starts: bool = False
    context: Context = Context.CONF
    """What the job was started with, which decides the words of its remedies."""
    job: str = ""
    """The job's name in commands."""
    reason: str = ""
    """`main` as one sentence."""
    advice: str = ""
    """The remedies of `main`: what to do next."""
    facts: tuple[str, ...] = ()
    """The findings in `details` as sentences."""
    remarks: tuple[str, ...] = ()
    """The findings in `others` as sentences, with their remedies."""

    @property
    def rule(self) -> str:
        return self.main.rule

    @property
    def makes_steps(self) -> bool:
        """False for a job that stands still, whose pace and time left would mislead."""
        return self.health is not Health.STALLED

    @property
    def exit_code(self) -> int:
        return NEVER_STARTS if self.never_starts else EXIT_CODES.get(self.health, 0)

    def as_json(self) -> dict[str, Any]:
        parts = (("main", (self.main,)), ("detail", self.details), ("other", self.others))
        return {
            "health": self.health.value,
            "rule": self.rule,
            "phase": self.phase,
            "reason": self.reason,
            "advice": self.advice,
            "facts": self.facts,
            "remarks": self.remarks,
            "evidence": [asdict(line) for line in self.evidence],
            "node": self.node,
            "rank": self.rank,
            "never_starts": self.never_starts,
            "exit_code": self.exit_code,
            "end": dump_value(asdict(self.end)) if self.end is not None else None,
            "context": self.context.value,
            "findings": [
                {"part": part, **dump_finding(finding, self.context, self.job)}
                for part, findings in parts
                for finding in findings
            ],
        }
