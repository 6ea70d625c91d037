"""Python interpreters installed on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

OLDEST, NEWEST = (3, 8), (3, 14)
"""The oldest version that the agent supports; the newest that is tested."""


@cache
def list_pythons() -> dict[tuple[int, int], str]:
    """List one interpreter of each version: the running one, pyenv's, those on PATH."""
    found = {sys.version_info[:2]: sys.executable}
    for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")):
        major, minor, *_ = path.parts[-3].split(".")  # by the folder's name: a start takes a while
        if minor.isdigit() and OLDEST <= (int(major), int(minor)) <= NEWEST:
            found.setdefault((int(major), int(minor)), str(path))
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        name = f"python3.{minor}"
        if (3, minor) not in found and _ask_version(name) == (3, minor):
            found[3, minor] = name
    return found


def _ask_version(python: str) -> tuple[int, int] | None:
    """Ask an interpreter's version; None if it is missing or a shim of a missing version."""
    try:
        done = subprocess.run(
            [python, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.match(r"Python (\d+)\.(\d+)", done.stdout) if done.returncode == 0 else None
    return (int(said[1]), int(said[2])) if said else None
