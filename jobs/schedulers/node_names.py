"""Lists of nodes as one text: `rack[1-2]n[01-03],login`."""

from __future__ import annotations

import re


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
