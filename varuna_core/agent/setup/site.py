"""The node of an agent: its index and name in the plan, the facts that checks share, and
refusals."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Mapping, NamedTuple, Tuple

from varuna_core.agent.gpu.accelerator import Accelerator, choose_accelerator
from varuna_core.facts.cause import EndCause
from varuna_core.records.plan import ContainerPlan, NodePlan, Plan, read_attempt_plan
from varuna_core.records.runfolder import AttemptFolder, RunFolder

WRONG_INPUT = 2
STOPPED = 143
"""Exit code that a shell reports for a process ended by SIGTERM."""


class Refusal(Exception):
    """Raised if a command cannot go on; `code` is the exit code of the process."""

    def __init__(
        self, code: int, reason: str, node: str | None = None, cause: EndCause | None = None
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.node = node
        """The host at fault, if there is one."""
        self.cause = cause
        """The cause of the end, where this ends an attempt."""


def open_run(path: Path) -> RunFolder:
    if not path.is_dir():
        raise Refusal(WRONG_INPUT, f"--run {path}: there is no such run folder")
    return RunFolder(path)


def load_plan(run: RunFolder, attempt: int) -> Plan:
    plan = read_attempt_plan(run, attempt)
    if plan is None:
        what = f"{run.plan}, or that of attempt {attempt}"
        raise Refusal(WRONG_INPUT, f"{what}: missing, incomplete, or of another vjob's format")
    return plan


def group_of(plan: Plan, name: str | None) -> str | None:
    """Return the group's name in file names: None for the first group, or outside split runs."""
    name = name or None
    names = [group.name for group in plan.groups]
    if name is not None and name not in names:
        raise Refusal(WRONG_INPUT, f"--group {name}: the plan has {', '.join(names)}")
    return None if name == names[0] else name


def compute_index(plan: Plan, given: int | None, env: Mapping[str, str]) -> int:
    """Return the node's index: --node, else SLURM_NODEID from the first node of VJOB_GROUP on."""
    index = given
    if index is None:
        number = env.get("SLURM_NODEID", "")
        if not number.isdecimal():
            raise Refusal(WRONG_INPUT, "this node's index is not known: set --node or SLURM_NODEID")
        group = env.get("VJOB_GROUP")
        group_of(plan, group)
        index = int(number) + (plan.group(group).first_node if group else 0)
    if not 0 <= index < plan.num_nodes:
        raise Refusal(WRONG_INPUT, f"node {index}: the plan has nodes 0 to {plan.num_nodes - 1}")
    return index


def host_name(plan: Plan, index: int, env: Mapping[str, str], nodename: str) -> str:
    """Return the name of this node in tables and file names, which is unique in the run."""
    is_alone = plan.num_nodes == 1 and not plan.morph
    if plan.scheduler == "ssh" or (plan.scheduler == "local" and not is_alone):
        # Stand-in nodes share one host, so its name would make them share their logs.
        own = f"{plan.scheduler}{index}"
    else:
        own = env.get("SLURMD_NODENAME") or nodename
    name = env.get("VJOB_NODE_NAME") or own
    return re.sub(r"[^A-Za-z0-9_-]", "-", name.split(".")[0]) or f"node{index}"


class CheckResult(NamedTuple):
    """One result of a check."""

    status: str
    """ok, warn or fail."""
    text: str


@dataclass
class Facts:
    """Facts that checks find out besides their results; None if not known."""

    address: str | None = None
    interface: str | None = None
    gpus: int | None = None
    clock_offset_s: float | None = None
    holder: int | None = None
    """Process id of the process that keeps the node's container open, if ranks enter a single
    container."""


@dataclass(frozen=True)
class Site:
    """A node about to run its ranks."""

    plan: Plan
    node: NodePlan
    run: RunFolder
    attempt: AttemptFolder
    master: Master
    host: str
    env: Mapping[str, str]
    """The agent's own environment."""
    stopping: Callable[[], bool]
    """Function that returns True if the agent has to end, so that long commands are not waited
    for."""
    facts: Facts = field(default_factory=Facts)
    container: ContainerPlan | None = None
    """The container runtime that works on this node, once it has been chosen."""
    accelerator: Accelerator = field(default_factory=choose_accelerator)


Checker = Callable[[Site], List[CheckResult]]


@dataclass(frozen=True)
class Master:
    """master.json: where the ranks of an attempt meet."""

    address: str
    port: int
    host: str
    opened: float
    """Time at which master.json was written, which distinguishes one try of an attempt from the
    next."""
    job_id: str | None = None
    """The scheduler's id of the run's first job."""
    hosts: Tuple[str, ...] = ()
    """Host of each node, known once all are ready."""
