"""Build optimizers by name: torch's own, LAMB, and NVIDIA's Apex if requested and installed.

Varuna takes any optimizer; this module is for programs whose conf names one.

The PyPI package `apex` is unrelated (a toolkit for web sites), so a successful import is no proof;
NVIDIA's Apex also has the compiled module `amp_C`. Apex's multi-tensor norm is not used: torch's
`_foreach_norm`, which `grads.py` sums in double precision, also takes one kernel for many tensors.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
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
    """Return why NVIDIA's Apex cannot be used, without importing it; empty if it is installed."""
    if find_spec("amp_C") is not None and find_spec("apex") is not None:
        return ""
    if find_spec("apex") is None:
        return "NVIDIA's apex is not installed (the PyPI package of that name is unrelated)"
    return (
        "the installed `apex` is not NVIDIA's, or lacks its compiled parts (the module amp_C); "
        "PyPI's package of that name is unrelated"
    )


def build_apex_optimizer(name: str, parameters: Any, options: dict[str, Any]) -> Any:
    if name == "lamb" and options.get("max_grad_norm") is not None:
        raise ValueError(
            "Apex's FusedLAMB would clip by the norm of only one stage: omit max_grad_norm, and "
            "call model.step(inputs, clip_grad_max_norm=...)"
        )
    word, fixed = APEX[name]
    made = getattr(importlib.import_module("apex.optimizers"), word)
    return made(parameters, **{**options, **fixed})


def use_apex_norms(model: nn.Module) -> int:
    """Use Apex's kernel for layer norms of torch's own class; return their number.

    Parameters keep their names. If Apex is not installed, warn and keep torch's kernel.
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


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962) as implemented by NVIDIA: gradients are clipped to the global norm
    `max_grad_norm`, and groups without weight decay step as in Adam.

    Varuna sets the norm over all stages; without Varuna, the norm is over this optimizer's
    parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm {max_grad_norm}: expected a number above 0, or None")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        """Norm of the next step's gradients over all stages; reset after use."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor = self._find_divisor()
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if held:
                self._update(group, held, divisor)
        return loss

    def _find_divisor(self) -> Tensor | None:
        norm, self.grad_norm = self.grad_norm, None
        if self.max_grad_norm is None:
            return None
        if norm is None:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        return (norm / self.max_grad_norm).clamp(min=1.0)

    def _update(self, group: dict[str, Any], held: list[Tensor], divisor: Tensor | None) -> None:
        grads = [p.grad for p in held if p.grad is not None]
        if divisor is not None:
            grads = [grad / divisor.to(grad) for grad in grads]
        states = [self.state[p] for p in held]
        for parameter, state in zip(held, states, strict=True):
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"].item() for state in states]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        below = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(below)
        torch._foreach_add_(below, group["eps"])
        updates = torch._foreach_div(averages, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, below)
        if group["weight_decay"]:
            torch._foreach_add_(updates, held, alpha=group["weight_decay"])
            _trust(updates, held)
        torch._foreach_add_(held, updates, alpha=-float(group["lr"]))


def _trust(updates: Iterable[Tensor], parameters: list[Tensor]) -> None:
    """Scale each update by the ratio of its parameter's norm to the update's norm."""
    updates = list(updates)
    above = torch.stack([norm.float() for norm in torch._foreach_norm(parameters)])
    below = torch.stack([norm.float() for norm in torch._foreach_norm(updates)])
    ratios = torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))
    for update, ratio in zip(updates, ratios.unbind(), strict=True):
        update.mul_(ratio.to(update))


TORCH: dict[str, Callable[..., Any]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "sgd": torch.optim.SGD,
}


def build_optimizer(name: str, parameters: Any, *, apex: bool = False, **options: Any) -> Any:
    """Return the optimizer `name`, with torch's fused kernels if the parameters allow them.

    If `apex` is true, use NVIDIA's optimizer if installed; otherwise warn why torch's is used.
    """
    if name not in TORCH:
        raise ValueError(f"optimizer {name!r} is not supported: use one of {', '.join(TORCH)}")
    missing = why_no_apex() if apex else ""
    if missing:
        log.warning("%s; torch's own %s is used", missing, name)
    if apex and not missing:
        return build_apex_optimizer(name, parameters, options)
    held = [_list_group(entry) for entry in parameters]
    chosen = {"fused", "foreach"} & options.keys()
    if name != "lamb" and not chosen and all(map(_has_fused_kernel, _flatten(held))):
        options["fused"] = True
    return TORCH[name](held, **options)


def _list_group(entry: Any) -> Any:
    """Return the group with its parameters as a list, since a generator can be read only once."""
    if not isinstance(entry, dict) or isinstance(entry["params"], Tensor):
        return entry
    return {**entry, "params": list(entry["params"])}


def _flatten(entry: Any) -> Iterator[Tensor]:
    """Yield the tensors in `entry`: a tensor, a (name, tensor) pair, or a group of either."""
    if isinstance(entry, Tensor):
        yield entry
    elif isinstance(entry, dict):
        yield from _flatten(entry["params"])
    elif isinstance(entry, (list, tuple)):
        for part in entry:
            yield from _flatten(part)


def _has_fused_kernel(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda")
