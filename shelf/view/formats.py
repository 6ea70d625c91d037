"""Format numbers for the live views, coarsely enough that unchanged values look unchanged."""

from __future__ import annotations

import math

MINUTE, HOUR, DAY = 60, 3600, 86400


NOW_S = 10
"""An age below this many seconds counts as now."""


def format_ago(seconds: float) -> str:
    """Format the time since an event: `just now`, `20s ago`."""
    return "just now" if seconds < NOW_S else f"{format_age(seconds)} ago"


def format_age(seconds: float | None) -> str:
    """Format an age coarsely: `now`, `20s`, `3m`, `5h`, `2d`; empty if not known."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < NOW_S:
        return "now"
    if seconds < MINUTE:
        return f"{int(seconds // 10) * 10}s"
    for length, unit, limit in ((MINUTE, "m", HOUR), (HOUR, "h", 2 * DAY)):
        if seconds < limit:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds // DAY)}d"


def format_coarse_duration(seconds: float | None) -> str:
    """Format `45 s`, `12 min`, `1 h 05 min`, `3 d 4 h`: rounded down and padded to look steady.

    Sentences use `varuna_core.records.formatting.format_duration`.
    """
    if seconds is None or not math.isfinite(seconds):
        return "" if seconds is None else "?"
    seconds = max(0, int(seconds))
    if seconds < MINUTE:
        return f"{seconds // 5 * 5} s"
    if seconds < HOUR:
        return f"{seconds // MINUTE} min"
    if seconds < 2 * DAY:
        return f"{seconds // HOUR} h {seconds % HOUR // MINUTE:02d} min"
    return f"{seconds // DAY} d {seconds % DAY // HOUR} h"


def format_seconds(seconds: float | None) -> str:
    """Format a step's duration: `0.042`, `2.31`, `14.2`, `130`."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    digits = next((n for n, limit in ((3, 1), (2, 10), (1, 100)) if seconds < limit), 0)
    return f"{seconds:.{digits}f}"


def format_loss(loss: float) -> str:
    """Format a loss with at most five digits; nan and inf as such."""
    return f"{loss:.5g}" if math.isfinite(loss) else str(loss)


def format_memory(used_mb: float | None, total_mb: float | None) -> str:
    """Format used and total memory: `18.2/22.5 GB`."""
    if used_mb is None:
        return ""
    used = f"{used_mb / 1024:.1f}"
    return f"{used}/{total_mb / 1024:.1f} GB" if total_mb else f"{used} GB"
