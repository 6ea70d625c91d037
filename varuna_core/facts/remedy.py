"""`Remedy`: an action that a user can take, as a type; `render` words it for the job at hand.

A job that vjob submitted has a conf, so its remedies name keys of the conf. A job that was
submitted with a user's own sbatch script has options of sbatch. Local runs, runs on a list of
machines and calls from Python also have their own words. If a remedy does not exist in a context,
`render` returns an empty string, so no user is asked to set a key that their job lacks.

To add a target of remedies, add a member to `Target` and a row to `SPELLINGS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Callable, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple


class Context(str, Enum):
    """Ways to start a job; each has its own wording of a remedy."""

    CONF = "conf"
    """A conf on Slurm or on another scheduler."""
    ALLOCATION = "allocation"
    """A conf that runs as a step inside an existing job."""
    SBATCH = "sbatch"
    """A user's own script, submitted with sbatch; vjob only monitors it."""
    LOCAL = "local"
    """A conf with `scheduler: local`."""
    MACHINES = "machines"
    """A conf with a list of machines."""
    PYTHON = "python"
    """`import vjob`."""


class Action(str, Enum):
    """Things that a user can do."""

    SET = "set"
    LOWER = "lower"
    RAISE = "raise"
    CHANGE = "change"
    """Change the target to another value, which only the user can choose."""
    ADD = "add"
    """Add a value to a list, such as a mount or an argument."""
    REMOVE = "remove"
    """Remove a value from a list."""
    EXCLUDE = "exclude"
    MAKE_ROOM = "make-room"
    MOVE = "move"
    """Put a folder on another file system."""
    RELEASE = "release"
    RESUBMIT = "resubmit"
    RESUME = "resume"
    CANCEL = "cancel"
    WAIT = "wait"
    ASK_ADMIN = "ask-admin"
    """Ask an administrator to do what the detail says."""
    TELL_ADMIN = "tell-admin"
    INSPECT = "inspect"
    RUN = "run"
    """Run a command."""
    INSTALL = "install"


class Target(str, Enum):
    """The thing that a remedy changes or examines."""

    # The cluster.
    QUEUE = "queue"
    ACCOUNT = "account"
    QOS = "qos"
    WALLTIME = "walltime"
    MEMORY = "memory"
    CPUS = "cpus"
    NODES = "nodes"
    NODE = "node"
    """Nodes to avoid; the spelling begins with its preposition."""
    GPUS = "gpus"
    RANKS = "ranks"
    CONSTRAINT = "constraint"
    RESERVATION = "reservation"
    DEADLINE = "deadline"
    SCHEDULER = "scheduler"
    MACHINE_LIST = "machine-list"
    HETERO = "hetero"
    REQUEUE = "requeue"
    RESTARTS = "restarts"
    JOIN_TIME = "join-time"
    GRACE = "grace"
    LOG_LIMIT = "log-limit"
    LOG_FOLDER = "log-folder"
    PORT = "port"
    MASTER_PORT = "master-port"
    """The port, if no conf sets it."""
    INTERFACE = "interface"
    INTERFACE_VARIABLES = "interface-variables"
    """The network interface, if no conf sets it."""
    # The program and its training.
    PROGRAM = "program"
    """Arguments of the program."""
    LAUNCH = "launch"
    PROGRESS = "progress"
    """The pattern of lines about steps."""
    PYTHON = "python"
    WORKDIR = "workdir"
    ENVIRONMENT = "environment"
    PASSED_ENVIRONMENT = "passed-environment"
    BATCH_SIZE = "batch-size"
    STEPS = "steps"
    LEARNING_RATE = "learning-rate"
    GRADIENT_CLIPPING = "gradient-clipping"
    PRECISION = "precision"
    CHECKPOINT = "checkpoint"
    """The folder of checkpoints."""
    KEPT_CHECKPOINTS = "kept-checkpoints"
    WORKERS = "workers"
    RECOMPUTE = "recompute"
    STAGES = "stages"
    ZERO = "zero"
    LAYERS = "layers"
    """Layers of one stage."""
    MORPH = "morph"
    # The container.
    IMAGE = "image"
    RUNTIME = "runtime"
    SCRATCH = "scratch"
    MOUNTS = "mounts"
    CONTAINER_WORKDIR = "container-workdir"
    REUSE = "reuse"
    WRITABLE = "writable"
    # What to look at.
    JOB = "job"
    LOGS = "logs"
    ERRORS = "errors"
    STACKS = "stacks"
    REPORT = "report"
    DOCTOR = "doctor"
    LOGIN = "login"
    """A login on a machine by ssh."""
    NODE_STATE = "node-state"
    """The state of a node, as the scheduler or the node itself reports it."""
    EXPECTED_START = "expected-start"


NEED_TARGET = frozenset(
    (
        Action.SET,
        Action.LOWER,
        Action.RAISE,
        Action.CHANGE,
        Action.ADD,
        Action.REMOVE,
        Action.EXCLUDE,
        Action.MOVE,
    )
)


@dataclass(frozen=True)
class Remedy:
    """One action to take."""

    action: Action
    target: Optional[Target] = None
    value: str = ""
    """The new value of the target, a job's id, a node's name, or a command to run."""
    detail: str = ""
    """The rest of the sentence. It must not name a key, option or command of one context only."""
    when: str = ""
    """A condition, without its `if`."""
    instead: bool = False
    """True if the remedy is an alternative to the previous one, not a further step."""

    def __post_init__(self) -> None:
        if self.target is None and self.action in NEED_TARGET:
            raise ValueError(f"a remedy to {self.action.value} needs a target")


_BY_CONF = (Context.CONF, Context.ALLOCATION, Context.LOCAL, Context.MACHINES, Context.PYTHON)


def _everywhere(name: str) -> Dict[Context, str]:
    return {context: name for context in Context}


def _conf(key: str, sbatch: str = "") -> Dict[Context, str]:
    """Return the spelling of a conf key that every scheduler supports."""
    words = {context: key for context in _BY_CONF}
    return {**words, Context.SBATCH: sbatch} if sbatch else words


def _of_scheduler(key: str, option: str = "", **others: str) -> Dict[Context, str]:
    """Return the spelling of a conf key that only batch schedulers support."""
    words = {Context.CONF: key, Context.PYTHON: key}
    words.update({Context(name): word for name, word in others.items()})
    return {**words, Context.SBATCH: option} if option else words


def _command(words: str, call: str) -> Dict[Context, str]:
    """Return the spelling of a vjob command, and of the equivalent call in Python."""
    return {**_everywhere(f"`vjob {words}`"), Context.PYTHON: f"`{call}`"}


SPELLINGS: Mapping[Target, Mapping[Context, str]] = {
    Target.QUEUE: _of_scheduler("cluster.nodes[].queue", "--partition"),
    Target.ACCOUNT: _of_scheduler("cluster.account", "--account"),
    Target.QOS: _of_scheduler("cluster.qos", "--qos"),
    Target.WALLTIME: _of_scheduler(
        "cluster.walltime_min",
        "--time",
        local="cluster.walltime_min",
        allocation="--time of the enclosing job",
    ),
    Target.MEMORY: _of_scheduler(
        "memory_gb of the node group", "--mem", allocation="--mem of the enclosing job"
    ),
    Target.CPUS: _of_scheduler(
        "cpus of the node group", "--cpus-per-task", allocation="cpus of the node group"
    ),
    Target.NODES: _of_scheduler(
        "count of the node group",
        "--nodes",
        machines="count of the node group",
        allocation="count of the node group",
    ),
    Target.NODE: _of_scheduler(
        "with cluster.exclude",
        "with --exclude",
        machines="of the list of machines",
        allocation="with --exclude of the enclosing job",
    ),
    Target.GPUS: _conf("gpus of the node group", "--gres"),
    Target.RANKS: _conf("ranks of the node group", "--ntasks-per-node"),
    Target.CONSTRAINT: _of_scheduler("cluster.sbatch.constraint", "--constraint"),
    Target.RESERVATION: _of_scheduler("cluster.sbatch.reservation", "--reservation"),
    Target.DEADLINE: _of_scheduler("cluster.sbatch.deadline", "--deadline"),
    Target.SCHEDULER: _conf("cluster.scheduler"),
    Target.MACHINE_LIST: {Context.MACHINES: "the list of machines"},
    Target.HETERO: _of_scheduler("cluster.hetero"),
    Target.REQUEUE: _of_scheduler("cluster.requeue", "--requeue"),
    Target.RESTARTS: _conf("cluster.restarts"),
    Target.JOIN_TIME: _conf("cluster.join_s"),
    Target.GRACE: _conf("cluster.grace_s"),
    Target.LOG_LIMIT: _conf("cluster.log_limit_mb"),
    Target.LOG_FOLDER: _conf("log_folder", "the folder of its output"),
    Target.PORT: _conf("cluster.port"),
    Target.MASTER_PORT: {Context.SBATCH: "MASTER_PORT"},
    Target.INTERFACE: _conf("interface of the node group"),
    Target.INTERFACE_VARIABLES: {Context.SBATCH: "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"},
    Target.PROGRAM: _conf("program.args", "the arguments of the script"),
    Target.LAUNCH: _conf("program.launch"),
    Target.PROGRESS: _conf("progress"),
    Target.PYTHON: _conf("program.python", "the Python interpreter of the script"),
    Target.WORKDIR: _conf("workdir", "--chdir"),
    Target.ENVIRONMENT: _conf("env", "the environment variable"),
    Target.PASSED_ENVIRONMENT: _conf("pass_env", "--export"),
    Target.BATCH_SIZE: _conf(
        "the batch size (train.micro_batch_size, or the script's own in program.args)",
        "the batch size of the script",
    ),
    Target.STEPS: _conf("train.steps", "the number of steps"),
    Target.LEARNING_RATE: _conf(
        "the learning rate (train.optimizer.lr, or the script's own in program.args)",
        "the learning rate",
    ),
    Target.GRADIENT_CLIPPING: _conf(
        "the limit on the gradient norm (train.clip_grad_norm, or the script's own)",
        "the limit on the gradient norm",
    ),
    Target.PRECISION: _conf(
        "the precision (train.precision, or the script's own)", "the precision"
    ),
    Target.CHECKPOINT: _conf("train.checkpoint.folder", "the folder of checkpoints"),
    Target.KEPT_CHECKPOINTS: _conf("train.checkpoint.keep", "the number of checkpoints kept"),
    Target.WORKERS: _everywhere("the number of data workers"),
    Target.RECOMPUTE: _conf("parallel.recompute"),
    Target.STAGES: _conf("parallel.pipeline"),
    Target.ZERO: _conf("parallel.zero"),
    Target.LAYERS: _conf("the layers of this stage in parallel.partition"),
    Target.MORPH: _of_scheduler("morph.enabled", machines="morph.enabled"),
    Target.IMAGE: _conf("container.image", "the image of the container"),
    Target.RUNTIME: _conf("container.runtime", "the container runtime"),
    Target.SCRATCH: _conf("container.scratch", "the folder of unpacked images"),
    Target.MOUNTS: _conf("container.mounts", "the mounts of the container"),
    Target.CONTAINER_WORKDIR: _conf("container.workdir", "the working directory in the container"),
    Target.REUSE: _conf("container.reuse"),
    Target.WRITABLE: _conf("container.writable"),
    Target.JOB: _everywhere("the job"),
    Target.LOGS: _command("logs JOB", "job.logs()"),
    Target.ERRORS: _command("logs JOB --errors", "job.logs(errors=True)"),
    Target.STACKS: _command("stacks JOB", "job.stacks()"),
    Target.REPORT: _command("report JOB", "job.report()"),
    Target.DOCTOR: _everywhere("`vjob doctor`"),
    Target.LOGIN: _everywhere("`ssh JOB`"),
    Target.NODE_STATE: _of_scheduler(
        "`scontrol show node JOB`",
        "`scontrol show node JOB`",
        machines="`ssh JOB`",
        allocation="`scontrol show node JOB`",
    ),
    Target.EXPECTED_START: _of_scheduler("`squeue --start`", "`squeue --start`"),
}
"""The name of each target in each context; in a context without an entry the target does not
exist."""


def context_of(scheduler: str, *, has_conf: bool = True) -> Context:
    """Return the context of a job from the name of its scheduler in records and plans."""
    if not has_conf:
        return Context.SBATCH
    contexts = {"local": Context.LOCAL, "ssh": Context.MACHINES, "allocation": Context.ALLOCATION}
    return contexts.get(scheduler, Context.CONF)


COMMANDS: FrozenSet[Target] = frozenset(
    (
        Target.LOGS,
        Target.ERRORS,
        Target.STACKS,
        Target.REPORT,
        Target.DOCTOR,
        Target.LOGIN,
        Target.NODE_STATE,
        Target.EXPECTED_START,
    )
)
"""Targets that are commands; JOB in a command is replaced by the remedy's value, a job or a
machine."""
ABSENT: FrozenSet[Tuple[Action, Context]] = frozenset(
    (Action.RELEASE, context) for context in (Context.LOCAL, Context.MACHINES, Context.ALLOCATION)
)
"""Actions that do not exist in a context, whatever their target."""


def render(remedy: Remedy, context: Context, job: str = "") -> str:
    """Render a remedy as a clause without a full stop; empty if it does not exist in `context`.

    `job` is the job or machine that commands name; without it they contain the word JOB.
    """
    if (remedy.action, context) in ABSENT:
        return ""
    names_job = remedy.target in COMMANDS or remedy.action is Action.RELEASE
    if job and names_job and not remedy.value:
        remedy = replace(remedy, value=job)
    name = ""
    if remedy.target is not None:
        name = SPELLINGS[remedy.target].get(context, "")
        if not name:
            return ""
    if remedy.action is Action.RESUME and context is Context.SBATCH:
        clause = "submit again"  # what their script makes of its checkpoints is not known
    else:
        clause = _CLAUSES[remedy.action](remedy, name)
    gap = "" if remedy.detail[:1] in (",", ":", "") else " "
    clause = f"{clause}{gap}{remedy.detail}".strip()
    return f"if {remedy.when}, {clause}" if remedy.when else clause


def render_all(remedies: Iterable[Remedy], context: Context, job: str = "") -> str:
    """Join all remedies that exist in `context`: steps by semicolons, alternatives by `or`."""
    steps: List[List[str]] = []
    for remedy in remedies:
        if not remedy.instead or not steps:
            steps.append([])
        clause = render(remedy, context, job)
        if clause:
            steps[-1].append(clause)
    return "; ".join(", or ".join(step) for step in steps if step)


def explain(meaning: str, remedies: Iterable[Remedy], context: Context, job: str = "") -> str:
    """Join the meaning of a message and what to do about it; either may be missing."""
    return ": ".join(part for part in (meaning, render_all(remedies, context, job)) if part)


def _change(verb: str) -> Callable[[Remedy, str], str]:
    def clause(remedy: Remedy, name: str) -> str:
        if remedy.target is Target.ENVIRONMENT:
            return f"{verb} {name} {remedy.value}"
        return f"{verb} {name} to {remedy.value}" if remedy.value else f"{verb} {name}"

    return clause


def _say(default: str) -> Callable[[Remedy, str], str]:
    """Return a function that words a remedy as its command in `value`, or else as `default`."""

    def clause(remedy: Remedy, name: str) -> str:
        return f"`{remedy.value}`" if remedy.value else default

    return clause


def _inspect(remedy: Remedy, name: str) -> str:
    if remedy.target in COMMANDS:
        return f"look at {name.replace('JOB', remedy.value or 'JOB')}"
    if remedy.value:
        return f"look at `{remedy.value}`"
    return f"check {name}" if name else ""


def _run(remedy: Remedy, name: str) -> str:
    if remedy.target in COMMANDS:
        return f"run {name.replace('JOB', remedy.value or 'JOB')}"
    return f"run `{remedy.value}`" if remedy.value else ""


_CLAUSES: Mapping[Action, Callable[[Remedy, str], str]] = {
    Action.SET: _change("set"),
    Action.LOWER: _change("lower"),
    Action.RAISE: _change("raise"),
    Action.CHANGE: _change("change"),
    Action.ADD: lambda remedy, name: f"add {remedy.value or 'it'} to {name}",
    Action.REMOVE: lambda remedy, name: f"take {remedy.value or 'it'} out of {name}",
    Action.EXCLUDE: lambda remedy, name: f"leave {remedy.value or 'the node'} out {name}",
    Action.MAKE_ROOM: lambda remedy, name: "make room",
    Action.MOVE: lambda remedy, name: f"move {name}",
    Action.RELEASE: lambda remedy, name: (
        f"release it with `scontrol release {remedy.value or 'JOB'}`"
    ),
    Action.RESUBMIT: _say("submit again"),
    Action.RESUME: _say("submit again, and it continues from its last checkpoint"),
    Action.CANCEL: _say("cancel it"),
    Action.WAIT: _say("wait"),
    Action.ASK_ADMIN: lambda remedy, name: "ask an admin",
    Action.TELL_ADMIN: lambda remedy, name: "tell an admin",
    Action.INSPECT: _inspect,
    Action.RUN: _run,
    Action.INSTALL: lambda remedy, name: f"install {remedy.value or 'it'}",
}
