"""Environment and command line of a rank. Pure.

Variables come from these sources, of which a later one overrides an earlier one: the agent's own
environment, vjob's defaults, the plan, the group, and the variables that give the rank its place,
which nobody may override.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Tuple

from varuna_core.agent.gpu.accelerator import split_devices
from varuna_core.agent.gpu.names import CUDA_VISIBLE
from varuna_core.agent.processes.proc import MARKS
from varuna_core.agent.setup.container import ENTRY_COMMAND, build_entry, build_environment
from varuna_core.agent.setup.world import (
    NODE,
    TORCHRUN,
    TORCHRUN_DEFAULTS,
    Rendezvous,
    build_world,
    find_job_id,
    is_kept_of_slurm,
    leave_agent,
    place_rank,
)
from varuna_core.records.plan import (
    ContainerPlan,
    GroupPlan,
    NodePlan,
    Plan,
    compute_node_values,
    fill_marks,
)
from varuna_core.records.runfolder import RunFolder

STARTUP = "agent.pyz/varuna_core/trace/startup"
"""Path in the run folder of the start-up files that the ranks' Python reads first, to count steps
or to write a timeline."""
INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_STRAY = re.compile(
    # Another python's home and start-up files, and the agent's own.
    r"PYTHON(HOME|STARTUP|EXECUTABLE)$|__PYVENV_LAUNCHER__$|VJOB_"
)
_NETWORK = re.compile(r"(NCCL|GLOO|TP)_")
_OF_HOOKS = re.compile(r"(NVIDIA|MELLANOX)_")
"""Variables that control hooks of container runtimes, which act before anything runs inside the
container."""


@dataclass(frozen=True)
class Meeting:
    """Facts of the attempt that are the same for all ranks of a node."""

    run: Path
    attempt: int
    trace: Path
    """Folder of the trace files."""
    address: str
    port: int
    interface: str | None
    host: str
    job_id: str | None = None
    hosts: Tuple[str, ...] = ()
    """Host of each node; empty before all have met."""
    visible_variable: str = CUDA_VISIBLE
    """The variable of the node's accelerator that says which devices a rank may use."""


@dataclass(frozen=True)
class RankStart:
    """The command and the environment with which one rank is started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    entering: tuple[str, ...]
    """Names of the variables that are passed into the container; empty if there is no container."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """Variables by which the rank's process is found if it is not a child of the agent; empty if it
    is one."""


def build_rank(
    plan: Plan,
    node: NodePlan,
    local_rank: int,
    meeting: Meeting,
    own: Mapping[str, str],
    container: ContainerPlan | None,
) -> RankStart:
    """Build the start of one rank; `own` is the agent's environment."""
    rank = node.first_rank + local_rank
    command = plan.command_of(rank)
    job = find_job_id(plan.scheduler, own, meeting.job_id)
    base = leave_agent(own, str(meeting.run), under_slurm=job is not None)
    base = {name: value for name, value in base.items() if not _STRAY.match(name)}
    values = compute_node_values(plan, node, meeting.address, meeting.port)
    asked = {
        name: fill_marks(text, values) for name, text in {**plan.env, **node.group.env}.items()
    }
    fixed = {
        **_world(plan, node, local_rank, meeting, job),
        **(plan.place_variables(rank) if plan.launch != NODE else _count_inner_ranks(node)),
        **_run(plan, node, rank, meeting),
    }
    visible = meeting.visible_variable
    devices = map_devices(node.group, own.get(visible))
    env = {
        **base,
        **_defaults(plan.launch, node.group, base, meeting.interface),
        **({} if devices is None else {visible: devices}),
        **asked,
        **fixed,
    }
    if container is None and "PATH" not in asked:
        env["PATH"] = plan.read_path(env)
    first = f"{meeting.run}/{STARTUP}" if plan.timeline or plan.count_steps else None
    if first is not None and (container is None or container.step):
        env["PYTHONPATH"] = ":".join(filter(None, (first, env.get("PYTHONPATH"))))
    if container is None:
        return RankStart(command, env, plan.workdir, ())
    network = {name for name in env if _NETWORK.match(name) or is_kept_of_slurm(name)}
    named = {*fixed, *asked, *network, "OMP_NUM_THREADS", "PYTHONUNBUFFERED"}
    named |= {visible, "HOME", "USER", "LOGNAME", "LANG", *TORCHRUN_DEFAULTS} & set(env)
    entering = {**container.defaults, **{name: env[name] for name in sorted(named)}}
    if container.step:  # we are inside, and over the image's own variables are these
        return RankStart(command, env, container.workdir, tuple(sorted(entering)))
    entry = build_entry(
        entering, container.workdir, reads_image=container.reads_image, python_path=first
    )
    runtime = build_environment(container, own)
    hooked = {*container.defaults, *filter(_OF_HOOKS.match, asked)}
    runtime.update({name: entering[name] for name in hooked})
    return RankStart(
        (*container.start, *ENTRY_COMMAND, *command),
        {**runtime, container.enter_as: entry},
        "/",
        tuple(sorted(entering)),
        {name: fixed[name] for name in MARKS} if container.wraps else {},
    )


def map_devices(group: GroupPlan, visible: str | None) -> str | None:
    """Return the variable of visible devices for the group's indices into `visible`."""
    if group.devices is None:
        return None
    seen = split_devices(visible) if visible is not None else None
    names = [
        str(index) if seen is None else seen[index]
        for index in group.devices
        if seen is None or index < len(seen)
    ]
    return ",".join(names)


def find_devices(group: GroupPlan, visible: str | None) -> list[str] | None:
    """Return the names of the GPUs that the ranks use; None if not known."""
    mapped = map_devices(group, visible)
    return split_devices((mapped if mapped is not None else visible) or "") or None


def _defaults(
    launch: str, group: GroupPlan, base: Mapping[str, str], interface: str | None
) -> dict[str, str]:
    ranks = group.inner_ranks or group.ranks
    threads = max(1, group.cpus // ranks) if group.cpus and ranks else 1
    found = {
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
    }
    if launch == TORCHRUN:
        found.update((name, base.get(name, value)) for name, value in TORCHRUN_DEFAULTS.items())
    if interface is not None:
        found.update(dict.fromkeys(INTERFACE_NAMES, interface))
    return found


def _world(
    plan: Plan, node: NodePlan, local_rank: int, meeting: Meeting, job: str | None
) -> dict[str, str]:
    """Return the variables of the rank's place among all ranks."""
    place = place_rank(plan, node, local_rank, meeting.hosts)
    attempt = RunFolder(meeting.run).attempt(meeting.attempt)
    facts = Rendezvous(
        address=meeting.address,
        port=meeting.port,
        run_id=plan.run,
        attempt=meeting.attempt,
        restarts=plan.restarts or 0,
        error_file=str(attempt.error_file(place.rank)),
        job_id=job,
        cpus=node.group.cpus,
    )
    return build_world(plan.launch, place, facts)


def _count_inner_ranks(node: NodePlan) -> dict[str, str]:
    """Return the number of ranks that the node's one process starts."""
    return {"VJOB_NODE_RANKS": str(node.group.inner_ranks or node.group.ranks)}


def _run(plan: Plan, node: NodePlan, rank: int, meeting: Meeting) -> dict[str, str]:
    attempt = RunFolder(meeting.run).attempt(meeting.attempt)
    return {
        **({"VJOB_STEPS": str(attempt.steps(rank))} if plan.count_steps else {}),
        **({"VJOB_ENDED": str(attempt.ended(rank))} if plan.count_steps or plan.timeline else {}),
        **({"VJOB_WATCH": "1"} if plan.timeline else {}),
        "VJOB_RUN": str(meeting.run),
        "VJOB_RUN_ID": plan.run,
        "VJOB_JOB_ID": meeting.job_id or plan.run,
        "VJOB_ATTEMPT": str(meeting.attempt),
        "VJOB_NUM_NODES": str(plan.num_nodes),
        "VJOB_NODE": meeting.host,
        "VJOB_GROUP": node.group.name,
        "VJOB_TRACE": str(meeting.trace / f"{rank}.jsonl"),
        "VJOB_NODE_TRACE": str(meeting.trace / f"node-{node.index}.jsonl"),
    }
