"""Megatron-LM's options that are keys of the conf, whichever release's names they are.

All others are passed on in `program.args`. Values that the key cannot hold are too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vjob.shelf.importers.values import to_decimal, to_whole


def _word(*allowed: str) -> Callable[[str], str | None]:
    return lambda text: text if text in allowed else None


def _set(value: Any) -> Callable[[str], Any]:
    return lambda text: value if text == "" else None


# Option to key, and its value's maker; None means that the key cannot hold it.
KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "--num-layers": ("model.layers", to_whole),
    "--hidden-size": ("model.hidden", to_whole),
    "--num-attention-heads": ("model.heads", to_whole),
    "--seq-length": ("model.sequence", to_whole),
    "--batch-size": ("train.micro_batch_size", to_whole),
    "--micro-batch-size": ("train.micro_batch_size", to_whole),
    "--global-batch-size": ("train.global_batch_size", to_whole),
    "--train-iters": ("train.steps", to_whole),
    "--seed": ("train.seed", to_whole),
    "--fp16": ("train.precision", _set("fp16")),
    "--bf16": ("train.precision", _set("bf16")),
    "--loss-scale": ("train.loss_scale", to_decimal),
    "--clip-grad": ("train.clip_grad_norm", to_decimal),
    "--log-interval": ("train.log_every", to_whole),
    "--optimizer": ("train.optimizer.name", lambda text: {"adam": "adamw", "sgd": "sgd"}.get(text)),
    "--lr": ("train.optimizer.lr", to_decimal),
    "--weight-decay": ("train.optimizer.weight_decay", to_decimal),
    "--min-lr": ("train.schedule.min_lr", to_decimal),
    "--lr-decay-style": ("train.schedule.kind", _word("cosine", "linear", "constant")),
    "--lr-decay-iters": ("train.schedule.decay_steps", to_whole),
    "--lr-warmup-iters": ("train.schedule.warmup_steps", to_whole),
    "--eval-interval": ("train.evaluate.every", to_whole),
    "--eval-iters": ("train.evaluate.steps", to_whole),
    "--save": ("train.checkpoint.folder", lambda text: text or None),
    "--save-interval": ("train.checkpoint.every", to_whole),
    "--split": ("data.split", lambda text: text if re.fullmatch(r"[\d.]+(,[\d.]+){2}", text)
                else None),
    "--data-path": ("data.prefix", lambda text: text or None),
    "--mock-data": ("data.synthetic", _set(True)),
    "--model-parallel-size": ("parallel.tensor", to_whole),
    "--tensor-model-parallel-size": ("parallel.tensor", to_whole),
    "--pipeline-model-parallel-size": ("parallel.pipeline", to_whole),
    "--use-distributed-optimizer": ("parallel.zero", _set(1)),
    "--balance": ("parallel.partition", lambda text: text if re.fullmatch(r"\d+(-\d+)+", text)
                  else None),
    "--checkpoint-activations": ("parallel.recompute", _set("full")),
}  # fmt: skip
OURS: Mapping[str, tuple[str, str]] = {
    "--distributed-backend": ("nccl", "vjob passes it"),
    "--data-impl": ("mmap", "vjob passes it to releases that have it"),
    "--checkpoint-num-layers": ("1", "is what parallel.recompute: full does"),
}
"""Options that vjob passes by itself with this value; with another they stay arguments."""
DEEPSPEED_KEYS: Mapping[str, str] = {
    "--batch-size": "train.micro_batch_size",
    "--micro-batch-size": "train.micro_batch_size",
    "--fp16": "train.precision",
    "--bf16": "train.precision",
    "--clip-grad": "train.clip_grad_norm",
    "--log-interval": "train.log_every",
    "--lr": "train.optimizer.lr",
    "--weight-decay": "train.optimizer.weight_decay",
    "--model-parallel-size": "parallel.tensor",
    "--tensor-model-parallel-size": "parallel.tensor",
    "--checkpoint-activations": "parallel.recompute",
    "--zero-stage": "parallel.zero",
}
"""A DeepSpeed script's options that its ds_config repeats: they stay arguments, and set these."""
