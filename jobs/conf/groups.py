"""The groups of nodes of a plan, from those of the conf."""

from __future__ import annotations

from collections.abc import Sequence

from varuna_core.records.plan import GroupPlan
from vjob.jobs.conf.schema import NodeGroup


def build_groups(nodes: Sequence[NodeGroup]) -> tuple[GroupPlan, ...]:
    """Groups with their first node and first rank."""
    found = []
    first_node = first_rank = 0
    for group in nodes:
        found.append(
            GroupPlan(
                name=group.group,
                count=group.count,
                queue=group.queue,
                gpu_type=group.gpu_type,
                gpus=group.num_gpus,
                devices=group.devices,
                cpus=group.cpus,
                memory_gb=group.memory_gb,
                interface=None if group.interface == "auto" else group.interface,
                ranks=group.num_ranks,
                env=dict(group.env),
                first_node=first_node,
                first_rank=first_rank,
            )
        )
        first_node += group.count
        first_rank += group.count * group.num_ranks
    return tuple(found)
