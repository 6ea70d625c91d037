"""Which checkpoints in a folder are complete: their names and the file that says so, no more.

What is in one is `varuna_core.checkpoint`'s business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from varuna_core.records.files import list_names

NAME = re.compile(r"varuna_ckpt_(\d+)(?:\.(.+\.\d+|x)\.(partial|removed))?")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Complete:
    """A complete checkpoint."""

    iteration: int
    path: Path

    @property
    def written_at(self) -> float:
        """Seconds since the epoch, by the file system's clock."""
        return (self.path / MANIFEST).stat().st_mtime


def name_of(iteration: int) -> str:
    return f"varuna_ckpt_{iteration}"


def list_complete(store: Path) -> list[Complete]:
    """Oldest iteration first."""
    found: dict[int, Path] = {}
    # A short name sorts before a partial one of the same iteration, and wins.
    for name in sorted(list_names(store)):
        match = NAME.fullmatch(name)
        if match and match[3] != "removed" and (store / name / MANIFEST).is_file():
            found.setdefault(int(match[1]), store / name)
    return [Complete(iteration=i, path=found[i]) for i in sorted(found)]
