"""What the loss is multiplied by in fp16, so that small gradients are not rounded to zero.

A step that overflows halves it (not below the least), 2000 good ones in a row double it. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GROWTH_STEPS = 2000
FACTOR = 2.0


@dataclass(kw_only=True)
class LossScale:
    """Every rank keeps its own, and all are equal: they hear the same verdicts."""

    scale: float
    dynamic: bool = True
    least: float = 1.0
    good_steps: int = 0
    """Since the scale last changed."""

    def update(self, overflow: bool) -> None:
        """After a step; a static scale stays."""
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
    """From `set_optimizer`'s arguments."""
    if loss_scale == "dynamic":
        scale, least = (
            _read(init_loss_scale, "init_loss_scale"),
            _read(min_loss_scale, "min_loss_scale"),
        )
        if least > scale:
            raise ValueError(f"min_loss_scale {least} is above init_loss_scale {scale}")
        return LossScale(scale=scale, least=least)
    if isinstance(loss_scale, str):
        raise ValueError(f"loss_scale {loss_scale!r}: want 'dynamic' or a number")
    return LossScale(scale=_read(loss_scale, "loss_scale"), dynamic=False)


def _read(value: float, name: str) -> float:
    scale = float(value)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name} {value!r}: want a number above 0")
    return scale
