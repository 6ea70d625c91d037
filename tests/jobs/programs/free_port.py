"""A port for the ranks of a test that names its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque

PORTS = range(28100, 28900)
"""Outside the ephemeral range."""
_claims: deque[socket.socket] = deque(maxlen=100)


def find_free_port() -> int:
    """Find a port on which nothing listens, and that no other process of tests has found lately.

    The ranks listen on it some time after this looked. Until then the same number is claimed for
    UDP, which torch does not use.
    """
    for place in range(len(PORTS)):
        port = PORTS[(os.getpid() + place) % len(PORTS)]
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as tried, contextlib.suppress(OSError):
            claim.bind(("127.0.0.1", port))
            tried.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
    raise AssertionError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")
