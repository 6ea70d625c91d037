"""Numbers of ranks, stages and nodes as people read them."""

from __future__ import annotations

from typing import Iterable, List


def join_numbers(numbers: Iterable[int], between: str = ",") -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    parts: List[List[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
