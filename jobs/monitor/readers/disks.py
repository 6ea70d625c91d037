"""The file systems that a run writes to, looked at now and then, and never waited for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vjob.jobs.monitor.model.snapshot import Disk


def look_at_disks(folders: Mapping[str, Path]) -> tuple[Disk, ...]:
    """By what is written there; a folder that is still to be made counts as its parent."""
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
