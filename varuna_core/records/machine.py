"""Unique names of this machine and its processes, and the environment that jobs inherit."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Dict, Mapping

from varuna_core.records.files import read_text

KEPT = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "TZ",
    "SLURM_CONF",
    "SLURM_JWT",
)


def identify_machine() -> str:
    """This machine since its last start: pids mean nothing elsewhere, or after the next one."""
    try:
        boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def start_time(pid: int) -> str | None:
    """A process' start in clock ticks: with the pid it names one process for ever."""
    try:
        text = read_text(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def clean_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Variables that a job inherits from the submitting shell: enough to find programs.

    SLURM_* and SBATCH_* of a surrounding job, conda's and Python's own would all leak otherwise.
    """
    found = {name: environ[name] for name in KEPT if name in environ}
    found.setdefault("PATH", os.defpath)
    return found
