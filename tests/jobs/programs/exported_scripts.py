"""Runs exported scripts as users do by hand, all on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

DEADLINE_S = 200


def run_scripts(scripts: Sequence[Path], env: Mapping[str, str]) -> list[str]:
    """Run the scripts side by side; return the output of each."""
    started = [
        subprocess.Popen([path], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for path in scripts
    ]
    try:
        return [process.communicate(timeout=DEADLINE_S)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()


def find_free_port() -> int:
    """Find a free port outside the ephemeral range; parallel tests start at different ports."""
    for port in range(28100 + os.getpid() % 400, 28900):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port up to 28900")
