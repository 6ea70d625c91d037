"""Which checkpoints of a folder are complete, seen without reading any: names and manifests alone.

`varuna_core.checkpoint` writes and loads them; this is for whoever watches, and has no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from varuna_core.records.files import list_names

MANIFEST = "manifest.json"
NAME = re.compile(r"varuna_ckpt_(\d+)(?:\.(.+\.\d+|x)\.(partial|removed))?")
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
"""What Megatron-LM and DeepSpeed write once a checkpoint is complete."""


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint of a folder."""

    step: int
    written: float
    """By the file system's clock."""


def find_newest(store: Path) -> Optional[Newest]:
    """None where there is none, or the folder cannot be read."""
    found = [_read_manifest(store, name) for name in list_names(store)]
    found += [_read_tracker(store / name) for name in TRACKERS]
    return max(filter(None, found), key=lambda newest: newest.step, default=None)


def _read_manifest(store: Path, name: str) -> Optional[Newest]:
    match = NAME.fullmatch(name)
    if match is None or match[3] == "removed":
        return None
    try:
        return Newest(int(match[1]), os.stat(store / name / MANIFEST).st_mtime)
    except OSError:
        return None


def _read_tracker(path: Path) -> Optional[Newest]:
    try:
        with path.open("rb") as handle:
            match = re.fullmatch(rb"(?:global_step)?(\d{1,18})", handle.read(100).strip())
            written = os.fstat(handle.fileno()).st_mtime
            return None if match is None else Newest(int(match[1]), written)
    except OSError:
        return None
