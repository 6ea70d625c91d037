"""Bells: counters (Linux's eventfd) by which a process or thread wakes another one that sleeps."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence


class Bell:
    """A counter that one side increments and the other reads. Data written before a ring is visible
    to a reader of that ring."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @staticmethod
    def make() -> Bell:
        return Bell(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def hear(self) -> int:
        """Return how often the bell has rung since the last call."""
        try:
            return os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        self.close()


def sleep_until(
    is_so: Callable[[], bool], descriptors: Sequence[int], limit_s: float | None
) -> bool:
    """Wait until `is_so()`, testing it when a descriptor is readable; return False on timeout."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while not is_so():
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            return False
        poll.poll(None if left_s is None else left_s * 1000)
    return True
