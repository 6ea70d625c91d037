"""The words of a verdict: how a job is, what says so, and what to do next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from vjob.jobs.monitor.model.snapshot import Line


class Health(Enum):
    """How a job is."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    HEALTHY = "HEALTHY"
    SLOW = "SLOW"
    STALLED = "STALLED"
    FAILING = "FAILING"
    CHECKPOINTING = "CHECKPOINTING"
    MORPHING = "MORPHING"
    REQUEUED = "REQUEUED"
    DONE = "DONE"
    DEAD = "DEAD"
    UNKNOWN = "UNKNOWN"


EXIT_CODES = {Health.DEAD: 10, Health.UNKNOWN: 11, Health.SLOW: 13, Health.STALLED: 14}
EXIT_CODES[Health.FAILING] = 15
NEVER_STARTS = 12
"""Exit code of a pending job that will not start by itself."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a job is, and why we say so."""

    health: Health
    reason: str
    """One sentence."""
    rule: str
    """Name of the rule that spoke, a heading of docs/status.md."""
    phase: str = ""
    """Of STARTING: container, rendezvous or warm-up."""
    evidence: tuple[Line, ...] = ()
    """Lines of logs that say so, the first the most telling."""
    facts: tuple[str, ...] = ()
    """Other evidence, in words with numbers."""
    advice: str = ""
    """What to do next."""
    node: str = ""
    rank: int | None = None
    remarks: tuple[str, ...] = ()
    """What else is worth a word and changes no verdict: a warm GPU, a full disk."""
    never_starts: bool = False

    @property
    def exit_code(self) -> int:
        return NEVER_STARTS if self.never_starts else EXIT_CODES.get(self.health, 0)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "health": self.health.value, "exit_code": self.exit_code}
