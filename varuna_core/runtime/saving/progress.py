"""How far a training is, and what of a load waits for what it is told of later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class TrainingProgress:
    """How far a training is, in words: the same on every rank."""

    iteration: int = 0
    """Steps taken."""

    data_position: Any = None
    user_state: Any = None


@dataclass(kw_only=True)
class PendingRestore:
    """What a load leaves for an optimizer and a schedule that are told of after it."""

    folder: Path
    loss_scale: Any
    lr_schedule: Any
    options: dict[int, Any] | None = None
    """What each parameter had in the optimizer, once that is loaded."""
