"""The time that an answer may take, handed down to all that works on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A moment by one clock, and when the time until it began."""

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
        """Less than `needed_s` seconds are left."""
        return self.clock() + needed_s > self.until

    def part(self, share: float) -> Deadline:
        """The first part of this time, whatever of it has passed."""
        return replace(self, until=self.began + share * (self.until - self.began))

    def rest(self, share: float = 1.0) -> Deadline:
        """A share of what is left from now on."""
        now = self.clock()
        return replace(self, began=now, until=now + share * (self.until - now))


def within(limit_s: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
    """The time from now on."""
    now = clock()
    return Deadline(clock=clock, began=now, until=now + limit_s)
