"""What a checkpoint keeps of the order of samples, and the refusal to go on in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from varuna_core.data.errors import DataError


def check_order(where: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Name what would bring samples in another order than before."""
    changed = [key for key in now if saved.get(key) != now[key]]
    if changed:
        listed = ", ".join(f"{key} was {saved.get(key)}, is {now[key]}" for key in changed)
        raise DataError(
            f"{where}: the samples would come in another order than before, some twice and some "
            f"never: {listed}. Go on with the old values"
        )
