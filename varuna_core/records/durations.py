"""Durations as text for people. One formatter for the monitor, the commands and the reports."""

from __future__ import annotations

import math


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
