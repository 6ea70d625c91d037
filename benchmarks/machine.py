"""The machine of a measurement: its processor and memory, and nothing that names it.

And how programs are installed on it: compiled.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path


def compile_to(folder: Path) -> dict[str, str]:
    """This process' environment, but modules are compiled, as those of installed programs are."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
