"""Megatron-LM from a conf: the arguments of its pretrain_gpt.py, and which release a folder holds.

An option that `program.args` names replaces ours. What the conf asks for and a checkout cannot do
is refused (`list_problems`), never left out silently. Options changed names and meaning three
times; the checkout's own files tell which it has, and none of it is imported:

    v1     1.x, and DeepSpeedExamples' copies: --model-parallel-size, --batch-size, --warmup
    v2     2.0 to 3.0 and the releases named by month: today's names, --data-impl
    core   since Megatron Core (megatron/training): today's; the first and the last stage may
           have another size from 0.9 on, any stage from 0.13 on
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from varuna_core.records.training import Llama
from vjob.jobs.conf.paths import split_blend
from vjob.jobs.conf.schema import JobConf
from vjob.jobs.conf.world_size import require_number
from vjob.jobs.errors import KeyProblem

_FLAG = re.compile(r"""["'](--[A-Za-z][A-Za-z0-9_-]*)["']""")
LAYOUT_FILE = "megatron/core/transformer/pipeline_parallel_layer_layout.py"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
SCRIPTS = ("pretrain_gpt.py", "pretrain_gpt2.py")


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """Traits of a Megatron-LM checkout that decide how it is called; the defaults are those of the
    newest release."""

    script: str = "pretrain_gpt.py"
    """Script to run, relative to the folder or absolute."""
    generation: Literal["v1", "v2", "core"] = "core"
    partition: Literal["layout", "ends", "balance"] | None = "layout"
    """How the checkout takes the layers of each stage: its own layout, the first and last stage
    alone, the `--balance` of some forks, or not at all."""
    flags: frozenset[str] = frozenset()
    """Every option of v1 and v2; empty if not known (core generates many from types)."""


def find_checkout(path: str) -> Checkout:
    """Return the traits of the Megatron-LM checkout at a folder or around a script; if its files
    cannot be read, the traits of the newest Megatron-LM."""
    given = Path(path)
    is_script = given.suffix == ".py"
    roots = (given.parent, given.parent.parent) if is_script else (given,)
    root = next((root for root in roots if (root / "megatron").is_dir()), None)
    if root is None:
        return Checkout(script=path if is_script else str(given / SCRIPTS[0]))
    found = next((name for name in SCRIPTS if (root / name).is_file()), SCRIPTS[0])
    script = path if is_script else str(root / found)
    if (root / "megatron/training/arguments.py").is_file():
        if (root / LAYOUT_FILE).is_file():
            return Checkout(script=script)
        has_ends = FIRST in _read(root / "megatron/training/arguments.py")
        return Checkout(script=script, partition="ends" if has_ends else None)
    text = _read(root / "megatron/arguments.py")
    if not text:
        return Checkout(script=script)
    flags = frozenset(_FLAG.findall(text))
    return Checkout(
        script=script,
        generation="v2" if "--tensor-model-parallel-size" in flags else "v1",
        partition="balance" if "--balance" in flags else None,
        flags=flags,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


Options = Iterator[tuple[str, ...]]
"""Type of options: each is a flag with its values."""
# Naming one of these in program.args replaces whatever we say of the same matter.
RIVALS: tuple[frozenset[str], ...] = tuple(
    frozenset(f"--{name}" for name in names.split())
    for names in (
        "fp16 bf16",
        "train-iters train-samples",
        "lr-decay-iters lr-decay-samples",
        "lr-warmup-iters lr-warmup-fraction lr-warmup-samples warmup",
        "tokenizer-type tokenizer-model vocab-file vocab-size merge-file",
        "data-path data-args-path mock-data train-data-path per-split-data-args-path",
        "recompute-granularity recompute-method recompute-num-layers recompute-activations "
        "recompute-modules checkpoint-activations",
        "pipeline-model-parallel-layout balance num-layers-per-virtual-pipeline-stage "
        "num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers "
        "decoder-last-pipeline-num-layers",
        "use-distributed-optimizer use-megatron-fsdp",
    )
)
# The plan numbers stages and replicas by these: the conf alone decides them.
OWN = {
    "--tensor-model-parallel-size": "parallel.tensor",
    "--model-parallel-size": "parallel.tensor",
    "--pipeline-model-parallel-size": "parallel.pipeline",
}
OPTIONAL = frozenset({"--timing-log-level", "--exit-signal-handler", "--optimizer"})
"""Options omitted silently if a checkout lacks them, since they do not change what runs."""
_DATA = RIVALS[5]
PROFILED_STEPS = (10, 12)
"""The first step that Nsight profiles, and the first step after the profile: few steps, after the
warm-up."""


def build_arguments(
    conf: JobConf, checkout: Checkout, *, replicas: int, world: int
) -> tuple[str, ...]:
    """Return all arguments after the script."""
    options = list_options(conf, checkout, replicas=replicas, world=world)
    known = checkout.flags
    words = [
        word
        for option in options
        if not known or option[0] in known or option[0] not in OPTIONAL
        for word in option
    ]
    return (*words, *conf.program.args)


def list_options(
    conf: JobConf, checkout: Checkout, *, replicas: int, world: int
) -> list[tuple[str, ...]]:
    """Return the conf's options, without those that program.args sets."""
    options = [*_build_model(conf, checkout)]
    options += _build_batch(conf, checkout, replicas)
    options += _build_optimizer(conf, checkout)
    options += _build_layout(conf, checkout, replicas)
    options += _build_data(conf, checkout)
    options += _build_records(conf, checkout)
    options += _build_profile(conf, checkout, world)
    named = name_flags(conf.program.args)
    for rivals in RIVALS:
        if named & rivals:
            named |= rivals
    return [option for option in options if option[0] not in named]


def name_flags(args: Sequence[str]) -> set[str]:
    """Return the flags among arguments, including forms such as `--lr=1`."""
    return {word.partition("=")[0] for word in args if word.startswith("--")}


def split_layers(conf: JobConf) -> tuple[int, ...] | None:
    """Return the transformer layers of each stage or chunk; None for an even division."""
    if conf.parallel.partition == "auto" or conf.model is None:
        return None
    return conf.parallel.partition.blocks(conf.model.layers).counts


def spell_partition(
    parts: Sequence[int], checkout: Checkout, pipeline: int
) -> list[tuple[str, ...]] | None:
    """Return options for the layers of each stage: empty for equal stages, None if not possible."""
    if checkout.partition == "balance":
        return [("--balance", "-".join(map(str, parts)))]
    if checkout.partition == "layout" and pipeline > 1:
        return [("--pipeline-model-parallel-layout", spell_layout(parts))]
    if len(set(parts)) == 1:
        return []
    first, *middle, last = parts
    is_told = checkout.partition == "ends" and len(parts) == pipeline and first and last
    if not is_told or len(set(middle)) > 1:
        return None
    wanted = [(FIRST, first)] if not middle else [(FIRST, first), (LAST, last)]
    return [(option, str(count)) for option, count in wanted if count not in middle]


def spell_layout(parts: Sequence[int]) -> str:
    """Spell 0-11-8-0 as `E|t*11|t*8|L`: the embedding first, the loss last."""
    stages = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in parts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages)


def _build_model(conf: JobConf, checkout: Checkout) -> Options:
    model = conf.model
    assert model is not None, "list_problems refuses a conf without one"
    yield "--num-layers", str(model.layers)
    yield "--hidden-size", str(model.hidden)
    yield "--num-attention-heads", str(model.heads)
    yield "--seq-length", str(model.sequence)
    yield "--max-position-embeddings", str(model.sequence)
    llama = model.build_llama()
    if llama is not None:
        yield from _build_llama_options(llama)
    yield "--hidden-dropout", str(model.dropout)
    yield "--attention-dropout", str(model.dropout)
    if checkout.generation == "core":  # older ones want the vocabulary's files: program.args
        yield "--tokenizer-type", "NullTokenizer"
        yield "--vocab-size", str(model.vocab)


def _build_llama_options(llama: Llama) -> Options:
    """Yield megatron-core's options; `find_unable` refuses checkouts that lack them."""
    yield "--ffn-hidden-size", str(llama.inner)
    yield "--kv-channels", str(llama.head_size)
    yield ("--group-query-attention",)
    yield "--num-query-groups", str(llama.kv_heads)
    for flag in ("--swiglu", "--disable-bias-linear"):
        yield (flag,)
    yield "--normalization", "RMSNorm"
    yield "--norm-epsilon", str(llama.norm_eps)
    yield "--position-embedding-type", "rope"
    yield "--rotary-base", str(int(llama.rope_base))
    if llama.rope_scaling is not None:
        yield ("--use-rope-scaling",)
        yield "--rope-scaling-factor", str(llama.rope_scaling[0])
    if not llama.tied:
        yield ("--untie-embeddings-and-output-weights",)
    if llama.qkv_bias:
        yield ("--add-qkv-bias",)
    if llama.qk_norm:
        yield ("--qk-layernorm",)


def _build_batch(conf: JobConf, checkout: Checkout, replicas: int) -> Options:
    train, pipeline = conf.train, require_number(conf.parallel.pipeline)
    if checkout.generation == "v1":
        yield "--batch-size", str(train.micro_batch_size)
    else:
        micro = require_number(train.micro_batch_size)
        whole = train.global_batch_size or micro * replicas * pipeline
        yield "--micro-batch-size", str(train.micro_batch_size)
        yield "--global-batch-size", str(whole)
    yield "--train-iters", str(train.steps)
    if train.precision != "fp32":
        yield (f"--{train.precision}",)
    if train.precision == "fp16" and train.loss_scale != "dynamic":
        yield "--loss-scale", str(train.loss_scale)
    yield "--seed", str(train.seed)


def _build_optimizer(conf: JobConf, checkout: Checkout) -> Options:
    train, optimizer, schedule = conf.train, conf.train.optimizer, conf.train.schedule
    if checkout.generation != "v1":
        yield "--optimizer", {"adamw": "adam"}.get(optimizer.name, optimizer.name)
        yield "--adam-beta1", str(optimizer.betas[0])
        yield "--adam-beta2", str(optimizer.betas[1])
    yield "--lr", str(optimizer.lr)
    yield "--min-lr", str(schedule.min_lr)
    yield "--lr-decay-style", schedule.kind
    yield "--lr-decay-iters", str(schedule.decay_steps or train.steps)
    if checkout.generation == "v1":
        yield "--warmup", str(schedule.warmup_steps / train.steps)
    else:
        yield "--lr-warmup-iters", str(schedule.warmup_steps)
    yield "--weight-decay", str(optimizer.weight_decay)
    yield "--clip-grad", str(train.clip_grad_norm or 0.0)


def _build_layout(conf: JobConf, checkout: Checkout, replicas: int) -> Options:
    parallel, pipeline = conf.parallel, require_number(conf.parallel.pipeline)
    if checkout.generation == "v1":
        yield "--model-parallel-size", str(parallel.tensor)
    else:
        yield "--tensor-model-parallel-size", str(parallel.tensor)
        yield "--pipeline-model-parallel-size", str(parallel.pipeline)
    parts = split_layers(conf)
    stages = [] if parts is None else spell_partition(parts, checkout, pipeline)
    if stages:
        yield from stages
    elif parallel.schedule == "interleaved":
        layers = conf.model.layers if conf.model is not None else 0
        yield "--num-layers-per-virtual-pipeline-stage", str(layers // (2 * pipeline))
    if parallel.order == "pipeline" and replicas > 1 and pipeline > 1:
        yield ("--use-tp-pp-dp-mapping",)
    if parallel.zero:
        yield ("--use-distributed-optimizer",)
    if parallel.recompute == "full" and checkout.generation == "v1":
        yield ("--checkpoint-activations",)
    elif parallel.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "uniform"
        yield "--recompute-num-layers", "1"
    yield "--distributed-backend", "nccl"


def _build_data(conf: JobConf, checkout: Checkout) -> Options:
    data = conf.data
    if data is not None and data.prefix is not None:
        blend = split_blend(data.prefix)
        yield "--data-path", *([blend[0][1]] if len(blend) == 1 else itertools.chain(*blend))
        yield "--split", data.split
        if checkout.generation != "core":
            yield "--data-impl", "mmap"
    elif data is not None:
        yield ("--mock-data",)


def _build_records(conf: JobConf, checkout: Checkout) -> Options:
    train, checkpoint = conf.train, conf.train.checkpoint
    yield "--log-interval", str(train.log_every)
    yield "--eval-interval", str(train.evaluate.every or train.steps)
    yield "--eval-iters", str(train.evaluate.steps if train.evaluate.every else 0)
    if checkpoint.folder is not None:
        yield "--save", checkpoint.folder
        yield "--load", checkpoint.folder
        yield "--save-interval", str(checkpoint.every or train.steps)
        if checkout.generation != "v1":
            yield ("--exit-signal-handler",)  # SIGTERM saves before it ends


def _build_profile(conf: JobConf, checkout: Checkout, world: int) -> Options:
    if conf.profile.timeline and checkout.generation != "v1":
        yield "--timing-log-level", "1"
    if (conf.profile.nsys or conf.profile.ncu) and checkout.generation == "core":
        ranks = range(world) if conf.profile.ranks == "all" else conf.profile.ranks
        first, end = PROFILED_STEPS
        end = min(end, conf.train.steps)
        yield ("--profile",)
        yield "--profile-step-start", str(min(first, end - 1))
        yield "--profile-step-end", str(end)
        yield ("--profile-ranks", *map(str, ranks))


def list_problems(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield settings of the conf that no Megatron-LM supports."""
    parallel, named = conf.parallel, name_flags(conf.program.args)
    if conf.model is None:
        yield "model", None, "is required by megatron; give a name such as gpt2-small, or a mapping"
    if conf.data is None and not named & _DATA:
        yield "data", None, "is required by megatron; give {prefix: ...} or {synthetic: true}"
    for flag in sorted(named & OWN.keys()):
        yield "program.args", flag, f"is decided by {OWN[flag]}; set it there"
    if conf.train.optimizer.name == "lamb":
        yield "train.optimizer.name", "lamb", "is not supported by Megatron-LM; use adamw or sgd"
    if conf.train.compile:
        yield "train.compile", True, "is for the built-in programs; Megatron-LM has its own kernels"
    if conf.train.cuda_graphs:
        message = "is for the built-in programs; put Megatron-LM's own flags into program.args"
        yield "train.cuda_graphs", True, message
    if conf.train.checkpoint.local is not None:
        message = "is for the built-in programs; Megatron-LM writes to train.checkpoint.folder"
        yield "train.checkpoint.local", conf.train.checkpoint.local, message
    if conf.data is not None and conf.data.vocab is not None:
        message = "is for pretrain_bert; give Megatron-LM --vocab-file in program.args"
        yield "data.vocab", conf.data.vocab, message
    if parallel.zero > 1:
        message = "is not in Megatron-LM; use 0, 1 (its distributed optimizer), or FSDP by args"
        yield "parallel.zero", parallel.zero, message
    if parallel.recompute in ("selective", "offload"):
        message = "is for Varuna; Megatron-LM has flags of its own, for program.args"
        yield "parallel.recompute", parallel.recompute, message
    if parallel.schedule not in ("auto", "1f1b", "interleaved"):
        message = "is not supported by Megatron-LM; use 1f1b or interleaved"
        yield "parallel.schedule", parallel.schedule, message


def find_unable(conf: JobConf, checkout: Checkout) -> Iterator[KeyProblem]:
    """Yield settings that this checkout does not support; the conf passed `list_problems`."""
    parallel, parts, model = conf.parallel, split_layers(conf), conf.model
    assert model is not None, "list_problems refuses a conf without one"
    pipeline = require_number(parallel.pipeline)
    if parts is not None and spell_partition(parts, checkout, pipeline) is None:
        what = (
            "can set a number only for the first and the last stage"
            if checkout.partition == "ends"
            else "cuts the layers evenly"
        )
        message = (
            "needs a Megatron-LM with --pipeline-model-parallel-layout (Core 0.13, July 2025, or "
            f"later) or a fork with --balance; this one {what}"
        )
        yield "parallel.partition", parallel.partition, message
    stages = pipeline * (2 if parallel.schedule == "interleaved" else 1)
    if parts is None and model.layers % stages:
        message = f"{stages} stages do not divide {model.layers} layers; give parallel.partition"
        yield "parallel.pipeline", parallel.pipeline, message
    if checkout.generation == "v1" and pipeline > 1:
        yield "parallel.pipeline", pipeline, "needs Megatron-LM 2.0 or later; use 1"
    options = list_options(conf, checkout, replicas=1, world=1)
    missing = sorted({option[0] for option in options} - checkout.flags - OPTIONAL)
    if checkout.flags and missing:
        message = f"this Megatron-LM does not have {', '.join(missing)}, which the conf asks for"
        yield "program.megatron", conf.program.path, message
