"""A conf as shell scripts for machines without Slurm and without vjob. Pure.

    script, megatron   node-<k>.sh: torchrun, one script on each machine, by hand
    elastic            node.sh: torchrun's own rendezvous, the same on every machine
    deepspeed          run.sh: its launcher, from one machine over ssh, with a hostfile
                       node-<k>.sh: its launcher on each machine, where there is no ssh

The environment is that of the shell they are called from, and the conf's.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from varuna_core.agent.gpu.names import CUDA_VISIBLE
from varuna_core.records.layout import build_stages, encode_stage_map
from varuna_core.records.training import LAYOUT_VARIABLES
from vjob.jobs.conf.fates import build_variables
from vjob.jobs.conf.layout import choose_order, get_replicas, require_number
from vjob.jobs.conf.references import fill_references
from vjob.jobs.conf.schema import JobConf, Morph, NodeGroup
from vjob.jobs.errors import InputError
from vjob.jobs.programs import deepspeed
from vjob.jobs.programs.start import ProgramFiles, build_files, get_starter

PORT = 29500
"""torchrun's own default, below the ephemeral range."""
HOSTFILE = "hostfile"


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Machines that the scripts are made for."""

    hosts: tuple[str, ...]
    """One a node, in the conf's order; the first is the master."""
    folder: str
    """Where the scripts lie, on every machine."""
    workdir: str
    elastic: tuple[int, int] | None = None
    """Fewest and most nodes."""
    restarts: int = 0
    """How often torchrun starts the ranks again."""


def build_scripts(
    conf: JobConf, found: ProgramFiles, machines: Machines, written: Collection[str] = ()
) -> dict[str, str]:
    """All files to write, by name; `written` are the keys that the conf writes."""
    variables = build_variables(conf, written) | _build_layout_variables(conf, machines)
    fixed = replace(conf, morph=Morph())  # without vjob the layout stays
    filled = fill_references(fixed)
    conf = replace(filled, env={**variables, **filled.env})
    nodes = deepspeed.list_groups(conf.cluster.nodes)
    if machines.elastic is None and len(machines.hosts) != len(nodes):
        raise InputError(
            f"the conf has {len(nodes)} nodes, and {len(machines.hosts)} hosts were given; give "
            "--host once for each"
        )
    if conf.program.arguments != "none":
        raise InputError(
            "program.arguments: torchrun gives scripts no ranks as arguments; leave it out, and "
            "let the script read RANK and LOCAL_RANK"
        )
    files = build_files(conf, found, machines.folder)
    words = get_starter(conf).build_words(conf, found, machines.folder)
    if conf.program.kind == "deepspeed":
        if machines.elastic is not None:
            raise InputError("DeepSpeed's launcher keeps its nodes; --elastic is for torchrun")
        return {**files, **_build_deepspeed(conf, machines, words)}
    if machines.elastic is not None:
        return {**files, "node.sh": _build_elastic(conf, machines, words)}
    python = conf.program.python or "python3"
    for index, group in enumerate(nodes):
        options = [
            f"--nproc_per_node={group.num_ranks}",
            f"--nnodes={len(nodes)}",
            f"--node_rank={index}",
            f"--master_addr={machines.hosts[0]}",
            f"--master_port={_get_port(conf)}",
            f"--max_restarts={machines.restarts}",
        ]
        command = [python, "-m", "torch.distributed.run", *options, *words]
        files[f"node-{index}.sh"] = _render(conf, machines, command, group)
    return files


def _build_layout_variables(conf: JobConf, machines: Machines) -> dict[str, str]:
    """The layout as variables of a script, where its ranks are known."""
    replicas = get_replicas(conf)
    if conf.program.kind != "script" or machines.elastic is not None or replicas is None:
        return {}
    pipeline = require_number(conf.parallel.pipeline)
    order = choose_order(conf, replicas)
    values = {
        "parallel.order": encode_stage_map(build_stages(pipeline, replicas, order)),
        "parallel.pipeline": str(pipeline),
        "parallel.data": str(replicas),
        "parallel.tensor": str(conf.parallel.tensor),
        "parallel.partition": str(conf.parallel.partition),
    }
    return {LAYOUT_VARIABLES[key]: value for key, value in values.items() if value != "auto"}


def _build_elastic(conf: JobConf, machines: Machines, words: Sequence[str]) -> str:
    groups = conf.cluster.nodes
    low, high = machines.elastic or (1, 1)
    shapes = {(group.num_ranks, group.devices, tuple(group.env.items())) for group in groups}
    if len(shapes) > 1:
        raise InputError("--elastic wants nodes of one kind: the same script runs on every one")
    if not 1 <= low <= high:
        raise InputError(f"--elastic {low}:{high}: give the fewest and the most nodes, as 1:4")
    options = [
        f"--nproc_per_node={groups[0].num_ranks}",
        f"--nnodes={low}:{high}",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={machines.hosts[0]}:{_get_port(conf)}",
        f"--rdzv_id={conf.name}",
        f"--max_restarts={machines.restarts}",
    ]
    python = conf.program.python or "python3"
    command = [python, "-m", "torch.distributed.run", *options, *words]
    return _render(conf, machines, command, groups[0])


def _build_deepspeed(conf: JobConf, machines: Machines, words: Sequence[str]) -> dict[str, str]:
    nodes, hosts = conf.cluster.nodes, machines.hosts
    if len({tuple(group.env.items()) for group in nodes}) > 1:
        raise InputError(
            "cluster.nodes[].env differs between groups, which DeepSpeed's launcher cannot do; "
            "use env for all"
        )
    hostfile = f"{machines.folder}/{HOSTFILE}"
    places = [f"--hostfile={hostfile}", f"--include={deepspeed.spell_include(nodes, hosts)}"]
    places += [f"--master_addr={hosts[0]}", f"--master_port={_get_port(conf)}"]
    files = {HOSTFILE: deepspeed.render_hostfile(nodes, hosts)}
    files["run.sh"] = _render(conf, machines, ["deepspeed", *places, *words])
    for index in range(len(hosts) if len(hosts) > 1 else 0):
        alone = ["--no_ssh", f"--node_rank={index}"]
        command = ["deepspeed", *places, *alone, *words]
        files[f"node-{index}.sh"] = _render(conf, machines, command)
    return files


def _get_port(conf: JobConf) -> int:
    return PORT if conf.cluster.port == "auto" else conf.cluster.port


def _render(
    conf: JobConf, machines: Machines, command: Sequence[str], group: NodeGroup | None = None
) -> str:
    env: Mapping[str, str] = {**get_starter(conf).build_env(conf), **conf.env}
    if group is not None and group.devices is not None:  # DeepSpeed's launcher sets it itself
        env = {**env, CUDA_VISIBLE: ",".join(map(str, group.devices))}
    env = {**env, **(group or conf.cluster.nodes[0]).env}
    lines = ["#!/bin/bash", "set -euo pipefail", f"cd {shlex.quote(machines.workdir)}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines += [*conf.setup, "exec " + " \\\n  ".join(map(shlex.quote, command))]
    return "\n".join(lines) + "\n"
