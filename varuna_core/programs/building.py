"""Build a built-in program's rank-independent parts: model, optimizer, learning rate.

The learning rate does not count steps that an fp16 overflow skips, so that a run resumed from a
checkpoint continues along the same curve.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

from varuna_core.programs.bert import Bert
from varuna_core.programs.context import Context
from varuna_core.programs.float8 import FP8
from varuna_core.programs.gpt import Gpt
from varuna_core.programs.place import ProgramError
from varuna_core.records.training import Training
from varuna_core.runtime.arguments import why_no_auto
from varuna_core.runtime.optim.optimizers import build_optimizer, why_no_apex
from varuna_core.schedule.recompute import Recompute


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Schedule of the learning rate; `min_lr` is reached at `decay_steps` and kept after it."""

    kind: str
    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int

    def at(self, taken: int) -> float:
        """Return the learning rate for the step that follows `taken` steps; the rate of the first
        step is above zero."""
        step = taken + 1
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        if step >= self.decay_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.min_lr + (self.lr - self.min_lr) * left


MODELS: dict[str, type[Gpt] | type[Bert]] = {"pretrain_gpt": Gpt, "pretrain_bert": Bert}


def build_model(training: Training, context: Context | None = None) -> nn.Module:
    """Build the model on the meta device; each stage initializes its own parameters."""
    more: dict[str, Any] = {} if training.llama is None else {"llama": training.llama}
    if context is not None:
        more["context"] = context
    with torch.device("meta"):
        return MODELS[training.program](
            layers=training.layers,
            hidden=training.hidden,
            heads=training.heads,
            sequence=training.sequence,
            vocab=training.vocab,
            dropout=training.dropout,
            **more,
        )


def describe_model(training: Training) -> dict[str, Any]:
    """Describe the model for a checkpoint: facts that its tensors do not show."""
    model = {"program": training.program, "heads": training.heads}
    if training.llama is not None:
        model |= {"sequence": training.sequence, "llama": asdict(training.llama)}
    return model


def choose_recompute(training: Training, device: torch.device) -> tuple[Recompute, str]:
    """Return the `recompute` to pass to Varuna and, if the conf says `auto`, a log line on how it
    will be chosen."""
    if training.recompute != "auto":
        return cast(Recompute, training.recompute), ""
    obstacle = why_no_auto(device, training.zero)
    if obstacle:
        return "none", f"recompute auto: none, {obstacle}"
    return "auto", (
        "recompute auto: the first step recomputes everything and measures; later steps "
        "recompute what does not fit"
    )


def plan_layers(model: nn.Module, training: Training) -> dict[str, Any] | None:
    """Return the tensor-parallel plan, if there is one; raise ProgramError for bad sizes."""
    shared = training.tensor
    if shared == 1:
        return None
    if training.heads % shared:
        raise ProgramError(f"{training.heads} heads are not divisible by tensor {shared}")
    if training.llama is not None and training.llama.kv_heads % shared:
        num = training.llama.kv_heads
        raise ProgramError(f"{num} key-value heads are not divisible by tensor {shared}")
    if training.optimizer == "lamb":
        raise ProgramError(
            "lamb needs whole weights, but tensor parallelism shards them: use adamw"
        )
    if training.precision == FP8:
        raise ProgramError(
            "train.precision fp8 cannot be combined with tensor parallelism: use bf16"
        )
    if training.compile:
        raise ProgramError("train.compile cannot be combined with tensor parallelism: remove one")
    if isinstance(model, Gpt):
        if training.sequence_parallel and training.sequence % shared:
            raise ProgramError(
                f"sequences of {training.sequence} are not divisible by tensor {shared}"
            )
        return model.tensor_parallel_plan(training.sequence_parallel)
    if training.sequence_parallel:
        raise ProgramError("sequence_parallel is for pretrain_gpt: BERT's parts need whole samples")
    assert isinstance(model, Bert)
    return model.tensor_parallel_plan()


def build_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay; biases and weights of norms do not."""
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in held if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in held if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def choose_apex(training: Training, device: torch.device) -> tuple[bool, str]:
    """Return True if Apex's kernels are to be used and, for `auto`, a log line on the choice.

    ProgramError if Apex is required but missing: without vjob's agent nothing checked it before.
    """
    if not training.apex:
        return False, ""
    missing = why_no_apex()
    if training.apex != "auto":
        if missing:
            raise ProgramError(f"train.optimizer.apex is true, but {missing}; use auto or false")
        return True, ""
    if not missing and device.type != "cuda":
        missing = "apex's kernels run only on GPUs"
    if not missing and training.offload:
        missing = "apex's kernels run only on GPUs, but train.optimizer.offload steps on the CPU"
    if missing:
        return False, f"apex auto: torch's own kernels are used: {missing}"
    return True, "apex auto: NVIDIA's optimizer and layer norms are used"


def make_optimizer(model: nn.Module, training: Training, *, apex: bool) -> Any:
    options: dict[str, Any] = {"lr": training.lr}
    if training.optimizer == "sgd":
        options["momentum"] = training.betas[0]
    else:
        options["betas"] = training.betas
    if not training.fused and not apex and training.optimizer != "lamb":
        options["fused"] = False
    groups = build_groups(model, training.weight_decay)
    return build_optimizer(training.optimizer, groups, apex=apex, **options)
