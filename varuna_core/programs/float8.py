"""Run the linear layers of the blocks in float8 with torchao: `train.precision: fp8`.

    weights, activations, gradients     bf16, with fp32 masters, as with `precision: bf16`
    the three products of a layer       float8, each tensor scaled by its largest value

GPUs of compute capability 8.9 and later have float8 products; elsewhere torchao emulates them
slowly. Embeddings, norms, attention and the head stay in bf16.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from varuna_core.programs.layers import BLOCKS, Dense
from varuna_core.programs.place import ProgramError

FP8 = "fp8"
MULTIPLE = 16
"""Both sizes of a layer must be multiples of this for float8; other layers stay in bf16."""


def choose_base_precision(precision: str) -> str:
    """Return the precision of everything outside float8 layers, which is passed to Varuna."""
    return "bf16" if precision == FP8 else precision


def use_float8(model: nn.Module, device: torch.device) -> int:
    """Convert the linear layers of the blocks in place, and return their number."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ProgramError(
            f"train.precision is fp8, but torchao cannot be imported ({error}): pip install "
            "'vjob[fp8]', or set bf16"
        ) from error
    config = Float8LinearConfig(emulate=device.type != "cuda", pad_inner_dim=True)
    converted = 0
    for block in [part for part in model.modules() if isinstance(part, BLOCKS)]:
        stds = {n: part.std for n, part in block.named_modules() if _is_convertible(part)}
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda part, _: _is_convertible(part)
        )
        for name, std in stds.items():
            made: Any = block.get_submodule(name)
            kind: Any = type(made)
            made.std, made.__class__ = std, _with_our_values(kind)
        converted += len(stds)
    return converted


def _is_convertible(part: nn.Module) -> bool:
    sizes = (part.in_features, part.out_features) if isinstance(part, Dense) else (1,)
    return all(size % MULTIPLE == 0 for size in sizes)


@cache
def _with_our_values(layer: Any) -> type:
    """Return a subclass of a layer's class that initializes its values as Dense does."""
    return type("Float8Dense", (layer,), {"reset_parameters": Dense.reset_parameters})
