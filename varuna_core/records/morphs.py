"""The event of a morph, which varuna_core/morph/cost.py writes, as status and report tell it."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

PARTS = ("notice_s", "stop_s", "plan_s", "start_s", "load_s", "first_step_s")
"""In their order: between the last sign that all was well and the first step in the new layout."""


def read_parts(event: Mapping[str, Any]) -> Dict[str, float]:
    """Seconds by part, as far as the event has them: one that ended before its first step lacks
    some."""
    return {name: float(event[name]) for name in PARTS if _is_number(event.get(name))}


def read_pause_s(event: Mapping[str, Any]) -> Optional[float]:
    """None where no step came of it."""
    return float(event["pause_s"]) if _is_number(event.get("pause_s")) else None


def tell_morph(event: Mapping[str, Any]) -> str:
    """`from 8 x 4 to 6 x 4, 12 s`."""
    pause_s = read_pause_s(event)
    took = "no step came of it" if pause_s is None else f"{pause_s:.0f} s"
    return f"from {event.get('from', '?')} to {event.get('to', '?')}, {took}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
