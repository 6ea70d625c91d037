"""The training that a conf asks for, as ranks get it: made by `jobs`, read by the ranks.

A built-in program reads training.json. Flat, since each value has one reader; the names are those
of the conf, with the section in front where it would not be clear. A script finds what its conf
writes as variables, by `VARIABLES`. Where a rank stands comes with its environment to both.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Optional, Tuple, Union

from varuna_core.facts.partition import Partition
from varuna_core.records.files import parse_json, read_bytes

TRAINING_FORMAT = 1

BUILT_IN = ("pretrain_gpt", "pretrain_bert")
"""Programs that read training.json; others are the user's own."""

VARIABLES: Mapping[str, str] = {
    "train.global_batch_size": "VJOB_GLOBAL_BATCH_SIZE",
    "train.micro_batch_size": "VJOB_MICRO_BATCH_SIZE",
    "train.precision": "VJOB_PRECISION",
    "train.loss_scale": "VJOB_LOSS_SCALE",
    "train.seed": "VJOB_SEED",
    "train.log_every": "VJOB_LOG_EVERY",
    "train.optimizer.offload": "VJOB_OFFLOAD",
    "train.checkpoint.folder": "VJOB_CHECKPOINT",
    "train.checkpoint.keep": "VJOB_CHECKPOINT_KEEP",
    "train.checkpoint.local": "VJOB_CHECKPOINT_LOCAL",
    "parallel.zero": "VJOB_ZERO",
    "parallel.recompute": "VJOB_RECOMPUTE",
    "parallel.schedule": "VJOB_SCHEDULE",
    "profile.timeline": "VJOB_TIMELINE",
}
"""Variables of a script's ranks by the keys of the conf; set where the conf writes the key, and
for the number of checkpoints that are kept where it writes their folder."""
LAYOUT_VARIABLES: Mapping[str, str] = {
    "parallel.pipeline": "VJOB_PIPELINE",
    "parallel.data": "VJOB_DATA",
    "parallel.tensor": "VJOB_TENSOR",
    "parallel.order": "VJOB_STAGE_MAP",
    "parallel.partition": "VJOB_PARTITION",
}
"""Those that the agent sets for every rank (agent/setup/ranks.py), by the keys that decide them."""


@dataclass(frozen=True)
class Llama:
    """The parts of a decoder of Llama's and Qwen's kind that GPT-2 has otherwise."""

    inner: int
    """Width of the gated MLP."""
    kv_heads: int
    """Heads of keys and values, each shared by several of queries."""
    head_size: int
    tied: bool
    """The head has the embedding's weight."""
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_base: float
    rope_scaling: Optional[Tuple[float, float, float, float]]
    """Llama 3.1's: factor, low and high frequency factors, and the length before it."""


@dataclass(frozen=True)
class Training:
    """One training. Paths are absolute."""

    program: str
    """One of BUILT_IN."""
    model: str
    """A name for the job's block of settings."""
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    dropout: float
    data: Optional[Tuple[Tuple[float, str], ...]]
    """Weights and prefixes of token files; None for synthetic data."""
    split: str
    vocabulary: Optional[str]
    """vocab.txt of a BERT."""
    steps: int
    global_batch_size: int
    micro_batch_size: int
    precision: str
    loss_scale: Union[float, str]
    optimizer: str
    lr: float
    weight_decay: float
    betas: Tuple[float, float]
    fused: bool
    apex: Union[bool, str]
    """True, False or "auto"."""
    offload: bool
    lr_schedule: str
    warmup_steps: int
    decay_steps: int
    min_lr: float
    clip_grad_norm: Optional[float]
    seed: int
    log_every: int
    evaluate_every: int
    evaluate_steps: int
    compile: bool
    cuda_graphs: bool
    checkpoint_folder: Optional[str]
    checkpoint_every: int
    checkpoint_keep: int
    checkpoint_local: Optional[str]
    saved: int
    """Of an attempt: the furthest iteration that its run is known to have saved; -1 for none."""
    recompute: str
    schedule: str
    partition: Optional[str]
    pipeline: int
    zero: int
    tensor: int
    """Ranks that share each layer."""
    sequence_parallel: bool
    """Between shared layers each of these ranks has a part of every sequence."""
    timeline: bool
    llama: Optional[Llama] = None
    """None is GPT-2 or BERT."""
    context: int = 1
    """Replicas that share each sample, each with a part of its sequence."""

    @property
    def stage_layers(self) -> Optional[Partition]:
        """The layers of each stage; None if the runtime is to balance the stages."""
        return None if self.partition is None else Partition.parse(self.partition)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts that a run that may morph knows of its training; None is what it does not know."""

    program: str
    """As in `Plan.program`."""
    layers: Optional[int]
    """What a stage has at least one of; without it pipelines keep their depth."""
    micro_batches: Optional[int]
    """Of a whole batch; no more replicas than these. Without it any number of replicas."""
    schedule: str
    steps: Optional[int]
    """After so many a checkpoint is that of the end."""
    checkpoint_folder: Optional[str]
    layout: str = "pipeline"
    """What follows the nodes: pipeline (depth, replicas, partition) or world (how many ranks)."""
    is_even: bool = False
    """Whether all replicas must have as many micro-batches: a script that is given its share."""

    @property
    def is_own(self) -> bool:
        """True for a script of the user's own, whose exit says whether it is done."""
        return self.program not in BUILT_IN


def derive_facts(value: Training) -> TrainingFacts:
    """The facts of a built-in program's training."""
    return TrainingFacts(
        program=value.program,
        layers=value.layers,
        micro_batches=-(-value.global_batch_size // value.micro_batch_size),
        schedule=value.schedule,
        steps=value.steps,
        checkpoint_folder=value.checkpoint_folder,
        is_even=value.zero == 3,  # replicas gather weights together
    )


def name_shapes(value: Training) -> str:
    """Name all that the times of its segments depend on: a profile fits the same name only."""
    sizes = (value.layers, value.hidden, value.heads, value.sequence, value.vocab)
    words = [value.program, "-".join(map(str, sizes)), value.precision, value.optimizer]
    words += ["-".join(map(str, asdict(value.llama).values()))] if value.llama else []
    words += ["dropout"] if value.dropout else []
    words += [word for word in ("compile", "apex", "sequence_parallel") if getattr(value, word)]
    return " ".join(words)


def name_profile_file(model: str) -> str:
    """File name of a model's profile in a folder of profiles."""
    return re.sub(r"[^\w.+-]+", "_", model) + ".profile.json"


def render_training(value: Training) -> str:
    """The text of training.json."""
    return json.dumps(dict(asdict(value), format=TRAINING_FORMAT), indent=1) + "\n"


NOT_READ = ("format", "tensorboard", "checkpoint_memory_every", "from_memory")
"""Keys of earlier versions, which ask for nothing that there still is."""


def read_training(path: Path) -> Training:
    """Raises ValueError, with the file's name, where it is none of ours."""
    try:
        value = parse_json(read_bytes(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if value is None:
        raise ValueError(f"{path} cannot be read: it is no JSON, or cut")
    if not isinstance(value, dict) or value.get("format") != TRAINING_FORMAT:
        raise ValueError(f"{path} is not a training.json of this version of vjob; submit again")
    return parse_training(value, str(path))


def parse_training(value: Mapping[str, Any], where: str) -> Training:
    """From the dict of its JSON."""
    wanted = {field.name for field in fields(Training)}
    found = {name: item for name, item in value.items() if name not in NOT_READ}
    found.setdefault("llama", None)  # older ones are of GPT-2 or BERT
    found.setdefault("context", 1)
    odd = sorted(wanted ^ found.keys())
    if odd:
        raise ValueError(f"{where} lacks, or should not have: {', '.join(odd)}; submit again")
    found["betas"] = tuple(found["betas"])
    if found["llama"] is not None:
        found["llama"] = parse_llama(found["llama"])
    if found["data"] is not None:
        found["data"] = tuple((weight, prefix) for weight, prefix in found["data"])
    return Training(**found)


def parse_llama(value: Mapping[str, Any]) -> Llama:
    """Parse the `llama` of a training's JSON; TypeError if a key is unknown or missing."""
    scaling = value.get("rope_scaling")
    return Llama(**dict(value, rope_scaling=None if scaling is None else tuple(scaling)))
