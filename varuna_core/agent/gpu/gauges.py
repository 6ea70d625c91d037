"""Measure the load of a node's processors, and its memory."""

from __future__ import annotations

import os
from typing import Dict


class Cpu:
    """Load of all processors between two calls of `read_percent`."""

    def __init__(self) -> None:
        self.count = os.cpu_count() or 1
        self._last: tuple[int, int] | None = None

    def read_percent(self) -> float | None:
        """Return the load of all processors since the previous call, in percent; None at the first
        call."""
        with open("/proc/stat", encoding="ascii") as handle:
            ticks = [int(word) for word in handle.readline().split()[1:9]]
        now = (sum(ticks), ticks[3] + ticks[4])  # all, idle and waiting for disks
        last, self._last = self._last, now
        if last is None or now[0] <= last[0]:
            return None
        return round(100.0 * (1 - (now[1] - last[1]) / (now[0] - last[0])), 1)


def read_memory_mb() -> tuple[int, int]:
    """Return used and total memory, as `free` counts them."""
    fields = _read_meminfo()
    return fields["MemTotal"] - fields["MemAvailable"], fields["MemTotal"]


def read_swap_mb() -> int:
    """Return the node's memory in swap."""
    fields = _read_meminfo()
    return fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)


def _read_meminfo() -> Dict[str, int]:
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as handle:
        for line in handle:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) // 1024
    return fields
