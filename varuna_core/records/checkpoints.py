"""Complete checkpoints in a folder: their names and manifests, no more.

`varuna_core.checkpoint` writes and loads them; this is for whoever watches, too, and has no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from varuna_core.records.files import list_names, read_json

NAME = re.compile(r"varuna_ckpt_(\d+)(?:\.(.+\.\d+|x)\.(partial|removed|damaged))?")
MANIFEST = "manifest.json"
DAMAGE = "damage.json"
"""In a checkpoint that was set aside: why."""
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""What Megatron-LM and DeepSpeed write once a checkpoint is complete."""


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
        if match and match[3] in (None, "partial") and (store / name / MANIFEST).is_file():
            found.setdefault(int(match[1]), store / name)
    return [Complete(iteration=i, path=found[i]) for i in sorted(found)]


def find_fit(store: Path, known: Optional[set[Path]] = None) -> Optional[Complete]:
    """The newest complete one whose files have the sizes that its manifest names.

    For whoever only watches: a load checks all that it reads. Those in `known` were fit at an
    earlier look, and are not read again: a manifest has a line for each piece of each tensor.
    """
    known = set() if known is None else known
    for found in reversed(list_complete(store)):
        if found.path in known or _is_fit(found.path):
            known.add(found.path)
            return found
    return None


def _is_fit(folder: Path) -> bool:
    manifest = read_json(folder / MANIFEST)
    try:
        files = manifest.get("content", {}).get("files", {})
        sizes = {name: held["size"] for name, held in files.items()}
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (AttributeError, KeyError, TypeError, OSError):
        return False


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that could not be loaded, and was set aside."""

    iteration: int
    path: str
    reason: str


def list_damaged(store: Path) -> list[Damaged]:
    """Oldest iteration first."""
    found = []
    for name in sorted(list_names(store)):
        match = NAME.fullmatch(name)
        if match and match[3] == "damaged":
            told = read_json(store / name / DAMAGE)
            reason = told.get("reason") if isinstance(told, dict) else None
            reason = str(reason or "nobody wrote why")
            found.append(Damaged(int(match[1]), str(store / name), reason))
    return sorted(found, key=lambda item: item.iteration)


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint of a folder."""

    step: int
    written: float
    """By the file system's clock."""


def find_newest(store: Path) -> Optional[Newest]:
    """None where there is none, or the folder cannot be read."""
    found = [_read_manifest(complete) for complete in list_complete(store)[-1:]]
    found += [_read_tracker(store / name) for name in TRACKERS]
    return max(filter(None, found), key=lambda newest: newest.step, default=None)


def _read_manifest(complete: Complete) -> Optional[Newest]:
    try:
        return Newest(complete.iteration, complete.written_at)
    except OSError:  # removed meanwhile
        return None


def _read_tracker(path: Path) -> Optional[Newest]:
    try:
        with path.open("rb") as handle:
            match = re.fullmatch(rb"(?:global_step)?(\d{1,18})", handle.read(100).strip())
            written = os.fstat(handle.fileno()).st_mtime
            return None if match is None else Newest(int(match[1]), written)
    except OSError:
        return None
