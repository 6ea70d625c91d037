"""Render sbatch options as the `#SBATCH` lines of a batch script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from varuna_core.records.plan import GroupPlan
from vjob.jobs.conf.schema import Cluster, NodeGroup
from vjob.jobs.schedulers.base import ScriptRequest
from vjob.jobs.schedulers.slurm.commands import COMMENT_PREFIX

PER_COMPONENT = frozenset(
    {
        "batch",
        "constraint",
        "contiguous",
        "cores-per-socket",
        "cpu-freq",
        "exclusive",
        "extra-node-info",
        "hint",
        "mincpus",
        "nodefile",
        "nodelist",
        "oversubscribe",
        "prefer",
        "sockets-per-node",
        "switches",
        "threads-per-core",
        "tmp",
    }
)
"""sbatch options that apply to a single component of a het job."""


def render_header(asked: ScriptRequest) -> list[list[str]]:
    """Return the lines for each component of the job; those for the whole job come first."""
    components = [
        build_component_options(group, conf, asked.cluster, asked.min_nodes)
        for group, conf in zip(asked.groups, asked.nodes, strict=True)
    ]
    for options in components[1:]:
        options.insert(0, "#SBATCH hetjob")
    return [[*build_shared_options(asked), *components[0]], *components[1:]]


def build_shared_options(asked: ScriptRequest) -> list[str]:
    """Return the options that apply to a whole job, which a het job takes from its first component:
    account, time, output, ..."""
    cluster = asked.cluster
    values: dict[str, Any] = {
        "job-name": asked.name,
        "array": asked.array or None,
        "comment": f"{COMMENT_PREFIX}{asked.run}",
        "output": asked.output,
        "open-mode": "append",
        "time": cluster.walltime_min,
        "account": cluster.account,
        "qos": cluster.qos,
        **({"no-kill": True} if asked.morph else {}),  # a lost node does not end the job
        "requeue" if cluster.requeue else "no-requeue": True,
    }
    if cluster.signal_before_end_s:
        values["signal"] = f"B:USR1@{cluster.signal_before_end_s}"  # the batch script passes it on
    return [*_render_options(values), *_render_options(_pick(cluster.sbatch, per_component=False))]


def build_component_options(
    group: GroupPlan, conf: NodeGroup, cluster: Cluster, min_nodes: int | None = None
) -> list[str]:
    """Return the sbatch options of one component."""
    memory = (
        None
        if group.memory_gb is None
        else ("0" if group.memory_gb == 0 else f"{group.memory_gb}G")
    )
    gpus = None
    if group.gpus:
        gpus = f"gpu:{group.gpu_type}:{group.gpus}" if group.gpu_type else f"gpu:{group.gpus}"
    return [
        *_render_options(
            {
                "partition": group.queue,
                "nodes": group.count if min_nodes is None else f"{min_nodes}-{group.count}",
                # With it Slurm gives of a range the min_nodes, on an idle queue too (22.05).
                "ntasks-per-node": 1 if min_nodes is None else None,
                "cpus-per-task": group.cpus,
                "gres": gpus,
                "mem": memory,
                "exclude": ",".join(cluster.exclude) or None,
            }
        ),
        *_render_options({**_pick(cluster.sbatch, per_component=True), **conf.sbatch}),
    ]


def _pick(options: Mapping[str, Any], *, per_component: bool) -> dict[str, Any]:
    return {k: v for k, v in options.items() if (k in PER_COMPONENT) is per_component}


def _render_options(values: Mapping[str, Any]) -> list[str]:
    """Format `#SBATCH` lines; an option that is None or False is omitted, True makes a flag."""
    lines = []
    for key, value in values.items():
        if value is None or value is False:
            continue
        lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={_quote(value)}")
    return lines


def _quote(value: Any) -> str:
    """Quote a value for an `#SBATCH` line, whose rules are sbatch's own."""
    text = str(value)
    if re.fullmatch(r"[\w./:,@%+=\[\]-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
