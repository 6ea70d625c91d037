"""Lists of nodes as one text: `rack[1-2]n[01-03],login`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def expand_nodes(text: str) -> list[str]:
    """Names of `rack[1-2]n[01-03],gpu-a[1,3-4]-int`, in their order there."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        partial = [""]
        for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", item):
            choices = _expand_range(part[1:-1]) if part.startswith("[") else [part]
            partial = [head + choice for head in partial for choice in choices]
        names += partial
    return names


def _expand_range(text: str) -> list[str]:
    numbers = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            numbers.append(first)
            continue
        width = len(first)
        numbers += [str(n).zfill(width) for n in range(int(first), int(last) + 1)]
    return numbers


def fold_names(names: Iterable[str]) -> str:
    """Names of nodes as one text, numbers at their ends as ranges: `a[1-2,4],login`."""
    stems: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,9})", name)
        if match is None:
            stems.setdefault((name, -1), [])
            continue
        width = len(match[2]) if match[2].startswith("0") and len(match[2]) > 1 else 0
        ranges = stems.setdefault((match[1], width), [])
        number = int(match[2])
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ",".join(_fold(stem, width, ranges) for (stem, width), ranges in stems.items())


def _fold(stem: str, width: int, ranges: Sequence[tuple[int, int]]) -> str:
    """One stem with all its numbers."""
    shown = [
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
        for first, last in ranges
    ]
    if not shown:
        return stem
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"{stem}{shown[0]}" if is_one else f"{stem}[{','.join(shown)}]"
