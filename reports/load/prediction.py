"""What the plan promised: the part of plan.json that a planner may write, and nobody must.

"prediction": {"step_s": 1.4, "stage_s": [0.1, 0.2], "bubble_share": 0.2, "memory_mb": [910, 870]}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """None, or empty, is what it does not say."""

    step_s: float | None
    stage_s: tuple[float, ...]
    """Work of each stage in a step."""
    bubble_share: float | None
    memory_mb: tuple[float, ...]
    """The most that each stage holds."""


def read_prediction(plan: dict[str, Any]) -> Prediction | None:
    """None where the plan predicts nothing, or nothing that makes sense."""
    value = plan.get("prediction")
    if not isinstance(value, dict):
        return None
    found = Prediction(
        step_s=_read_number(value.get("step_s")),
        stage_s=_read_numbers(value.get("stage_s")),
        bubble_share=_read_number(value.get("bubble_share")),
        memory_mb=_read_numbers(value.get("memory_mb")),
    )
    return found if found.step_s or found.stage_s or found.bubble_share or found.memory_mb else None


def _read_number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e15 else None


def _read_numbers(value: Any) -> tuple[float, ...]:
    numbers = [_read_number(item) for item in value] if isinstance(value, list) else [None]
    return () if None in numbers else tuple(number or 0.0 for number in numbers)
