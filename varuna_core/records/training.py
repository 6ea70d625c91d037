"""The training that a conf describes, as ranks receive it: made by `jobs`, read by the ranks.

A built-in program reads training.json. It is flat, since each value has one reader; names are those
of the conf, with the section as a prefix if they would be ambiguous. A script gets the values that
its conf sets as environment variables, by `VARIABLES`. Both get the position of a rank from its
environment.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Optional, Tuple, Union

from varuna_core.facts.partition import Partition
from varuna_core.records.files import parse_json, read_bytes, write_json
from varuna_core.records.runfolder import AttemptFolder

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
"""Environment variables of a script's ranks, by key of the conf. They are set if the conf sets the
key; the number of kept checkpoints is set if the conf sets their folder."""
LAYOUT_VARIABLES: Mapping[str, str] = {
    "parallel.pipeline": "VJOB_PIPELINE",
    "parallel.data": "VJOB_DATA",
    "parallel.tensor": "VJOB_TENSOR",
    "parallel.order": "VJOB_STAGE_MAP",
    "parallel.partition": "VJOB_PARTITION",
}
"""Environment variables that the agent sets for every rank (`Plan.place_variables`), by the keys
that determine them."""


@dataclass(frozen=True)
class Llama:
    """Parts of a Llama or Qwen decoder that differ from GPT-2."""

    inner: int
    """Width of the gated MLP."""
    kv_heads: int
    """Key-value heads, each shared by several query heads."""
    head_size: int
    tied: bool
    """True if the output head shares the embedding's weight."""
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_base: float
    rope_scaling: Optional[Tuple[float, float, float, float]]
    """Parameters of Llama 3.1: factor, low and high frequency factors, and original context
    length."""


@dataclass(frozen=True)
class Training:
    """One training. Paths are absolute."""

    program: str
    """One of BUILT_IN."""
    model: str
    """A name for the model in the job's block of settings."""
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
    """Path of the vocab.txt of a BERT."""
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
    """Furthest iteration that the attempt's run is known to have saved; -1 for none."""
    recompute: str
    schedule: str
    partition: Optional[str]
    pipeline: int
    zero: int
    tensor: int
    """Ranks that share each layer."""
    sequence_parallel: bool
    """True if, between sharded layers, each of the tensor-parallel ranks has a part of every
    sequence."""
    timeline: bool
    llama: Optional[Llama] = None
    """Settings of a Llama decoder; None for GPT-2 or BERT."""
    context: int = 1
    """Replicas that share each sample, each with a part of its sequence."""

    @property
    def stage_layers(self) -> Optional[Partition]:
        """Return the layers of each stage; None if the runtime is to balance the stages."""
        return None if self.partition is None else Partition.parse(self.partition)


@dataclass(frozen=True)
class TrainingFacts:
    """Facts that a run that may morph knows about its training; None means not known."""

    program: str
    """Name of the program, as in `Plan.program`."""
    layers: Optional[int]
    """Number of layers, of which each stage has at least one; None keeps the depth of pipelines."""
    micro_batches: Optional[int]
    """Micro-batches in a whole batch, which is the maximum number of replicas; None for no
    maximum."""
    schedule: str
    steps: Optional[int]
    """Number of steps after which a checkpoint is the final one."""
    checkpoint_folder: Optional[str]
    layout: str = "pipeline"
    """The part of the layout that a change of nodes changes: `pipeline` (depth, replicas,
    partition) or `world` (number of ranks)."""
    is_even: bool = False
    """True if all replicas must have the same number of micro-batches, as in a script that is given
    its share."""

    @property
    def is_own(self) -> bool:
        """True for a user's own script, whose exit code says whether it is complete."""
        return self.program not in BUILT_IN


def derive_facts(value: Training) -> TrainingFacts:
    """Return the facts of a built-in program's training."""
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
    """Return a name for everything on which the times of a training's segments depend: a profile
    applies only to trainings with the same name."""
    sizes = (value.layers, value.hidden, value.heads, value.sequence, value.vocab)
    words = [value.program, "-".join(map(str, sizes)), value.precision, value.optimizer]
    words += ["-".join(map(str, asdict(value.llama).values()))] if value.llama else []
    words += ["dropout"] if value.dropout else []
    words += [word for word in ("compile", "apex", "sequence_parallel") if getattr(value, word)]
    return " ".join(words)


def name_profile_file(model: str) -> str:
    """Return the file name of a model's profile in a folder of profiles."""
    return re.sub(r"[^\w.+-]+", "_", model) + ".profile.json"


def render_training(value: Training) -> str:
    """Render the text of training.json."""
    return json.dumps(dict(asdict(value), format=TRAINING_FORMAT), indent=1) + "\n"


NOT_READ = ("format", "tensorboard", "checkpoint_memory_every", "from_memory")
"""Keys of earlier versions whose features no longer exist."""


def read_training(path: Path) -> Training:
    """Read a training; raise ValueError with the file's name if it is not a valid training."""
    try:
        value = parse_json(read_bytes(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if value is None:
        raise ValueError(f"{path} cannot be read: it is truncated or not JSON")
    if not isinstance(value, dict) or value.get("format") != TRAINING_FORMAT:
        raise ValueError(f"{path} is not a training.json of this version of vjob; submit again")
    return parse_training(value, str(path))


def parse_training(value: Mapping[str, Any], where: str) -> Training:
    """Parse a training from its JSON."""
    wanted = {field.name for field in fields(Training)}
    found = {name: item for name, item in value.items() if name not in NOT_READ}
    found.setdefault("llama", None)  # older ones are of GPT-2 or BERT
    found.setdefault("context", 1)
    odd = sorted(wanted ^ found.keys())
    if odd:
        raise ValueError(f"{where} has missing or unknown keys: {', '.join(odd)}; submit again")
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


# What Varuna answers.


def write_partition(attempt: AttemptFolder, partition: Partition) -> None:
    """Record the partition that Varuna chose for a script's model; rank 0 does so once."""
    write_json(attempt.partition, {"partition": partition.spell()}, lasts=False)


def parse_partition(value: Any) -> Optional[Partition]:
    """Parse that record, with every segment counted; None for anything else."""
    text = value.get("partition") if isinstance(value, Mapping) else None
    return Partition.find(text) if isinstance(text, str) else None
