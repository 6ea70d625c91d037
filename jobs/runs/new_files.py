"""Find files that ranks wrote into the copy of their code, where the next run will not see them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path

from varuna_core.records.files import read_json, scan
from varuna_core.records.runfolder import RunFolder
from vjob.jobs.monitor.model.snapshot import NewFiles

MOST_ENTRIES = 20_000
"""The most entries of the copy that are examined; a submit copies fewer by default."""
CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))
"""Folders that Python and its tools create beside any code."""


def find_new_files(run: RunFolder) -> NewFiles | None:
    """Return files in the copy that are not in its list, largest first; None if there are none."""
    listed = read_json(run.code_files)
    if not isinstance(listed, dict) or not isinstance(listed.get("files"), list):
        return None
    sizes = dict(_walk(run.code, {str(name) for name in listed["files"]}))
    if not sizes:
        return None
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return NewFiles(folder=str(run.code), names=tuple(names[:8]), num_files=len(names))


def _walk(root: Path, known: Set[str]) -> Iterator[tuple[str, int]]:
    """Yield name and size of each unknown plain file, without following links."""
    folders, num_seen = [""], 0
    while folders:
        folder = folders.pop()
        for entry in scan(root / folder):
            num_seen += 1
            if num_seen > MOST_ENTRIES:
                return
            name = os.path.join(folder, entry.name)
            if entry.is_dir(follow_symlinks=False):
                folders += [] if entry.name in CACHES else [name]
            elif entry.is_file(follow_symlinks=False) and name not in known:
                yield name, entry.stat(follow_symlinks=False).st_size
