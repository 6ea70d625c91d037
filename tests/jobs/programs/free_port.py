"""A port for the ranks of a test that names its own."""

from __future__ import annotations

import contextlib
import os
import socket


def find_free_port() -> int:
    """Find a free port outside the ephemeral range; parallel tests start at different ports."""
    for port in range(28100 + os.getpid() % 400, 28900):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port up to 28900")
