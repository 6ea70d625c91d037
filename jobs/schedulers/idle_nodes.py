"""Nodes that nobody uses, of the queues of a run: sinfo's text, parsed. Runs nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from varuna_core.records.plan import GroupPlan


@dataclass(frozen=True, kw_only=True)
class IdleNode:
    """One of them, in one queue."""

    name: str
    queue: str
    is_default: bool
    """Whether the queue is the one of jobs that name none."""
    gpus: tuple[tuple[str, int], ...]
    """Type, perhaps empty, and number."""
    cpus: int
    memory_mb: int


def build_sinfo_idle_command(queues: Sequence[str | None]) -> list[str]:
    """A line a node and queue, of these queues; all of them where the default one is asked for."""
    layout = "NodeHost:|,Partition:|,StateLong:|,Gres:|,CPUs:|,Memory:|"
    command = ["sinfo", "--noheader", "--Node", "--states=idle", "-O", layout]
    names = [queue for queue in queues if queue is not None]
    if len(names) == len(queues):
        command.append("--partition=" + ",".join(dict.fromkeys(names)))
    return command


def parse_idle_nodes(text: str) -> list[IdleNode]:
    """Those that are idle and nothing else: not reserved, draining, asleep or without an answer."""
    from vjob.jobs.schedulers.slurm_nodes import parse_gres

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


def list_fitting(
    nodes: Sequence[IdleNode], group: GroupPlan, exclude: Collection[str] = ()
) -> list[str]:
    """Names of those that a job for nodes like the group's may get."""
    names = []
    for node in nodes:
        is_in = node.is_default if group.queue is None else node.queue in group.queue.split(",")
        if is_in and node.name not in exclude and _has_all(node, group):
            names.append(node.name)
    return list(dict.fromkeys(names))


def _has_all(node: IdleNode, group: GroupPlan) -> bool:
    wanted = (group.gpu_type or "").lower()
    gpus = sum(count for kind, count in node.gpus if wanted in ("", kind.lower()))
    return (
        gpus >= group.gpus
        and node.cpus >= (group.cpus or 1)
        and node.memory_mb >= 1024 * (group.memory_gb or 0)
    )


def _to_int(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else 0
