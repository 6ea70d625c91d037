"""One at a time, by a lock on a file that the kernel drops with its holder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from varuna_core.records.files import PRIVATE_FILE


@contextmanager
def hold_file(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Whether the lock is ours; with `waits` it is once this returns. On a file system without
    locks everybody gets it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(fd)
