"""Environment by which a rank finds its place among all: torchrun's variables and Slurm's.

    launch     processes     torchrun's    Slurm's, on Slurm
    torchrun   one a rank    of the rank   as srun with a task a rank sets them
    srun       one a rank    none          the same
    python     one in all    none          of a job with one task
    node       one a node    none          as srun with a task a node sets them

Only this module chooses these variables. It also chooses which variables of the agent's environment
a rank does not get: those of an outer launcher, and those of the agent's own task, since srun
starts one agent on each node. Pure.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Dict, Mapping, Optional, Tuple

from varuna_core.records.formatting import fold_names
from varuna_core.records.plan import UNDER_SLURM, NodePlan, Plan

TORCHRUN, SRUN, PYTHON, NODE = LAUNCHES = ("torchrun", "srun", "python", "node")
STAND_INS = "local-bin."
"""Beginning of the name of the folder with a stand-in for srun, which is on the PATH of a batch
script without Slurm (jobs/schedulers)."""
STORE_OF_RANK_0 = str(False)
"""Value of torch's variable TORCHELASTIC_USE_AGENT_STORE if rank 0 serves the store; under torchrun
the launcher serves it."""
HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default list of signals to handle, which is read by programs that ranks start with
torch's own launcher."""

_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK$|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE$|NODE_RANK$|ROLE_NAME$|"
    r"MASTER_(ADDR|PORT)$|TORCHELASTIC_"
)
_SLURM = re.compile(r"SLURMD?_")
_KEPT_OF_SLURM = re.compile(
    # Of the job,
    r"SLURM_((CLUSTER_NAME|WORKING_CLUSTER|RESTART_COUNT|TMPDIR|ARRAY_\w+|SUBMIT_(DIR|HOST)|"
    r"JOB_(NAME|PARTITION|ACCOUNT|QOS|USER|UID|GID|RESERVATION|COMMENT|LICENSES|CONSTRAINTS|"
    r"START_TIME|END_TIME|GPUS)|MEM_PER_(CPU|NODE|GPU)|"
    # of its step of agents, and of the node.
    r"STEP_?ID|STEP_GPUS|GPUS_ON_NODE|CPUS_ON_NODE|TOPOLOGY_ADDR(_PATTERN)?)$|CONF$)|"
    r"SLURMD_NODENAME$"
)
_ENDS_WITH_AGENT = re.compile(
    # srun's own plug-ins for MPI and what other launchers of MPI set; a user's settings of Open MPI
    # are OMPI_MCA_*.
    r"PMI|PMIX_|OMPI_(?!MCA_)|PRTE_|MV2_COMM_WORLD_|MPI_LOCAL(RANKID|NRANKS)$|PALS_"
)


@dataclass(frozen=True)
class Place:
    """Position of a process among all processes that are started in the same way."""

    rank: int
    local_rank: int
    node: int
    node_ranks: Tuple[int, ...]
    """Number of processes, of those started in the same way, on each node."""
    hosts: Tuple[str, ...] = ()
    """Host of each node, rank 0's first; empty before all nodes have met."""

    @property
    def world(self) -> int:
        return sum(self.node_ranks)


@dataclass(frozen=True)
class Rendezvous:
    """Facts of an attempt, by which its processes meet."""

    address: str
    port: int
    run_id: str
    attempt: int
    restarts: int
    """The most restarts that the run may have."""
    error_file: str
    """Path of the file to which a rank writes the exception that ends it."""
    job_id: Optional[str] = None
    """Slurm's id of the job; None if the run is not under Slurm."""
    cpus: Optional[int] = None
    """Number of the node's processors that are meant for its ranks; None if no number was
    requested."""


def build_world(launch: str, place: Place, meeting: Rendezvous) -> Dict[str, str]:
    """Build all variables of a process's place, none of which may be overridden.

    `place` counts ranks for `torchrun` and `srun`, and processes for `python` and `node`.
    """
    found: Dict[str, str] = {}
    if launch == TORCHRUN:
        found.update(build_torchrun_variables(place, meeting))
    elif launch == NODE:
        found.update(build_node_variables(place, meeting))
    if meeting.job_id is not None:
        found.update(build_slurm_variables(place, meeting))
    return found


def place_rank(plan: Plan, node: NodePlan, local_rank: int, hosts: Tuple[str, ...]) -> Place:
    """Return the place of a rank among all ranks."""
    counts = tuple(group.ranks for group in plan.groups for _ in range(group.count))
    return Place(node.first_rank + local_rank, local_rank, node.index, counts, hosts)


def build_torchrun_variables(place: Place, meeting: Rendezvous) -> Dict[str, str]:
    """Build the variables that torchrun sets for each rank, and NODE_RANK."""
    rank, world, node = str(place.rank), str(place.world), str(place.node)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(place.node_ranks[place.node]),
        "NODE_RANK": node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": str(len(place.node_ranks)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RUN_ID": meeting.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(meeting.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(meeting.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": STORE_OF_RANK_0,
        "TORCHELASTIC_ERROR_FILE": meeting.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": HANDLED,
    }


TORCHRUN_NAMES = frozenset(
    build_torchrun_variables(Place(0, 0, 0, (1,)), Rendezvous("", 0, "", 0, 0, ""))
)
TORCHRUN_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""Variables that torchrun sets unless the environment has them already."""


def build_node_variables(place: Place, meeting: Rendezvous) -> Dict[str, str]:
    """Build the variables with which a launcher on each node starts its ranks."""
    return {
        "NODE_RANK": str(place.node),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }


def build_slurm_variables(place: Place, meeting: Rendezvous) -> Dict[str, str]:
    """Build the variables that srun sets with one task per process, for one job of all nodes."""
    job, tasks, nodes = str(meeting.job_id), str(place.world), str(len(place.node_ranks))
    layout = _spell_counts(place.node_ranks)
    found = {
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node),
        "SLURM_LAUNCH_NODE_IPADDR": meeting.address,
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), layout),
    }
    if len(set(place.node_ranks)) == 1:
        found["SLURM_NTASKS_PER_NODE"] = str(place.node_ranks[0])
    if meeting.cpus is not None:
        found["SLURM_CPUS_PER_TASK"] = str(max(1, meeting.cpus // place.node_ranks[place.node]))
    if place.hosts:
        names = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")
        found.update(dict.fromkeys(names, fold_names(place.hosts)))
    return found


def _spell_counts(counts: Tuple[int, ...]) -> str:
    """Spell numbers of tasks as Slurm does: `2(x3),1`."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def find_job_id(scheduler: str, own: Mapping[str, str], first: Optional[str]) -> Optional[str]:
    """Return the job's number for all ranks; None if they do not run under Slurm.

    `first` is the id of the run's first job; SLURM_JOB_ID is used if `first` is not a plain number,
    as for an array task (4711_3).
    """
    number = own.get("SLURM_JOB_ID")
    if scheduler not in UNDER_SLURM or number is None:
        return None
    return first if first is not None and first.isdecimal() else number


def is_kept_of_slurm(name: str) -> bool:
    """Return True for a variable of Slurm that is equal for the agent and the ranks of the node."""
    return _KEPT_OF_SLURM.match(name) is not None


def is_of_launcher(name: str) -> bool:
    """Return True for a variable with which torchrun, srun or MPI tells a process its place."""
    return any(one.match(name) for one in (_TORCHRUN, _SLURM, _ENDS_WITH_AGENT))


def leave_agent(own: Mapping[str, str], run: str, *, under_slurm: bool) -> Dict[str, str]:
    """Return the agent's environment without variables of its own task or of an outer launcher."""
    found = {
        name: value
        for name, value in own.items()
        if name == "SLURM_CONF" or not is_of_launcher(name)
    }
    if under_slurm:
        found.update((name, own[name]) for name in filter(is_kept_of_slurm, own))
    if "PATH" in found:
        stand_ins = f"{run}/{STAND_INS}"
        folders = found["PATH"].split(os.pathsep)
        found["PATH"] = os.pathsep.join(one for one in folders if not one.startswith(stand_ins))
    return found


def follows_place(name: str) -> bool:
    """Return True for a variable that is read when processes meet, and not at an import."""
    return bool(_TORCHRUN.match(name) or _SLURM.match(name))
