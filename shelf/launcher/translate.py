"""The launcher's flags as a conf. Pure, but for `read_inputs`.

--machine_list --gpus_per_node --cpu       cluster.machine_list, cluster.nodes
--nstages --chunk_size --batch_size        parallel.pipeline, train.*, program.arguments: varuna
--profile                                  the same, and parallel.partition
--code_dir --python --env_file             workdir, program.python, env
without --no_morphing                      morph.enabled
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.agent.gpu.names import CUDA_VISIBLE
from varuna_core.agent.meeting.network import is_own_address
from varuna_core.launch.errors import LaunchError
from varuna_core.launch.machines import read_machine_list
from vjob.jobs.errors import InputError
from vjob.shelf.launcher.envfile import parse_env_file
from vjob.shelf.launcher.layout import MachineRanks, PlannedShape, choose_shape, lay_out
from vjob.shelf.run.program import keep_text, name_run

PLANNER = (
    "--nstages and --chunk_size are both needed; with --profile, a file that "
    "varuna_core.Profiler or `vjob profile` wrote of the model, what is left out is planned"
)
SEATS = 4
"""A run that may morph has seats for so many times the machines that it starts with."""
JOIN_S = 120


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The command line, checked as far as one word goes; saved in launch.json.

    Paths are absolute.
    """

    machine_list: str
    gpus_per_node: int
    nstages: int | None
    chunk_size: int | None
    batch_size: int | None
    manager_ip: str | None
    no_morphing: bool
    code_dir: str
    env_file: str | None
    python: str
    ssh_config: str | None
    cpu: bool
    command: list[str]
    """The training script and its arguments."""
    profile: str | None = None
    no_arguments: bool = False


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Contents of the files that arguments name, and what was planned."""

    machines: int
    env: Mapping[str, str]
    shape: PlannedShape
    layout: MachineRanks


def read_inputs(arguments: Arguments) -> Inputs:
    """Refuse all that can be refused without a look at any machine."""
    if not arguments.command:
        raise InputError("which training script? It comes last, its own arguments after it")
    if arguments.batch_size is None:
        raise InputError("--batch_size is needed: the samples of a step, over all replicas")
    if arguments.manager_ip is not None and not is_own_address(arguments.manager_ip):
        raise InputError(f"--manager_ip {arguments.manager_ip} is no address of this machine")
    if "\0" in "".join(arguments.command):
        raise InputError("an argument of the training script holds a NUL character")
    try:
        machines = len(read_machine_list(Path(arguments.machine_list)))
    except LaunchError as error:
        raise InputError(f"--machine_list: {error}") from None
    shape = _choose(arguments, machines, arguments.batch_size)
    layout = lay_out(
        machines=machines,
        gpus_per_node=arguments.gpus_per_node,
        stages=shape.stages,
        batch_size=arguments.batch_size,
        chunk_size=shape.chunk_size,
    )
    env = {}
    if arguments.env_file is not None:
        name = os.path.basename(arguments.env_file)
        env = parse_env_file(_read(arguments.env_file, "--env_file"), name)
    script = Path(arguments.code_dir, arguments.command[0])
    if not script.is_file():
        raise InputError(f"{arguments.command[0]} is not in --code_dir {arguments.code_dir}")
    return Inputs(machines=machines, env=env, shape=shape, layout=layout)


def _choose(arguments: Arguments, machines: int, batch_size: int) -> PlannedShape:
    """Stages, samples of a micro-batch and partition, and how they were found."""
    stages, chunk_size = arguments.nstages, arguments.chunk_size
    if stages is not None and chunk_size is not None:
        return PlannedShape(stages, chunk_size, None, "")
    if arguments.profile is None:
        raise InputError(PLANNER)
    if chunk_size is not None:
        raise InputError("--chunk_size is given and --nstages is not: give both, or leave both out")
    return choose_shape(
        arguments.profile,
        gpus=machines * arguments.gpus_per_node,
        gpus_per_node=arguments.gpus_per_node,
        batch_size=batch_size,
        stages=stages,
    )


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag} {path}: this is not text in UTF-8") from None


def build_conf(arguments: Arguments, inputs: Inputs, log_folder: str) -> dict[str, Any]:
    """The conf of a launch."""
    script, *args = arguments.command
    devices, env = _take_devices(inputs.env)
    conf: dict[str, Any] = {
        "name": name_run(script),
        "program": {
            "script": os.path.join(arguments.code_dir, script),
            "arguments": "none" if arguments.no_arguments else "varuna",
            "args": [keep_text(word) for word in args],
            "python": arguments.python,
        },
        "workdir": arguments.code_dir,
        "env": {name: keep_text(value) for name, value in env.items()},
        "train": {
            "global_batch_size": arguments.batch_size,
            "micro_batch_size": inputs.shape.chunk_size,
        },
        "parallel": {"pipeline": inputs.shape.stages, "order": "pipeline"},
        "cluster": {
            "machine_list": arguments.machine_list,
            "join_s": JOIN_S,
            "nodes": _build_nodes(arguments, inputs, devices),
        },
        "log_folder": log_folder,
    }
    if inputs.shape.partition is not None:
        conf["parallel"]["partition"] = inputs.shape.partition
    if arguments.ssh_config is not None:
        conf["cluster"]["ssh_config"] = arguments.ssh_config
    if not arguments.no_morphing:
        conf["morph"] = {"enabled": True, "max_nodes": SEATS * inputs.machines}
    elif arguments.manager_ip is not None:
        conf["cluster"]["address"] = arguments.manager_ip
    return conf


def _build_nodes(
    arguments: Arguments, inputs: Inputs, devices: list[int] | None
) -> list[dict[str, Any]]:
    groups = inputs.layout.nodes
    if not arguments.no_morphing:  # each attempt takes what it can use of them
        groups = ((inputs.machines, arguments.gpus_per_node),)
    nodes = []
    for index, (count, ranks) in enumerate(groups):
        node: dict[str, Any] = {"group": f"g{index}", "count": count, "ranks": ranks}
        if not arguments.cpu:
            node["gpus"] = ranks
        if devices is not None and not arguments.cpu:
            if len(devices) < ranks:
                raise InputError(
                    f"--env_file: {CUDA_VISIBLE} names {len(devices)} GPUs, and --gpus_per_node is "
                    f"{arguments.gpus_per_node}"
                )
            node["devices"] = devices[:ranks]
            node["gpus"] = max(devices) + 1
        nodes.append(node)
    return nodes


def _take_devices(env: Mapping[str, str]) -> tuple[list[int] | None, dict[str, str]]:
    """GPUs that the environment file names, for all machines; and the other variables."""
    rest = {name: value for name, value in env.items() if name != CUDA_VISIBLE}
    words = env.get(CUDA_VISIBLE, "").replace(" ", "").split(",")
    if CUDA_VISIBLE not in env or words == [""]:
        return None, rest
    if not all(word.isdecimal() for word in words):
        raise InputError(f"--env_file: {CUDA_VISIBLE}: want numbers, such as 0,1")
    return [int(word) for word in words], rest
