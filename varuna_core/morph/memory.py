"""Folder in a node's memory for copies of the training (records/memory_copies.py).

A lock says that its daemon lives. The next daemon on the node removes what nobody holds any more:
what killed daemons left, of all runs of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from pathlib import Path
from typing import Optional

from varuna_core.records.files import PRIVATE_FILE, PRIVATE_FOLDER, list_names

ROOT = Path("/dev/shm")
LOCK = ".lock"


class Home:
    """The folder of one node daemon; close it at the end."""

    def __init__(self, run: str, root: Path = ROOT) -> None:
        """Raises OSError where the memory's file system is missing, full, or somebody else's."""
        own = root / f"vjob-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(own, PRIVATE_FOLDER)
        stat = os.lstat(own)
        if (
            not own.is_dir()
            or own.is_symlink()
            or stat.st_uid != os.getuid()
            or stat.st_mode & 0o77
        ):
            raise PermissionError(f"{own} is not a folder of this user alone")
        sweep(own)
        self.path = own / f"{run}.{uuid.uuid4().hex}"
        lock = self.path.with_name(self.path.name + LOCK)
        # Whoever sweeps may hold a new lock for a moment.
        tries = (_hold(lock) for _ in range(100))
        self._lock = next((fd for fd in tries if fd is not None), None)
        if self._lock is None:
            raise OSError(errno.ENOLCK, "it cannot be locked", str(lock))
        os.mkdir(self.path, PRIVATE_FOLDER)

    def close(self) -> None:
        """Remove it with all that is in it; ranks have ended."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def sweep(own: Path) -> None:
    """Remove the folders that no daemon holds."""
    for name in list_names(own):
        if not name.endswith(LOCK):
            continue
        lock = _hold(own / name)
        if lock is not None:
            _remove(own / name[: -len(LOCK)])
            os.close(lock)


def _hold(path: Path) -> Optional[int]:
    """The lock of this file; None where another has it, or removed the file meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.with_name(folder.name + LOCK).unlink()
