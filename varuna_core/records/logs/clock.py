"""How far apart two clocks are, from messages there and back, as NTP reckons.

own clock        asked ──┐                   ┌─► answered
rank 0's clock           └─► heard ─ replied ┘

Pure: who sends what is the runtime's affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional


@dataclass(frozen=True)
class Exchange:
    """One question and its answer, in nanoseconds of `TraceWriter.read_clock`."""

    asked: int
    """Own clock, before the question was sent."""
    heard: int
    """Rank 0's clock, when it had the question."""
    replied: int
    """Rank 0's clock, before the answer was sent."""
    answered: int
    """Own clock, when the answer was there."""


@dataclass(frozen=True)
class Offset:
    """What to add to the own clock to get rank 0's; right to within the residual."""

    offset_ns: int
    residual_ns: int


def find_offset(exchange: Exchange) -> Offset:
    """The offset of one exchange; the residual is half of the time that messages were under way."""
    there = exchange.heard - exchange.asked
    back = exchange.replied - exchange.answered
    return Offset((there + back) // 2, max(0, (there - back + 1) // 2))


def choose_offset(exchanges: Iterable[Exchange]) -> Optional[Offset]:
    """That of the quickest exchange, which knows best; None where there is none."""
    return min(map(find_offset, exchanges), key=lambda found: found.residual_ns, default=None)
