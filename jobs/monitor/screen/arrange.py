"""How many lines each part of the screen gets; pure, so that every size can be tried."""

from __future__ import annotations

from dataclasses import dataclass

HINT = 1
ONE_PANE = 9
"""With fewer lines than this for the panes, only the active one is shown."""
GPU_PANE = 20
"""With fewer than this, GPUs only where their pane is the active one."""
PANES = ("nodes", "gpus", "log")


@dataclass(frozen=True, kw_only=True)
class Heights:
    """Lines; 0 is not shown."""

    nodes: int
    gpus: int
    log: int


def find_most_heading(height: int) -> int:
    """Lines that the head may have."""
    return max(2, min(12, height // 3))


def arrange_panes(
    lines: int, *, active: str, is_zoomed: bool, num_nodes: int, num_gpus: int
) -> Heights:
    """Share out what head and hint leave."""
    lines = max(0, lines)
    if is_zoomed or lines < ONE_PANE:
        return Heights(**{name: lines if name == active else 0 for name in PANES})
    gpus = 1 + min(num_gpus, 8 if lines >= 32 else 4)
    if lines < GPU_PANE:
        gpus = min(gpus, 4) if active == "gpus" else 0
    least = 2 + max(1, num_nodes)
    nodes = min(least, max(4, (lines - gpus) // 2))
    return Heights(nodes=nodes, gpus=gpus, log=lines - gpus - nodes)
