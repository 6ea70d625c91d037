"""File systems of a run: free space, and the offset of the file server's clock from this machine's.

Ages are differences of file times. A file that changed between two polls was written between them,
so its time bounds the clocks' offset; touching a file of our own measures the offset at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from vjob.jobs.monitor.model.snapshot import Disk

STALE_S = 60.0
"""Seconds for which an NFS client may show an older state of a file."""
WORTH_S = 5.0
"""Least offset in seconds that is shown."""


class Skew:
    """Estimate of the file server's clock minus ours, narrowed by each observation."""

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf
        self._last_look: float | None = None

    def note_probe(self, offset_s: float) -> None:
        """Record the offset measured by a file that we have just written."""
        self._least = self._most = offset_s

    def note(self, newest: float | None, now: float) -> None:
        """Record a poll at `now`, by our clock, and the newest time of a file that had changed."""
        if newest is not None and self._least < self._most:
            self._least = min(max(self._least, newest - now), self._most)
            if self._last_look is not None:
                most = newest - self._last_look + STALE_S
                self._most = max(min(self._most, most), self._least)
        self._last_look = now

    @property
    def offset_s(self) -> float:
        return min(max(0.0, self._least), self._most)

    @property
    def worth_saying(self) -> float | None:
        return round(self.offset_s, 1) if abs(self.offset_s) >= WORTH_S else None


def probe(folder: Path) -> float | None:
    """Measure the offset by writing a file; return None if the folder is not writable."""
    path = folder / f".clock.{os.uname().nodename}.{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        return None
    try:
        before = time.time()
        os.utime(path)  # an NFS server takes its own time here
        after = time.time()
        return os.stat(path).st_mtime - (before + after) / 2
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_disks(folders: Mapping[str, Path]) -> tuple[Disk, ...]:
    """Read the free space of folders, keyed by what is written there; for a missing folder that of
    its nearest existing parent."""
    found = []
    for what, folder in folders.items():
        for place in (folder, *folder.parents):
            try:
                facts = os.statvfs(place)
            except FileNotFoundError:
                continue
            except OSError:
                break
            found.append(
                Disk(
                    path=str(folder),
                    what=what,
                    free_bytes=facts.f_bavail * facts.f_frsize,
                    total_bytes=facts.f_blocks * facts.f_frsize,
                    # Some file systems make inodes as they go, and count none.
                    free_inodes=facts.f_favail if facts.f_files else None,
                    total_inodes=facts.f_files or None,
                )
            )
            break
    return tuple(found)
