"""What is taken of NVIDIA's apex where it is asked for and installed: optimizers and layer norms.

PyPI's package `apex` is something else (a toolkit for web sites): importing it to see is no test.
NVIDIA's has the compiled module `amp_C` beside it. Its multi-tensor norm is not taken: torch's
`_foreach_norm`, which `grads.py` adds up in double, is one kernel for many tensors too.
"""

from __future__ import annotations

import importlib
import logging
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

log = logging.getLogger(__name__)

APEX: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("FusedAdam", {"adam_w_mode": False}),
    "adamw": ("FusedAdam", {"adam_w_mode": True}),
    # Its own norm is that of one stage: let Varuna.step clip by the norm of all.
    "lamb": ("FusedLAMB", {"max_grad_norm": float("inf")}),
    "sgd": ("FusedSGD", {}),
}


def why_no_apex() -> str:
    """Empty if NVIDIA's apex is installed. Imports nothing."""
    if find_spec("amp_C") is not None and find_spec("apex") is not None:
        return ""
    if find_spec("apex") is None:
        return "NVIDIA's apex is not installed (PyPI's package of that name is something else)"
    return (
        "the installed `apex` is not NVIDIA's, or has not its compiled parts (there is no module "
        "amp_C): PyPI's package of that name is something else"
    )


def build_apex_optimizer(name: str, parameters: Any, options: dict[str, Any]) -> Any:
    if name == "lamb" and options.get("max_grad_norm") is not None:
        raise ValueError(
            "apex's FusedLAMB would clip by the norm of one stage: leave max_grad_norm out and "
            "give model.step(inputs, clip_grad_max_norm=...)"
        )
    word, fixed = APEX[name]
    made = getattr(importlib.import_module("apex.optimizers"), word)
    return made(parameters, **{**options, **fixed})


def use_apex_norms(model: nn.Module) -> int:
    """Let apex's kernel make the layer norms of torch's own class; how many there are.

    Parameters keep their names. Without apex a warning says so, and torch's kernel stays.
    """
    if missing := why_no_apex():
        log.warning("%s; torch's own layer norm is used", missing)
        return 0
    made = importlib.import_module("apex.normalization.fused_layer_norm")
    found = [part for part in model.modules() if type(part) is nn.LayerNorm]
    for norm in found:
        norm.forward = partial(_normalize, made, norm)  # type: ignore[method-assign]
    return len(found)


def _normalize(made: Any, norm: nn.LayerNorm, x: Tensor) -> Tensor:
    out: Tensor
    if norm.weight is None or norm.bias is None:
        out = nn.LayerNorm.forward(norm, x)
    else:
        out = made.fused_layer_norm_affine(
            x, norm.weight, norm.bias, norm.normalized_shape, norm.eps
        )
    return out
