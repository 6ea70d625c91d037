"""Update weights after a step: overflow, clipping, loss scale, and the optimizer's `step`.

In fp16, the loss is multiplied by a scale so that small gradients are not rounded to zero. A step
that overflows halves the scale (down to a minimum); 2000 consecutive good steps double it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor

from varuna_core.runtime.optim.grads import Gradients
from varuna_core.runtime.optim.optimizers import Lamb

GROWTH_STEPS = 2000
FACTOR = 2.0


@dataclass(kw_only=True)
class LossScale:
    """The loss scale in fp16; equal on all ranks, since all see the same gradient norm."""

    scale: float
    dynamic: bool = True
    least: float = 1.0
    good_steps: int = 0
    """Good steps since the scale last changed."""

    def update(self, overflow: bool) -> None:
        """Update a dynamic scale after a step; a static scale never changes."""
        if not self.dynamic:
            return
        if overflow:
            self.scale = max(self.scale / FACTOR, self.least)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.scale *= FACTOR
            self.good_steps = 0


def build_loss_scale(
    loss_scale: float | Literal["dynamic"] | str, init_loss_scale: float, min_loss_scale: float
) -> LossScale:
    """Build the loss scale from `set_optimizer`'s arguments."""
    if loss_scale == "dynamic":
        scale, least = (
            _read(init_loss_scale, "init_loss_scale"),
            _read(min_loss_scale, "min_loss_scale"),
        )
        if least > scale:
            raise ValueError(f"min_loss_scale {least} is above init_loss_scale {scale}")
        return LossScale(scale=scale, least=least)
    if isinstance(loss_scale, str):
        raise ValueError(f"loss_scale {loss_scale!r}: expected 'dynamic' or a number")
    return LossScale(scale=_read(loss_scale, "loss_scale"), dynamic=False)


def _read(value: float, name: str) -> float:
    scale = float(value)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name} {value!r}: want a number above 0")
    return scale


class Updates:
    """The optimizers of one rank, and the loss scale of fp16."""

    def __init__(self, needs_scale: bool) -> None:
        self.needs_scale = needs_scale
        self.optimizers: Sequence[Any] = ()
        self.loss_scale: LossScale | None = None
        self.skipping = False
        """True if the last step overflowed."""

    @property
    def scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def check_ready(self) -> None:
        if self.needs_scale and self.loss_scale is None:
            raise RuntimeError("fp16 needs set_optimizer, as steps that overflow must be skipped")

    def clip_and_scale(
        self, square: Tensor, gradients: Gradients, clip_grad_max_norm: float | None
    ) -> Tensor:
        """Clip and unscale the gradients; return their norm before clipping, from its `square`."""
        norm = square.sqrt()
        kept = norm.to(torch.get_default_dtype())
        if self.loss_scale is not None:
            self.skipping = not bool(square.isfinite())
            self.loss_scale.update(self.skipping)
            if self.skipping:
                gradients.drop()  # nothing is to be added to them
        if clip_grad_max_norm is not None:
            factor = (clip_grad_max_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients.scale(factor)
            norm = norm * factor
        for optimizer in self.optimizers:
            if isinstance(optimizer, Lamb):
                optimizer.grad_norm = norm
        return kept

    def attach(self, optimizers: Sequence[Any], loss_scale: LossScale) -> None:
        """Register these optimizers; in fp16, skip each `step` if the gradients overflowed."""
        self.optimizers = tuple(optimizers)
        if not self.needs_scale:
            return
        self.loss_scale = loss_scale
        for optimizer in optimizers:
            self._let_wait(optimizer)

    def _let_wait(self, optimizer: Any) -> None:
        step = optimizer.step
        if getattr(step, "updates", None) is self:
            return

        # A bound method, with the attributes of the old one: torch's schedulers look for both.
        @wraps(step)
        def step_unless_skipping(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.skipping:
                return step(*args, **kwargs)
            if isinstance(optimizer, torch.optim.Optimizer):
                # Else a scheduler that steps after this would warn that the order is wrong.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            return None

        step_unless_skipping.updates = self  # type: ignore[attr-defined]
        optimizer.step = MethodType(step_unless_skipping, optimizer)


WHOLE_TENSOR = ("adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap")
"""Parts of names of optimizers whose update of an element depends on the whole tensor."""

WHOLE_MODEL = ("lbfgs", "prodigy", "dadapt")
"""Parts of names of optimizers whose update of an element depends on all parameters."""


def check_optimizers(optimizers: Sequence[Any], own: set[int]) -> None:
    """Raise an error for optimizers without `step` or with parameters other than `own` (ids)."""
    held: set[int] = set()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
            raise ValueError(f"{kind} is not an optimizer: it needs `param_groups` and `step()`")
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not mine <= own:
            raise ValueError(
                "the optimizer holds parameters that are not this rank's: create it after "
                "Varuna, from model.parameters()"
            )
        if mine & held:
            raise ValueError(
                f"{kind} holds parameters of another optimizer: pass each parameter to only one"
            )
        held |= mine


def refuse_whole(optimizers: Sequence[Any], *, has_pieces: str, is_spread: str) -> None:
    """Raise an error for optimizers that, by their names, need more tensors than a rank holds.

    `has_pieces` and `is_spread` name options that give a rank parts of tensors, or of the model.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if has_pieces and any(word in kind.lower() for word in WHOLE_TENSOR):
            raise ValueError(
                f"{kind} needs whole tensors, but with {has_pieces} a rank holds only parts of "
                f"them: use AdamW or SGD, or remove {has_pieces}"
            )
        if is_spread and any(word in kind.lower() for word in WHOLE_MODEL):
            raise ValueError(
                f"{kind} needs all parameters together, but with {is_spread} a rank holds only "
                "some of them: use an optimizer that updates each tensor separately, or put the "
                "whole model on each rank"
            )
