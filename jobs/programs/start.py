"""How a conf's program is started, whatever its kind: command, environment, files beside it. Pure.

What lies on disk comes in as an argument (`Found`, read by `look_for`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varuna_core.records.plan import escape_placeholders
from varuna_core.records.runfolder import RunFolder
from varuna_core.records.training import render_training
from vjob.jobs.conf.layout import get_replicas, get_world
from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.errors import InputError, KeyProblem
from vjob.jobs.programs import deepspeed, megatron
from vjob.jobs.programs.megatron import Checkout, find_checkout
from vjob.jobs.programs.training import build_training


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a program's own files say."""

    checkout: Checkout | None = None
    """Of Megatron-LM; None: today's, at the conf's path."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The user's ds_config."""


def look_for(conf: JobConf) -> Found:
    """Read what the start depends on."""
    program = conf.program
    if program.kind == "megatron" and program.path is not None:
        found = Found(checkout=find_checkout(program.path))
        problems = list(megatron.find_unable(conf, _get_checkout(conf, found)))
        if problems:
            raise InputError("\n  ".join(f"{key}: {message}" for key, _, message in problems))
        return found
    if program.kind == "deepspeed" and program.config is not None:
        try:
            text = Path(program.config).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"program.config {program.config} cannot be read here: {error}; it is completed "
                "by the conf before the run, so a copy inside an image is not enough"
            ) from None
        return Found(config=deepspeed.parse_config(text, program.config))
    return Found()


def build_words(conf: JobConf, found: Found, folder: str) -> tuple[str, ...]:
    """The script and its arguments; `folder` is where `build_files` go."""
    program, run = conf.program, RunFolder(Path(folder))
    if program.path is None:
        return (str(run.program), str(run.training))
    if program.kind == "megatron":
        checkout = _get_checkout(conf, found)
        world, replicas = get_world(conf), get_replicas(conf) or 1
        args = megatron.build_arguments(
            conf, checkout, replicas=replicas, world=world, folder=folder
        )
        return (checkout.script, *args)
    if program.kind == "deepspeed":
        config = f"{folder}/{deepspeed.CONFIG_FILE}"
        return (program.path, *deepspeed.build_arguments(conf, config))
    return (program.path, *program.args)


def build_command(conf: JobConf, found: Found, folder: str, python: str) -> tuple[str, ...]:
    """What each rank runs, with words that differ by rank."""
    script, *args = map(escape_placeholders, build_words(conf, found, folder))
    own: list[str] = []
    if conf.program.kind == "deepspeed":  # as DeepSpeed's own launcher calls scripts
        own = ["--local_rank=%{local_rank}"]
    elif conf.program.kind == "megatron" and "--local_rank" in _get_checkout(conf, found).flags:
        own = ["--local_rank=%{local_rank}"]  # torch.distributed.launch did, when it was written
    return (escape_placeholders(python), "-u", script, *own, *args)


def explain_missing_module(python: str, *, in_container: bool) -> tuple[str, str]:
    """Pattern of a verdict, and what to do about it: the commonest end of a first run."""
    where = "the image's python3" if in_container else python
    return (
        r"exited \d+: ModuleNotFoundError: ",
        f"install it for {where}, or set program.python; a module of your own: env.PYTHONPATH",
    )


def marks_steps(conf: JobConf, found: Found) -> bool:
    """Whether the program itself tells a profiler which steps to look at."""
    return conf.program.kind == "megatron" and _get_checkout(conf, found).generation == "core"


def build_files(conf: JobConf, found: Found, folder: str) -> dict[str, str]:
    """Files that the program reads, by name in the folder."""
    replicas = get_replicas(conf) or 1
    training = build_training(conf, replicas)
    if training is not None:
        return {RunFolder(Path(folder)).training.name: render_training(training)}
    if conf.program.kind != "deepspeed":
        return {}
    config = deepspeed.build_config(conf, found.config, replicas=replicas, folder=folder)
    return {deepspeed.CONFIG_FILE: deepspeed.render_config(config)}


def build_env(conf: JobConf) -> dict[str, str]:
    """Variables that the program wants; the conf's own come over them."""
    if conf.program.kind == "megatron":
        # Tensor parallelism orders its communication before its kernels by it.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if conf.program.kind == "deepspeed":
        return deepspeed.build_env(conf.cluster.nodes)
    return {}


def build_group_env(conf: JobConf, group: NodeGroup) -> dict[str, str]:
    return deepspeed.build_group_env(group) if conf.program.kind == "deepspeed" else {}


def find_problems(conf: JobConf) -> Iterator[KeyProblem]:
    """What the program cannot do of what the conf says."""
    if conf.program.kind == "megatron":
        yield from megatron.find_problems(conf)
    elif conf.program.kind == "deepspeed":
        yield from deepspeed.find_problems(conf)
    if conf.profile.nsys and conf.profile.ncu:
        yield "profile.ncu", True, "cannot be together with profile.nsys; a rank has one profiler"


def _get_checkout(conf: JobConf, found: Found) -> Checkout:
    path = conf.program.path or ""
    script = path if path.endswith(".py") else f"{path}/pretrain_gpt.py"
    return found.checkout or Checkout(script=script)
