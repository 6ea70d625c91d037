"""Convert values of shell scripts, sbatch and srun to values of the conf; None if not possible."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vjob.jobs.conf.slurm_words import WORDS, to_number, to_word


def to_flag(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False, "": False}.get(text.lower())


def to_devices(text: str) -> tuple[int, ...] | None:
    """Parse `4,5` as numbers; None for names, slices and an empty list."""
    words = text.split(",")
    if not all(re.fullmatch(r"\d{1,4}", word.strip(), re.ASCII) for word in words):
        return None
    return tuple(int(word) for word in words)


def to_any_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


def to_whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,12}", text, re.ASCII) else None


def to_decimal(text: str) -> float | None:
    if not re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?", text, re.ASCII):
        return None
    return float(text)


# sbatch and srun options: the key, and its value's maker.
GROUP_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    name: (WORDS[name].key.rpartition(".")[2], WORDS[name].respell or to_number)
    for name in ("partition", "gres", "gpus-per-node", "mem")
}
TOP_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    name: (WORDS[name].key, WORDS[name].respell or to_word)
    for name in (
        "job-name",
        "time",
        "account",
        "qos",
        "exclude",
        "requeue",
        "no-requeue",
        "signal",
        "chdir",
    )
}
PYXIS: Mapping[str, tuple[str, Any] | None] = {
    "container-image": ("container.image", None),
    "container-mounts": ("container.mounts", None),
    "container-workdir": ("container.workdir", None),
    "container-remap-root": ("container.remap_root", True),
    "no-container-remap-root": ("container.remap_root", False),
    "container-writable": ("container.writable", True),
    "container-readonly": ("container.writable", False),
    "container-name": None,
    "no-container-mount-home": None,
}
"""srun's container options, each with its key and value; None as value takes the option's own."""
SRUN_REASONS: Mapping[str, str] = {
    "container-name": "the unpacked image gets the name of the image file",
    "jobid": "vjob starts the step in the job that it submits",
    "label": "lines are kept by node and rank",
    "mpi": "ranks are started by vjob's agent, without MPI",
}
