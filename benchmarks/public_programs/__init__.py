"""Public programs that `vjob run` is tried on: written down first, then drawn by a seed.

`list.yaml` names twenty, with the source of each and how its own documents start it. `draw` takes
one that is started by a command, then two that are not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import yaml

LIST = Path(__file__).with_name("list.yaml")
OTHERS = 2


@dataclass(frozen=True, kw_only=True)
class PublicProgram:
    """A row of the list."""

    name: str
    source: str
    """Owner and name of its repository."""
    kind: str
    """script, module or command."""
    start: str
    """Its own documents' command line, with fewer steps."""


def read_programs(path: Path = LIST) -> tuple[int, list[PublicProgram]]:
    """The seed, and the programs in their order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return int(content["seed"]), [PublicProgram(**row) for row in content["programs"]]


def draw(seed: int, programs: list[PublicProgram]) -> list[PublicProgram]:
    """One command, and two that are none."""
    source = random.Random(seed)
    commands = [program for program in programs if program.kind == "command"]
    others = [program for program in programs if program.kind != "command"]
    return [source.choice(commands), *source.sample(others, OTHERS)]
