"""Unique names of this machine and of processes, and the environment that jobs inherit."""

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
    """Return a name of this machine since its last boot: process ids are meaningless elsewhere or
    after the next boot."""
    try:
        boot = read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def start_time(pid: int) -> str | None:
    """Return a process' start in clock ticks: with the pid it identifies a process uniquely."""
    try:
        text = read_text(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def clean_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """Return the variables that a job inherits from the submitting shell: enough to find programs.

    Otherwise SLURM_* and SBATCH_* of a surrounding job and variables of conda and Python would
    leak.
    """
    found = {name: environ[name] for name in KEPT if name in environ}
    found.setdefault("PATH", os.defpath)
    return found
