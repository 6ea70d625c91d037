"""Read and print samples of GPUs in gpustat's format: <node>.gpu files of older and foreign
folders, and the agent's JSON lines as status shows them.

n061  Thu Jun  1 16:08:12 2023  535.54.03           a heading, which only gpustat prints
[0] NVIDIA A10       | 49'C,   0 % |     0 / 22731 MB |
[1] NVIDIA A10       | ??'C,  ?? % |     0 / 22731 MB | me(900M)
[cpu] 16 processors  |  12 % |  5120 / 64000 MB |       vjob's, on a node without a GPU
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Iterator, Mapping, Match, Optional

CPU = "cpu"
"""The index of the line for the processors."""
_UNKNOWN = "-"
"""Text for a value that is not known, as vjob writes it; gpustat writes `??`."""
_LINE = re.compile(
    r"\[(\d{1,4}|cpu)\] (.{1,80}?) *\| *(?:(\d{1,9}|\?\?)'C, *)?(\d{1,9}|\?\?|-) ?% *"
    r"\| *(\d{1,9}|\?\?|-) */ *(\d{1,9}|\?\?|-) MB([^\n]*)"
)
_HEADING = re.compile(r"\S+ +(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\b")
_USER = re.compile(r"[\w.-]\(\d+M\)")
"""Pattern for the end of a user's name and the memory of the user's process after it."""


@dataclass(frozen=True)
class GpuLine:
    """One GPU in one sample; None where the line has `??` or `-`."""

    index: str
    name: str
    temperature: Optional[float]
    utilization: Optional[float]
    memory_used_mb: Optional[float]
    memory_total_mb: Optional[float]
    num_processes: Optional[int]
    """Number of processes on the GPU, by the users that `gpustat -u` names; None if the line names
    no users, as lines of vjob do, which does not prove that the GPU is idle."""


def format_line(gpu: Mapping[str, Any]) -> str:
    """Format the sample of one GPU, which has the fields of a GpuLine, as a line of the GPU log,
    with its line end."""
    heat = gpu["temperature"]
    degrees = "" if heat is None else f"{_format(heat).rjust(2)}'C, "
    busy = _format(gpu["utilization"]).rjust(3)
    used, total = (_format(gpu[key]).rjust(5) for key in ("memory_used_mb", "memory_total_mb"))
    return f"[{gpu['index']}] {gpu['name']:<16} | {degrees}{busy} % | {used} / {total} MB |\n"


def render_sample(sample: Mapping[str, Any]) -> str:
    """Return an agent's sample as gpustat prints it; without GPUs, as a line for the processors."""
    if not sample["gpus"]:
        cpu = {
            "index": CPU,
            "name": f"{sample.get('num_cpus', '?')} processors",
            "temperature": None,
            "utilization": sample["cpu_percent"],
            "memory_used_mb": sample["memory_used_mb"],
            "memory_total_mb": sample["memory_total_mb"],
        }
        return format_line(cpu)
    return "".join(format_line(gpu) for gpu in sample["gpus"])


def find_lines(text: str) -> Iterator[Match[str]]:
    """Yield a match for each line of a GPU in a text of many lines, without parsing its values."""
    return _LINE.finditer(text)


def read_index(match: Match[str]) -> str:
    return match[1]


def read_utilization(match: Match[str]) -> Optional[float]:
    return _read(match[4])


def read_line(match: Match[str]) -> GpuLine:
    index, name, heat, busy, used, total, more = match.groups()
    return GpuLine(
        index=index,
        name=name,
        temperature=_read(heat),
        utilization=_read(busy),
        memory_used_mb=_read(used),
        memory_total_mb=_read(total),
        num_processes=len(_USER.findall(more)) or None if "(" in more else None,
    )


def parse_line(text: str) -> Optional[GpuLine]:
    """Parse a line of a GPU; return None for any other line."""
    match = _LINE.search(text)
    return None if match is None else read_line(match)


def is_heading(text: str) -> bool:
    return _HEADING.match(text) is not None


def parse_heading(text: str) -> Optional[float]:
    """Return the heading's seconds since 1970, by this machine's zone: gpustat prints none."""
    match = _HEADING.match(text)
    if match is None:
        return None
    try:
        words = " ".join(match.group(1).split())
        return datetime.strptime(words, "%a %b %d %H:%M:%S %Y").timestamp()
    except (ValueError, OverflowError, OSError):
        return None


@lru_cache(maxsize=4096)
def _read(word: Optional[str]) -> Optional[float]:
    return None if word in (None, _UNKNOWN, "??") else float(word)


def _format(value: Optional[float]) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"
