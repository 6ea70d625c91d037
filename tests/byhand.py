"""Exported scripts, started as people do by hand: one on each machine, which is always this one."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

DEADLINE_S = 200


def start_all(scripts: Sequence[Path], env: Mapping[str, str]) -> list[str]:
    """What each of them said; they run side by side."""
    started = [
        subprocess.Popen([path], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for path in scripts
    ]
    try:
        return [process.communicate(timeout=DEADLINE_S)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()


def find_port() -> int:
    """Free now, and outside the range that outgoing connections take theirs from.

    Tests side by side begin to look at different places.
    """
    for port in range(28100 + os.getpid() % 400, 28900):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port up to 28900")
