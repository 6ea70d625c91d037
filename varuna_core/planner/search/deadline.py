"""Limit the time to answer; the deadline is passed to all parts of a search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A time on a given clock, and the time at which the interval began."""

    clock: Callable[[], float]
    began: float
    until: float

    @property
    def took_s(self) -> float:
        return self.clock() - self.began

    @property
    def left_s(self) -> float:
        return self.until - self.clock()

    def is_over(self, needed_s: float = 0.0) -> bool:
        """Return True if less than `needed_s` seconds are left."""
        return self.clock() + needed_s > self.until

    def part(self, share: float) -> Deadline:
        """Return the end of the first `share` of the interval, which may already have passed."""
        return replace(self, until=self.began + share * (self.until - self.began))

    def rest(self, share: float = 1.0) -> Deadline:
        """Return a deadline after a share of the time that is left."""
        now = self.clock()
        return replace(self, began=now, until=now + share * (self.until - now))


def within(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
    """Return a deadline `limit_s` seconds from now."""
    now = clock()
    return Deadline(clock=clock, began=now, until=now + limit_s)
