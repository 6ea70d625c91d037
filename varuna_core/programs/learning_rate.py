"""The learning rate of each step: linear warm-up, then the decay. No torch.

Counted are steps that were taken: those that an overflow of fp16 skips do not move it, so that a
run that goes on from a checkpoint goes on along the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """`min_lr` is reached with step `decay_steps` and kept after it."""

    kind: str
    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int

    def at(self, taken: int) -> float:
        """For the step that comes after `taken` steps; the first one has a rate above zero."""
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
