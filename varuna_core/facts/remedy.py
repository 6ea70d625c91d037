"""`Remedy`: what a user can do, as a type; `render` writes it in the words of the job at hand.

A job that vjob submitted has a conf, so a remedy names keys of the conf. A job that somebody
submitted with their own sbatch script has options of sbatch. A run on this machine, a run on a list
of machines and a call from Python have their own words again. Where a remedy does not exist in a
context, `render` returns an empty string: no user is told to set a key that their job lacks.

To add a thing that remedies can name: a member of `Target` and a row of `SPELLINGS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Callable, Dict, Iterable, Mapping, Optional


class Context(str, Enum):
    """What a job was started with, which decides the words of a remedy."""

    CONF = "conf"
    """A conf on Slurm or on another scheduler."""
    SBATCH = "sbatch"
    """A script of the user's own, submitted with sbatch; vjob only looks at it."""
    LOCAL = "local"
    """A conf with `scheduler: local`."""
    MACHINES = "machines"
    """A conf with a list of machines."""
    PYTHON = "python"
    """`import vjob`."""


class Action(str, Enum):
    """What is to be done."""

    SET = "set"
    LOWER = "lower"
    RAISE = "raise"
    EXCLUDE = "exclude"
    RELEASE = "release"
    RESUBMIT = "resubmit"
    RESUME = "resume"
    CANCEL = "cancel"
    WAIT = "wait"
    ASK_ADMIN = "ask-admin"
    INSPECT = "inspect"
    INSTALL = "install"
    MOUNT = "mount"


class Target(str, Enum):
    """The thing that a remedy changes or looks at."""

    QUEUE = "queue"
    ACCOUNT = "account"
    QOS = "qos"
    WALLTIME = "walltime"
    MEMORY = "memory"
    NODES = "nodes"
    NODE = "node"
    GPUS = "gpus"
    CONSTRAINT = "constraint"
    DEADLINE = "deadline"
    LOG_FOLDER = "log-folder"
    JOB = "job"
    PROGRAM = "program"
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Remedy:
    """One thing to do."""

    action: Action
    target: Optional[Target] = None
    value: str = ""
    """What to set the target to, a job's id, a node's name, a command to run."""
    detail: str = ""
    """The rest of the sentence. It names no key, option or command of one context."""


def _conf(key: str, **others: str) -> Dict[Context, str]:
    """The spelling of a conf key, which is the same for a local run and from Python."""
    words = {Context.CONF: key, Context.LOCAL: key, Context.MACHINES: key, Context.PYTHON: key}
    words.update({Context(name): word for name, word in others.items()})
    return {context: word for context, word in words.items() if word}


def _of_scheduler(key: str, option: str) -> Dict[Context, str]:
    """The spelling of a key that only a batch scheduler knows."""
    return {Context.CONF: key, Context.PYTHON: key, Context.SBATCH: option}


SPELLINGS: Mapping[Target, Mapping[Context, str]] = {
    Target.QUEUE: _of_scheduler("cluster.nodes[].queue", "--partition"),
    Target.ACCOUNT: _of_scheduler("cluster.account", "--account"),
    Target.QOS: _of_scheduler("cluster.qos", "--qos"),
    Target.WALLTIME: _of_scheduler("cluster.walltime_min", "--time"),
    Target.MEMORY: _of_scheduler("memory_gb of the node group", "--mem"),
    Target.NODES: _of_scheduler("count of the node group", "--nodes"),
    Target.NODE: _of_scheduler("cluster.exclude", "--exclude"),
    Target.GPUS: _conf("gpus of the node group", sbatch="--gres"),
    Target.CONSTRAINT: _of_scheduler("sbatch.constraint", "--constraint"),
    Target.DEADLINE: _of_scheduler("sbatch.deadline", "--deadline"),
    Target.LOG_FOLDER: _conf("log_folder", sbatch="the folder of its output"),
    Target.JOB: {context: "the job" for context in Context},
    Target.PROGRAM: _conf("program.args", sbatch="the script's own arguments"),
    Target.ENVIRONMENT: _conf("env", sbatch="the environment"),
}
"""The name of each target in each context; a context that is missing has no such thing."""


def render(remedy: Remedy, context: Context) -> str:
    """The remedy as a clause without a full stop; empty where it does not exist in `context`."""
    name = ""
    if remedy.target is not None:
        name = SPELLINGS[remedy.target].get(context, "")
        if not name:
            return ""
    return _CLAUSES[remedy.action](remedy, name).strip()


def render_all(remedies: Iterable[Remedy], context: Context) -> str:
    """All remedies that exist in `context`, joined by semicolons."""
    return "; ".join(clause for clause in (render(one, context) for one in remedies) if clause)


def _with_detail(clause: str, remedy: Remedy) -> str:
    return f"{clause} {remedy.detail}" if remedy.detail else clause


def _change(verb: str) -> Callable[[Remedy, str], str]:
    def clause(remedy: Remedy, name: str) -> str:
        goal = f" to {remedy.value}" if remedy.value else ""
        return _with_detail(f"{verb} {name}{goal}", remedy)

    return clause


def _exclude(remedy: Remedy, name: str) -> str:
    node = remedy.value or "the node"
    return _with_detail(f"leave {node} out with {name}", remedy)


def _say(default: str) -> Callable[[Remedy, str], str]:
    """A clause of its own words, or the command in `value` where there is one."""

    def clause(remedy: Remedy, name: str) -> str:
        return _with_detail(f"`{remedy.value}`" if remedy.value else default, remedy)

    return clause


def _inspect(remedy: Remedy, name: str) -> str:
    if remedy.value:
        return _with_detail(f"look at `{remedy.value}`", remedy)
    return remedy.detail if not name else _with_detail(f"check {name}", remedy)


_CLAUSES: Mapping[Action, Callable[[Remedy, str], str]] = {
    Action.SET: _change("set"),
    Action.LOWER: _change("lower"),
    Action.RAISE: _change("raise"),
    Action.EXCLUDE: _exclude,
    Action.RELEASE: _say("release it"),
    Action.RESUBMIT: _say("submit again"),
    Action.RESUME: _say("submit again: it goes on from its checkpoint"),
    Action.CANCEL: _say("cancel it"),
    Action.WAIT: _say("wait"),
    Action.ASK_ADMIN: lambda remedy, name: _with_detail("ask an admin", remedy),
    Action.INSPECT: _inspect,
    Action.INSTALL: lambda remedy, name: _with_detail(f"install {remedy.value}", remedy),
    Action.MOUNT: lambda remedy, name: _with_detail(f"mount {remedy.value}", remedy),
}
