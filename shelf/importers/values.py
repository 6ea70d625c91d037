"""Values of shell confs, sbatch and srun as values of the conf; None where it cannot hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_GRES = re.compile(r"gpu(?::(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*))?:(?P<count>[1-9][0-9]{0,3})")
_TIME = re.compile(r"(?:(?P<d>\d{1,4})-)?(?P<a>\d{1,6})(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")
_MEMORY = re.compile(r"(?P<number>\d{1,9})(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
_PARTITION = re.compile(r"\d{1,6}(-\d{1,6})*", re.ASCII)


def to_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) else None


def to_flag(text: str) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False, "": False}.get(text.lower())


def to_zero(text: str) -> int | None:
    """`ZERO=true` as a stage."""
    flag = to_flag(text)
    return None if flag is None else int(flag)


def to_gpus(text: str) -> str | int | None:
    match = _GRES.fullmatch(text)
    if match is None:
        return None
    return f"{match['type']}:{match['count']}" if match["type"] else int(match["count"])


def to_minutes(text: str) -> int | None:
    """Slurm's minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s; seconds round up."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:
        seconds = ((int(match["d"]) * 24 + first) * 60 + second) * 60 + third
    elif match["c"] is not None:
        seconds = (first * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) or None


def to_gigabytes(text: str) -> int | None:
    match = _MEMORY.fullmatch(text)
    if match is None:
        return None
    return -int(-int(match["number"]) * _UNITS[match["unit"].upper()] // 1)


def to_name(text: str) -> str | None:
    """A run's name, which is no job's: `last` and numbers are."""
    if re.fullmatch(r"last|L?\d+", text):
        return None
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text) else None


def to_node_list(text: str) -> list[str] | None:
    """Node names, split at commas outside brackets."""
    names = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]\s])+", text)
    return names if names and ",".join(names) == text else None


def to_partition(text: str) -> str | None:
    return text if _PARTITION.fullmatch(text) else None


def to_word(text: str) -> str | None:
    return text if re.fullmatch(r"[\w.,-]+", text, re.ASCII) else None


def to_devices(text: str) -> tuple[int, ...] | None:
    """`4,5` as numbers; None for names, slices and an empty list."""
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
    "partition": ("queue", to_word),
    "gres": ("gpus", to_gpus),
    "gpus-per-node": ("gpus", lambda text: to_gpus(f"gpu:{text}")),
    "cpus-per-task": ("cpus", to_number),
    "mem": ("memory_gb", to_gigabytes),
    "nodes": ("count", to_number),
}
TOP_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "job-name": ("name", to_name),
    "time": ("cluster.walltime_min", to_minutes),
    "account": ("cluster.account", to_word),
    "qos": ("cluster.qos", to_word),
    "exclude": ("cluster.exclude", to_node_list),
    "requeue": ("cluster.requeue", lambda text: True),
    "no-requeue": ("cluster.requeue", lambda text: False),
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
"""srun's container options: the key with its value, or with the option's own where it is None."""
SRUN_REASONS: Mapping[str, str] = {
    "container-name": "the unpacked image is named after the image",
    "jobid": "vjob starts the step in its own job",
    "label": "lines are kept by node and rank",
    "mpi": "ranks are started by vjob's agent, without MPI",
}
