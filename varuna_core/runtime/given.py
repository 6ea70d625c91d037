"""Describe a rank's arguments as text, such that equal arguments have equal descriptions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.checkpoint.format.entries import view_bytes
from varuna_core.runtime.arguments import VarunaSettings
from varuna_core.runtime.comm.meeting import Given
from varuna_core.runtime.comm.values import describe, sign, tensors_of
from varuna_core.runtime.split.record import Record
from varuna_core.runtime.split.split import Split

OPTIONS = (
    *("batch_size", "chunk_size", "schedule", "stages_per_rank", "tensor", "recompute"),
    *("opportunistic", "costs", "zero", "compile", "cuda_graphs", "offload", "seed"),
)
"""Settings that must be equal on all ranks."""

WARNED = ("torch", "operations")
"""Names whose differences only cause a warning: ranks may run code that only prints."""


def describe_training(split: Split, settings: VarunaSettings) -> Given:
    """Describe the model, the layout and the options of a training."""
    return {
        "model": describe_model(split.model),
        "stage_map": repr(str(settings.stage_map)),
        "cuts": str([cut.name for cut in split.record.cuts]),
        "partition": "-".join(str(len(held)) for held in split.stages),
        "precision": settings.precision.name,
        "operations": describe_operations(split.record),
        "torch": torch.__version__.partition("+")[0],
        **{name: repr(getattr(settings, name)) for name in OPTIONS},
    }


def describe_operations(record: Record) -> str:
    """Describe the dry run's operations, unless real values were used, which vary by batch."""
    if record.real:
        return "by values"
    return f"{record.num_operations} operations in the forward (digest {record.digest:08x})"


def describe_model(model: nn.Module) -> str:
    """Describe a model by its class, its number of parameters, and a digest of their shapes."""
    named = dict(model.named_parameters(remove_duplicate=False))
    lines = "\n".join(
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named.items()
    )
    digest = hashlib.sha256(lines.encode()).hexdigest()[:8]
    elements = sum(parameter.numel() for parameter in model.parameters())
    types = sorted({str(p.dtype).removeprefix("torch.") for p in named.values()})
    return (
        f"{type(model).__name__} of {len(named)} parameters with {elements} elements in "
        f"{' and '.join(types)} (names in their order, shapes and types {digest})"
    )


def describe_batch(inputs: Mapping[str, Any]) -> Given:
    """Return the shapes of a batch, and a digest of its values."""
    digest = hashlib.sha256()
    for tensor in tensors_of(dict(inputs)):
        if tensor.layout is torch.strided:
            held = tensor.detach().cpu().contiguous()
            digest.update(view_bytes(held))
    return {
        "shapes": describe_shapes(inputs),
        "values": f"of digest {digest.hexdigest()[:8]}",
    }


def describe_shapes(inputs: Mapping[str, Any]) -> str:
    """Return the names, types and shapes of a batch."""
    return ", ".join(
        f"{name} {describe(value.dtype, value.shape) if isinstance(value, Tensor) else sign(value)}"
        for name, value in inputs.items()
    )
