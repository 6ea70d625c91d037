"""Sizes, ages and tables, as `vjob container` shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence


def render_table(head: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, below a head."""
    if not rows:
        return f"{head}: nothing"
    table = [titles, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def show_time(moment: float) -> str:
    """How long ago."""
    seconds = time.time() - moment
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def show_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
