"""The state of the machine as manager.json keeps it."""

from __future__ import annotations

from typing import Any, Optional

from varuna_core.morph.machine import State


def parse_state(value: Any) -> Optional[State]:
    """From manager.json; None where it is missing or of another version."""
    if not isinstance(value, dict) or not isinstance(value.get("session"), str):
        return None
    rest: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value.items()
    }
    del rest["session"]
    try:
        return State(**rest)
    except TypeError:
        return None
