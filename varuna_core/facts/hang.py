"""`Hang`: a training that no longer makes steps, with the rank that blocks it and the evidence.

Its sentence is rendered by `sentences.describe_hang`; code compares witnesses, never sentences.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Dict, Mapping, Optional, Tuple

from varuna_core.facts.cause import parse_word

HANG_VERSION = 1


class HangWitness(str, Enum):
    """Kind of observation that proves or suggests a hang. The values are stored in files."""

    STOPPED = "stopped"
    """A process is in the kernel's state T (stopped), and neither a tracer nor a terminal caused
    it."""
    DEAD = "dead"
    """A process has ended, and its parent has not reaped it."""
    MISMATCHED = "mismatched"
    """All ranks wait, but in different collectives with the same sequence number."""
    SILENT = "silent"
    """No rank is active: no processor time, no file, no line of output, and unchanged stacks."""
    SPINNING = "spinning"
    """One rank computes while all others wait for it, which also happens in a healthy run."""
    LOST = "lost"
    """The agent of one node sends no heartbeat, or its link to the others is broken, and all other
    ranks wait."""
    UNKNOWN = "unknown"


CERTAIN = frozenset((HangWitness.STOPPED, HangWitness.DEAD, HangWitness.MISMATCHED))
"""Witnesses after which no training continues by itself."""
OF_ONE_NODE = frozenset((HangWitness.STOPPED, HangWitness.DEAD, HangWitness.LOST))
"""Witnesses that blame one node: a run that may morph continues without the node."""

SAID_EARLY = CERTAIN | {HangWitness.LOST}
"""Witnesses that are reported before any action is taken."""


class HangAction(str, Enum):
    """The action that vjob took against a hang."""

    REPORT = "report"
    RESTART = "restart"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Hang:
    """A hang, as the agents observed it."""

    witness: HangWitness
    since: float
    """Time of the last progress, in seconds since 1970."""
    seen_at: float
    rank: Optional[int] = None
    """The rank that differs from the others; None if no rank does."""
    node: str = ""
    nodes: int = 0
    """Number of nodes that hung."""
    collective: str = ""
    """The collective that some ranks called and the others did not, such as `all_reduce 5`."""
    group: str = ""
    called_by: Tuple[int, ...] = ()
    missing: Tuple[int, ...] = ()
    other: str = ""
    """The collective that the missing ranks called instead, if known."""
    place: str = ""
    """Innermost frame of `rank`: `sleep (train.py:33)`."""
    last_call: str = ""
    """The last collective that all ranks called, if they called the same; for a mute rank, the
    collective in which the others wait."""
    is_mute: bool = False
    """True if the Python of `rank` does not run although its process exists."""
    below: int = 0
    """The stopped process below `rank`; 0 if it is the rank's own process."""
    action: HangAction = HangAction.REPORT
    acts_at: Optional[float] = None
    """Time at which the action will be taken, while the hang is only suspected."""
    until: Optional[float] = None
    """Time at which the steps continued, or at which the ranks were ended."""
    version: int = HANG_VERSION

    def as_json(self) -> Dict[str, Any]:
        return asdict(self)


def parse_hang(value: Any) -> Optional[Hang]:
    """Parse a `Hang` from JSON; None if it is missing, damaged or of a later version."""
    if not isinstance(value, Mapping) or value.get("version") != HANG_VERSION:
        return None
    try:
        words: dict[str, Any] = {name: str(value.get(name, "")) for name in _WORDS}
        rank = value.get("rank")
        return Hang(
            witness=parse_word(HangWitness, value.get("witness"), HangWitness.UNKNOWN),
            since=float(value["since"]),
            seen_at=float(value["seen_at"]),
            rank=None if rank is None else int(rank),
            nodes=int(value.get("nodes", 0)),
            is_mute=value.get("is_mute") is True,
            below=int(value.get("below", 0)),
            called_by=tuple(map(int, value.get("called_by", ()))),
            missing=tuple(map(int, value.get("missing", ()))),
            action=parse_word(HangAction, value.get("action"), HangAction.REPORT),
            until=None if value.get("until") is None else float(value["until"]),
            acts_at=None if value.get("acts_at") is None else float(value["acts_at"]),
            **words,
        )
    except (KeyError, TypeError, ValueError):
        return None


_WORDS = ("node", "collective", "group", "other", "place", "last_call")
