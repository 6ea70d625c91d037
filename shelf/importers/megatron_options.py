"""Options of Megatron-LM, of any release, that correspond to a key of the conf."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vjob.shelf.importers.values import to_any_number, to_decimal, to_whole


def _word(*allowed: str) -> Callable[[str], str | None]:
    return lambda text: text if text in allowed else None


def _set(value: Any) -> Callable[[str], Any]:
    return lambda text: value if text == "" else None


def _to_absolute(text: str) -> str | None:
    """Accept only absolute paths, which do not depend on the conf's folder."""
    return text if text.startswith("/") else None


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
    "--clip-grad": ("train.clip_grad_norm", to_decimal),
    "--log-interval": ("train.log_every", to_whole),
    "--lr": ("train.optimizer.lr", to_decimal),
    "--weight-decay": ("train.optimizer.weight_decay", to_decimal),
    "--min-lr": ("train.schedule.min_lr", to_decimal),
    "--lr-decay-style": ("train.schedule.kind", _word("cosine", "linear", "constant")),
    "--lr-decay-iters": ("train.schedule.decay_steps", to_whole),
    "--lr-warmup-iters": ("train.schedule.warmup_steps", to_whole),
    "--eval-interval": ("train.evaluate.every", to_whole),
    "--eval-iters": ("train.evaluate.steps", to_whole),
    "--save": ("train.checkpoint.folder", _to_absolute),
    "--save-interval": ("train.checkpoint.every", to_whole),
    "--data-path": ("data.prefix", _to_absolute),
    "--model-parallel-size": ("parallel.tensor", to_whole),
    "--tensor-model-parallel-size": ("parallel.tensor", to_whole),
    "--pipeline-model-parallel-size": ("parallel.pipeline", to_whole),
    "--balance": ("parallel.partition", lambda text: text if re.fullmatch(r"\d+(-\d+)+", text)
                  else None),
}  # fmt: skip
LAYOUT = frozenset(name for name in KEYS if name.endswith("-parallel-size"))
"""Options that only Megatron-LM and its derivatives have."""
MODEL = frozenset({"model.layers", "model.hidden", "model.heads"})
"""Keys that a model must have."""
DEEPSPEED_KEYS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    **{name: KEYS[name] for name in ("--batch-size", "--micro-batch-size", "--clip-grad",
                                     "--log-interval", "--lr", "--weight-decay",
                                     "--model-parallel-size", "--tensor-model-parallel-size")},
    "--fp16": ("train.precision", _set("fp16")),
    "--bf16": ("train.precision", _set("bf16")),
    "--checkpoint-activations": ("parallel.recompute", _set("full")),
    "--zero-stage": ("parallel.zero", to_any_number),
}  # fmt: skip
"""Options that a DeepSpeed script's ds_config repeats: they stay arguments, and also set these
keys."""
