"""Start DeepSpeed from a conf: its ds_config, and its arguments.

The user's own file (`program.config`) takes precedence for each key; the conf provides keys that it
omits or sets to "auto". `train.schedule` does not become a scheduler in the file: DeepSpeed prefers
the file's scheduler to one made by the script, which would silently be lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vjob.jobs.conf.schema import JobConf, NodeGroup
from vjob.jobs.conf.world_size import require_number
from vjob.jobs.errors import InputError, KeyProblem

CONFIG_FILE = "ds_config.json"
CONFIG_WORD = "{ds_config}"
"""Placeholder in program.args for the path of the generated file."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BUCKET = 500_000_000
"""Elements in a bucket: DeepSpeed's default, written out so that it can be changed."""


def build_arguments(conf: JobConf, config: str) -> tuple[str, ...]:
    """Return the script's arguments. The path of the generated file replaces its placeholder in
    them, or else is added as --deepspeed_config."""
    if any(CONFIG_WORD in word for word in conf.program.args):
        return tuple(word.replace(CONFIG_WORD, config) for word in conf.program.args)
    named = {word.partition("=")[0] for word in conf.program.args}
    own = [] if "--deepspeed" in named else ["--deepspeed"]
    return (*conf.program.args, *own, "--deepspeed_config", config)


def build_config(conf: JobConf, own: Mapping[str, Any], *, replicas: int) -> dict[str, Any]:
    """Return the ds_config; raise InputError if the user's file does not fit the layout."""
    ours = _build_ours(conf)
    asked = {key: own[key] for key in BATCH_KEYS if own.get(key, "auto") != "auto"}
    batch = _build_batch(conf, replicas)
    merged = merge({**({} if asked else batch), **ours}, _fill_auto(own, {**batch, **ours}))
    _check_batch(merged, replicas)
    _check_stage(conf, own)
    return merged


def merge(ours: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key at all levels; other values in `own` replace those in `ours`."""
    found = dict(ours)
    for key, value in own.items():
        inner = found.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        found[key] = merge(inner, value) if both else value  # type: ignore[arg-type]  # both are
    return found


def render_config(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Parse the user's ds_config."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"program.config {name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"program.config {name} is not a JSON object")
    return value


def build_env(nodes: Sequence[NodeGroup]) -> dict[str, str]:
    """Return variables for every rank: without GPUs, DeepSpeed must not look for nvcc."""
    return {} if any(group.num_gpus for group in nodes) else {"DS_ACCELERATOR": "cpu"}


def build_group_env(group: NodeGroup) -> dict[str, str]:
    """Return the group's variables that DeepSpeed's launcher sets in addition to torchrun's."""
    return {"LOCAL_SIZE": str(group.num_ranks)}


def list_problems(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield settings of the conf that DeepSpeed does not support."""
    parallel = conf.parallel
    if parallel.zero > 1 and require_number(parallel.pipeline) > 1:
        message = "must be 0 or 1 for DeepSpeed's pipeline engine; or set parallel.pipeline: 1"
        yield "parallel.zero", parallel.zero, message
    if parallel.recompute in ("selective", "offload"):
        message = "is for Varuna; DeepSpeed has cpu_checkpointing, in the file of program.config"
        yield "parallel.recompute", parallel.recompute, message
    named = {word.partition("=")[0] for word in conf.program.args}
    if "--deepspeed_config" in named and not any(CONFIG_WORD in w for w in conf.program.args):
        message = (
            "vjob passes the file of program.config; if the script takes it by another option, "
            f"write {CONFIG_WORD} there"
        )
        yield "program.args", "--deepspeed_config", message


def _build_batch(conf: JobConf, replicas: int) -> dict[str, Any]:
    train = conf.train
    micro = require_number(train.micro_batch_size)
    whole = train.global_batch_size or micro * replicas * require_number(conf.parallel.pipeline)
    return dict(zip(BATCH_KEYS, (whole, micro, whole // (micro * replicas)), strict=True))


def _build_ours(conf: JobConf) -> dict[str, Any]:
    train, parallel = conf.train, conf.parallel
    found: dict[str, Any] = {
        "steps_per_print": train.log_every,
        "gradient_clipping": train.clip_grad_norm or 0.0,
        "optimizer": _build_optimizer(conf),
        "zero_optimization": {"stage": parallel.zero},
    }
    if parallel.zero:
        found["zero_optimization"].update(
            contiguous_gradients=True,
            reduce_scatter=True,
            overlap_comm=True,
            reduce_bucket_size=BUCKET,
            allgather_bucket_size=BUCKET,
        )
    if train.precision == "fp16":
        scale = 0 if train.loss_scale == "dynamic" else train.loss_scale
        found["fp16"] = {"enabled": True, "loss_scale": scale}
    elif train.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if parallel.recompute == "full":
        found["activation_checkpointing"] = {
            "partition_activations": parallel.tensor > 1,
            "contiguous_memory_optimization": False,
            "cpu_checkpointing": False,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        }
    return found


def _build_optimizer(conf: JobConf) -> dict[str, Any]:
    """Return an optimizer for scripts without one; DeepSpeed prefers a script's own."""
    optimizer = conf.train.optimizer
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.name == "sgd":
        return {"type": "SGD", "params": params}
    params["betas"] = list(optimizer.betas)
    if optimizer.name == "lamb":
        return {"type": "Lamb", "params": params}
    if not optimizer.fused or not any(group.num_gpus for group in conf.cluster.nodes):
        params["torch_adam"] = True  # the fused one is CUDA's
    return {"type": "AdamW", "params": params}


def _fill_auto(own: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Replace "auto" in the user's values; drop keys for which there is no value."""
    found: dict[str, Any] = {}
    for key, value in own.items():
        inner = ours.get(key)
        if isinstance(value, Mapping):
            found[key] = _fill_auto(value, inner if isinstance(inner, Mapping) else {})
        elif value != "auto":
            found[key] = value
        elif inner is not None:
            found[key] = inner
    return found


def _check_batch(config: Mapping[str, Any], replicas: int) -> None:
    """Check batch sizes as DeepSpeed does, which would fail only once all nodes are up."""
    whole, micro, steps = (config.get(key) for key in BATCH_KEYS)
    values = (whole, micro, steps)
    if any(value is not None and (type(value) is not int or value < 1) for value in values):
        raise InputError(f"program.config: {', '.join(BATCH_KEYS)} must be whole numbers above 0")
    if whole and micro and steps and whole != micro * steps * replicas:
        raise InputError(
            f"program.config: train_batch_size {whole} is not train_micro_batch_size_per_gpu "
            f"{micro} x gradient_accumulation_steps {steps} x {replicas} replicas; remove one, "
            "or all three and use the conf's train section"
        )
    known = (micro or 1) * (steps or 1) * replicas
    if whole and whole % known:
        raise InputError(
            f"program.config: train_batch_size {whole} is not a multiple of {known} ({replicas} "
            "replicas)"
        )


def _check_stage(conf: JobConf, own: Mapping[str, Any]) -> None:
    zero = own.get("zero_optimization")
    stage = zero.get("stage", "auto") if isinstance(zero, Mapping) else "auto"
    if stage != "auto" and conf.parallel.zero and stage != conf.parallel.zero:
        raise InputError(
            f"program.config has ZeRO stage {stage}, but parallel.zero is {conf.parallel.zero}; "
            "remove one"
        )
