"""A small disk that a test fills and empties; mounting it needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mount_small(folder: Path, size: str = "4m") -> Iterator[Path]:
    """Mount a file system of this size there; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """Keep its disk full inside the block; yields the file that fills it."""
    filler = folder / ".filler"
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as handle:
        size = 1 << 16
        while size:
            try:
                handle.write(bytes(size))
            except OSError:
                size //= 2
    try:
        yield filler
    finally:
        filler.unlink(missing_ok=True)
