"""Build `sinfo` and `scontrol` commands about nodes, and parse their output. Runs nothing.

Nodes with GPUs become node groups of a conf; idle nodes are those that a growing run could get.
GRES has the form `gpu:a100:4(S:0-1)` from Slurm 20.11 on. Fields end with `|`, so that none is
truncated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from varuna_core.facts.cluster import NodeCondition, NodeState
from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.gpus import find_gpu
from varuna_core.records.files import as_whole
from varuna_core.records.formatting import fold_names
from vjob.jobs.conf.schema import NodeGroup, Queue
from vjob.jobs.conf.slurm_words import to_minutes
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers.job import IdleNode
from vjob.jobs.schedulers.slurm.commands import parse_date

LOST = re.compile(r"down|fail|error|unknown|reboot|powered|powering_down|.*\*$", re.IGNORECASE)
"""sinfo's states of nodes that cannot run jobs; `*` marks a node that does not respond."""
_GONE = {"DOWN", "ERROR", "NOT_RESPONDING", "REBOOT_ISSUED", "POWERED_DOWN"}
_LEAVING = {"DRAIN", "FAIL", "REBOOT_REQUESTED", "POWER_DOWN", "POWERING_DOWN"}
"""scontrol's states of nodes whose jobs may finish but which start no new jobs."""
_GIVEN = re.compile(r" \[([^\[\]@ ]*)@([^\[\] ]*)\]")
"""User and time that scontrol prints after a node's reason."""


def build_show_node_command(nodes: Sequence[str]) -> list[str]:
    """Build the scontrol command that shows these nodes; it costs two requests for any number."""
    return ["scontrol", "--local", "-o", "show", "node", fold_names(nodes)]


def parse_node_states(text: str) -> list[NodeState]:
    """Parse the nodes that are lost, draining or in maintenance, each with the admin's reason."""
    found = []
    for line in text.splitlines():
        name, state = re.match(r"NodeName=(\S+)", line), re.search(r"\sState=(\S+)", line)
        condition = None if state is None else _judge_state(state[1])
        if name is None or state is None or condition is None:
            continue
        rest = line.partition(" Reason=")[2]
        given = _GIVEN.search(rest)
        reason = (
            rest[: given.start()] if given else re.split(r" (?=[A-Z]\w*=)", rest, maxsplit=1)[0]
        )
        found.append(
            NodeState(
                name=name[1],
                condition=condition,
                word=state[1].lower(),
                reason=reason.strip(),
                by=given[1] if given else "",
                since=parse_date(given[2]) if given else None,
            )
        )
    return found


def _judge_state(word: str) -> NodeCondition | None:
    """Return the condition for a state such as `MIXED+DRAIN`, or `MIXED*` for a node that does not
    respond (up to 20.11); None for a node that is well."""
    flags = set(word.upper().replace("*", "+NOT_RESPONDING").split("+"))
    if flags & _GONE:
        return NodeCondition.LOST
    if flags & _LEAVING:
        return NodeCondition.DRAINING
    return NodeCondition.MAINTENANCE if flags & {"MAINT", "MAINTENANCE"} else None


def build_sinfo_idle_command(queues: Sequence[str | None]) -> list[str]:
    """Build the sinfo command for idle nodes, one line per node and queue; of all queues if one of
    `queues` is None, the default queue."""
    layout = "NodeHost:|,Partition:|,StateLong:|,Gres:|,CPUs:|,Memory:|"
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "-O", layout]
    names = [queue for queue in queues if queue is not None]
    if len(names) == len(queues):
        command.append("--partition=" + ",".join(dict.fromkeys(names)))
    return command


def parse_idle_nodes(text: str) -> list[IdleNode]:
    """Parse the nodes that are plainly idle: not reserved, draining, asleep or not responding."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6 or cells[2].lower() != "idle":
            continue
        name, queue, _, gres, cpus, memory = cells[:6]
        found.append(
            IdleNode(
                name=name,
                queue=queue.rstrip("*"),
                is_default=queue.endswith("*"),
                gpus=tuple(parse_gres(gres)),
                cpus=_to_int(cpus),
                memory_mb=_to_int(memory),
            )
        )
    return found


def _to_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return (as_whole(match.group()) or 0) if match else 0


_GPU = re.compile(r"gpu(?::(?P<type>[^:(),]+))?:(?P<count>\d+)(?:\(.*\))?")
_NOT_OURS = re.compile(r"drain|maint|resv|reserved|planned|inval", re.IGNORECASE)


def build_sinfo_nodes_command(partition: str | None = None) -> list[str]:
    """Build the sinfo command that lists nodes, one line per node and partition."""
    layout = "NodeHost:|,Partition:|,StateLong:|,Gres:|,Features:|"
    command = ["sinfo", "--noheader", "--Node", "-O", layout]
    return command if partition is None else [*command, f"--partition={partition}"]


def parse_sinfo_nodes(text: str) -> list[NodeGroup]:
    """Parse the nodes with GPUs that a job could get, including busy nodes, with equal nodes as one
    group.

    A node in several Slurm partitions counts only for the first one in sinfo's output.
    """
    seen: set[str] = set()
    counted: Counter[tuple[str, str, int]] = Counter()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or cells[0] in seen:
            continue
        name, queue, state, gres, features = cells[:5]
        seen.add(name)
        if LOST.match(state) or _NOT_OURS.search(state):
            continue
        for kind, count in parse_gres(gres):
            counted[queue.rstrip("*"), kind or guess_kind(features), count] += 1
    groups = []
    names: Counter[str] = Counter()
    for (queue, kind, count), nodes in sorted(counted.items(), key=lambda item: -item[1]):
        base = re.sub(r"[^\w-]+", "-", kind or queue)
        names[base] += 1
        groups.append(
            NodeGroup(
                group=base if names[base] == 1 else f"{base}-{names[base]}",
                count=nodes,
                queue=queue,
                gpus=f"{kind}:{count}" if kind else count,
            )
        )
    if not groups:
        raise InputError(
            "sinfo shows no node with GPUs that a job could get; look at `sinfo -N -O "
            "NodeHost,StateLong,Gres`, or set cluster.nodes in the conf"
        )
    return groups


def build_sinfo_queues_command() -> list[str]:
    """Build the sinfo command that lists each kind of node of each partition."""
    layout = "Partition:|,Available:|,Time:|,Gres:|,CPUs:|,Memory:|,Nodes:|"
    return ["sinfo", "--noheader", "--exact", "-O", layout]


def parse_queues(text: str) -> list[tuple[str, Queue]]:
    """Parse the partitions that are up, each once for every kind of node; the default partition
    first.

    sinfo does not report who may use a partition, nor how many of its nodes a job may have. GPUs
    without a type in GRES cannot be requested by type.
    """
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    rows = [cells for cells in lines if len(cells) > 6 and cells[1].lower() == "up"]
    sizes: Counter[str] = Counter()
    for cells in rows:
        sizes[cells[0]] += _to_int(cells[6])
    return [
        (
            cells[0].rstrip("*"),
            Queue(
                gpus=tuple(f"{kind}:{num}".lstrip(":") for kind, num in parse_gres(cells[3])),
                cpus=_to_int(cells[4]),
                memory_gb=_to_int(cells[5]) // 1024,
                walltime_min=to_minutes(cells[2]),
                nodes=sizes[cells[0]],
            ),
        )
        for cells in sorted(rows, key=lambda cells: not cells[0].endswith("*"))
    ]


def parse_starting_nodes(text: str) -> list[NodeGroup]:
    """Parse the groups of nodes with GPUs; if there are none, return one group of the default Slurm
    partition."""
    try:
        return parse_sinfo_nodes(text)
    except InputError:
        queues = [line.split("|")[1].strip() for line in text.splitlines() if line.count("|") > 1]
        known = sorted(queues, key=lambda queue: not queue.endswith("*"))
        return [NodeGroup(group="main", queue=known[0].rstrip("*"))] if known else []


def parse_gres(text: str) -> list[tuple[str, int]]:
    """Parse `gpu:a100:4(S:0-1),shard:8` to [("a100", 4)], without shards and MIG slices."""
    found = []
    for word in re.findall(r"(?:[^,(]|\([^()]*\))+", text):
        match = _GPU.fullmatch(word.strip())
        if match and (count := as_whole(match["count"])):
            found.append((match["type"] or "", count))
    return found


def guess_kind(features: str) -> str:
    """Guess a node's GPU type from its features, if GRES has no type; empty unless they name
    exactly one."""
    kinds = set()
    for word in features.split(","):
        try:
            kinds.add(find_gpu(word).name)
        except PlanningError:
            continue
    return kinds.pop() if len(kinds) == 1 else ""
