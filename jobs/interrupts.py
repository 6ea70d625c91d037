"""Defer Ctrl-C during actions that must not be left half done: `defer_interrupts`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended; in nested blocks, until the outermost has."""
    seen: list[int] = []
    try:
        old = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    except ValueError:  # not the main thread, which alone gets Ctrl-C
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
    if seen:
        signal.raise_signal(signal.SIGINT)
