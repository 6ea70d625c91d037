"""Compressed lists of node names: `rack[1-2]n[01-03],login`."""

from __future__ import annotations

import re

from varuna_core.records.files import as_whole

MOST_NODES = 200_000
"""Most names that one list is expanded to."""


def expand_nodes(text: str) -> list[str]:
    """Expand `rack[1-2]n[01-03],gpu-a[1,3-4]-int` to names, in the order of the list.

    A text that would give more than MOST_NODES names, or that is not a list as Slurm prints it, is
    returned unchanged as one name.
    """
    names: list[str] = []
    left = MOST_NODES
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        partial = [""]
        for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", item):
            choices = _expand_range(part[1:-1]) if part.startswith("[") else [part]
            left -= len(partial) * len(choices) if len(choices) != 1 else 0
            if not choices or left < 0:
                return [text]
            partial = [head + choice for head in partial for choice in choices]
        names += partial
    return names


def _expand_range(text: str) -> list[str]:
    """Return the numbers of `1,03-05`; empty if the text is not a range or has too many numbers."""
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            numbers.append(first)
            continue
        begin, end = as_whole(first), as_whole(last)
        if begin is None or end is None or not 0 <= end - begin < MOST_NODES - len(numbers):
            return []
        numbers += [str(n).zfill(len(first)) for n in range(begin, end + 1)]
    return numbers
