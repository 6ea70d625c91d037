"""What changed in a folder of small files that land whole: one look at the folder, then at those.

Such a file lands by a rename, which changes its folder's own time; a folder with the same time as
at the last two looks holds nothing new. Opening it first makes NFS ask its server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 4 * 1024 * 1024
"""Of one file; none of ours is near it."""


class JsonFolder:
    """The parsed files of a folder, by name without `.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, dict[str, Any]] = {}
        self.times: dict[str, float] = {}
        """When each file was written."""
        self._marks: dict[str, tuple[int, int, int]] = {}
        self._seen: tuple[int, int] | None = None
        self._is_settled = False
        """Whether a look found nothing new since: two renames may share one tick of the clock."""

    def look(self) -> list[str]:
        """Names whose content is new."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            found = os.fstat(fd)
            mark = (found.st_ino, found.st_mtime_ns)
            if mark == self._seen and self._is_settled:
                return []
            changed = list(self._read_changed(fd))
            self._is_settled = mark == self._seen and not changed
            self._seen = mark
            return changed
        except OSError:
            return []
        finally:
            os.close(fd)

    def _read_changed(self, fd: int) -> Iterator[str]:
        names = os.listdir(fd)
        for stem in self._marks.keys() - {name[:-5] for name in names}:
            for held in (self.values, self.times, self._marks):
                held.pop(stem, None)
        for name in names:
            stem = name[:-5]
            if not name.endswith(".json") or name.startswith("."):
                continue
            seen = self._marks.get(stem)
            try:
                if seen is not None and seen == _mark(os.stat(name, dir_fd=fd)):
                    continue
                data, found = _read(name, fd)
                value = json.loads(data)
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                self._marks[stem] = _mark(found)
                self.values[stem], self.times[stem] = value, found.st_mtime
                yield stem


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(name: str, folder: int) -> tuple[bytes, os.stat_result]:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    try:
        found = os.fstat(fd)
        return os.read(fd, min(found.st_size, MOST_BYTES)), found
    finally:
        os.close(fd)
