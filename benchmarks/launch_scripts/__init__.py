"""Public launch scripts, and what each starts: the list that readers of scripts are judged by.

`list.json` names 80 scripts by repository, path, commit and git's hash of the file, and none of
their text is in this repository. The truth was found by reading each script and by a plain bash in
which every command was a stub, run twice: words that differ between users, jobs, nodes, times and
arguments are masked, the others are kept as a hash. The list was written before the reader.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("list.json")
SEED = 20261128
NUM_SCRIPTS = 80
MASK = "@"
FRESH = Path(__file__).with_name("fresh.json")
"""A second list, of other repositories: drawn after the reader was repaired."""


def hash_words(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(words)).encode()).hexdigest()


def hash_blob(content: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def group_words(words: Sequence[str]) -> list[list[str]]:
    """Each option with its values."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or (word.startswith("-") and not word[1:2].isdigit()):
            groups.append([])
        groups[-1].append(word)
    return groups


@dataclass(frozen=True, kw_only=True)
class Start:
    """A program and its words; with two the reader may name either."""

    kind: str
    """script, module or command."""

    program: str
    """File name without its folder, or the module."""

    words: int
    """Number of words after the program."""

    masked: tuple[int, ...]
    """Places of words that only the job or the user knows."""

    sha256: str
    """Hash of the words, masked ones as MASK."""

    groups: str = ""
    """Options of a Megatron-LM program: the first 8 digits of the hash of each option with its
    values, in any order, since a conf with typed keys has another one. Options with a masked word
    are left out."""

    def has_words(self, words: Sequence[str]) -> bool:
        hidden = [MASK if place in self.masked else word for place, word in enumerate(words)]
        return len(words) == self.words and hash_words(hidden) == self.sha256

    def count_lost(self, words: Sequence[str]) -> int:
        """Number of options that are not among the words, or have other values."""
        there = [hash_words(group)[:8] for group in group_words(words)]
        wanted = self.groups.split()
        return sum(max(0, wanted.count(one) - there.count(one)) for one in set(wanted))


@dataclass(frozen=True, kw_only=True)
class LaunchScript:
    """A row of the list."""

    name: str
    repository: str
    path: str
    commit: str
    blob: str
    """Git's hash of the file."""

    launcher: str
    ranks: int | None = None
    """Ranks a node, where the script says it."""

    nodes: int | None = None
    refusal: str | None = None
    """Name of a Refusal: an error for this reason is right, alone or beside the starts."""

    beside: tuple[str, ...] = ()
    """Other files that it reads or starts."""

    starts: tuple[Start, ...]
    """None: only an error is right."""

    def locate(self, folder: Path, path: str | None = None) -> Path:
        return folder / self.repository.replace("/", "+") / (path or self.path)


def read_scripts(path: Path = LIST) -> list[LaunchScript]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    for row in rows:
        starts = row.pop("starts")
        row["beside"] = tuple(row.get("beside", ()))
        row["starts"] = tuple(Start(**{**one, "masked": tuple(one["masked"])}) for one in starts)
    return [LaunchScript(**row) for row in rows]


def split_scripts(
    scripts: Sequence[LaunchScript],
) -> tuple[list[LaunchScript], list[LaunchScript]]:
    """The half for development, and the half kept apart, as SEED draws them."""
    drawn = set(random.Random(SEED).sample([one.name for one in scripts], len(scripts) // 2))
    return (
        [one for one in scripts if one.name in drawn],
        [one for one in scripts if one.name not in drawn],
    )
