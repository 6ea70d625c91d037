"""Numbers, durations and tables as people read them."""

from __future__ import annotations

import math
from typing import Iterable, List, Sequence


def format_duration(seconds: float) -> str:
    """`42 s`, `12 min`, `2 h 5 min`, `3 d 4 h`; `ever` where it is not finite."""
    if not math.isfinite(seconds):
        return "ever"
    if seconds < 9.5:
        return f"{max(seconds, 0):.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def join_numbers(numbers: Iterable[int], between: str = ",") -> str:
    """0, 1, 2, 5 as `0-2,5`."""
    parts: List[List[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def align_columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """The rows of a table as lines: columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows)]  # noqa: B905 - Python 3.8
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
