"""Choose a queue for `queue: auto`: the first whose nodes have what a group asks for.

The queues come from the site's file, in its order, or else from the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vjob.jobs.conf.schema import JobConf, NodeGroup, Queue
from vjob.jobs.errors import InputError
from vjob.jobs.schedulers import choose as schedulers

AUTO = "auto"


def choose_queues(conf: JobConf, of_site: Mapping[str, Queue]) -> tuple[JobConf, dict[str, str]]:
    """Return the conf with a queue for each group that asks for `auto`, and each choice's reason.

    Raise InputError if no queue fits, or none is known.
    """
    groups = conf.cluster.nodes
    if not any(group.queue == AUTO for group in groups):
        return conf, {}
    scheduler = schedulers.choose_for(conf.cluster)
    queues, source = list(of_site.items()), "the site's queues"
    if scheduler.can.has_queue and not queues:
        queues, source = scheduler.describe_queues(), f"the queues that {scheduler.title} shows"
    chosen: list[NodeGroup] = []
    reasons: dict[str, str] = {}
    for group in groups:
        queue = group.queue
        if queue == AUTO and not scheduler.can.has_queue:
            queue = None
        elif queue == AUTO:
            queue, why = choose_queue(group, conf.cluster.walltime_min, queues, source)
            reasons[group.group] = f"{queue}, {why}"
        chosen.append(replace(group, queue=queue))
    return replace(conf, cluster=replace(conf.cluster, nodes=tuple(chosen))), reasons


def choose_queue(
    group: NodeGroup, walltime_min: int | None, queues: Sequence[tuple[str, Queue]], source: str
) -> tuple[str, str]:
    """Return the first queue whose nodes have what the group asks for, and the reason.

    For a group without GPUs, queues without GPUs are tried first.
    """
    if not queues:
        raise InputError(
            f"queue: auto of group {group.group}: the queues are not known; name one here, or "
            "all of them in a site file (docs/site.md)"
        )
    if not group.num_gpus:
        queues = sorted(queues, key=lambda item: bool(list_gpus(item[1])))
    unfit: list[str] = []
    for name, queue in queues:
        lack = find_lack(group, walltime_min, queue)
        if not lack:
            asked = _describe_request(group, walltime_min)
            others = f" ({'; '.join(unfit)})" if unfit else ""
            return name, f"the first of {source} with {asked}{others}"
        unfit.append(f"{name} {lack}")
    raise InputError(
        f"queue: auto of group {group.group}: none of {source} has "
        f"{_describe_request(group, walltime_min)}:\n" + "\n".join(f"  {one}" for one in unfit)
    )


def find_lack(group: NodeGroup, walltime_min: int | None, queue: Queue) -> str:
    """Return the first request of a group that a queue cannot meet; empty if it fits. Facts that
    are not known about a queue are no obstacle."""
    have = list_gpus(queue)
    if group.num_gpus and not any(_has_gpus(one, group) for one in have):
        return f"has {' and '.join(have) if have else 'no GPUs'}"
    for name, asked, limit in (
        ("CPUs a node", group.cpus, queue.cpus),
        ("GiB a node", group.memory_gb, queue.memory_gb),
    ):
        if asked is not None and limit is not None and asked > limit:
            return f"has {limit} {name}"
    if queue.nodes is not None and group.count > queue.nodes:
        return f"gives a job at most {queue.nodes} nodes"
    if None not in (walltime_min, queue.walltime_min) and walltime_min > queue.walltime_min:  # type: ignore[operator]  # both are numbers
        return f"ends jobs after {queue.walltime_min} min"
    return ""


def _has_gpus(have: str, group: NodeGroup) -> bool:
    kind, _, count = have.rpartition(":")
    asked = (group.gpu_type or "").lower()
    return int(count) >= group.num_gpus and asked in ("", kind.lower())


def _describe_request(group: NodeGroup, walltime_min: int | None) -> str:
    """Describe a request: `a100:4 and 256 GiB a node, 2 nodes, for 120 min`."""
    gpus = f"{group.gpu_type}:{group.num_gpus}" if group.gpu_type else f"{group.num_gpus} GPUs"
    parts = [gpus] if group.num_gpus else []
    parts += [f"{group.cpus} CPUs"] if group.cpus else []
    parts += [f"{group.memory_gb} GiB"] if group.memory_gb else []
    nodes = f"{group.count} node{'s' if group.count > 1 else ''}"
    limit = f" for {walltime_min} min" if walltime_min is not None else ""
    return (f"{' and '.join(parts)} a node, " if parts else "") + nodes + limit


def list_gpus(queue: Queue) -> tuple[str, ...]:
    if queue.gpus is None or queue.gpus == 0:
        return ()
    return queue.gpus if isinstance(queue.gpus, tuple) else (str(queue.gpus),)
