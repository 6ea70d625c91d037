"""`Hang`: a training that no longer makes steps, with the rank that holds it up and the witness.

Its sentence is rendered by `sentences.describe_hang`; code compares witnesses, never sentences.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Dict, Mapping, Optional, Tuple

HANG_VERSION = 1


class HangWitness(str, Enum):
    """The observation that shows a hang. The values stand in files."""

    STOPPED = "stopped"
    """The kernel's state T, without a tracer and without a terminal that could have done it."""
    DEAD = "dead"
    """The process has ended, and nobody has reaped it."""
    MISMATCHED = "mismatched"
    """All ranks wait, and called different collectives under the same number."""
    SILENT = "silent"
    """No rank does anything: no processor time, no file, no line, the same stacks throughout."""
    SPINNING = "spinning"
    """One rank computes while all others wait for it, which healthy ranks do too."""
    LOST = "lost"
    """The agent of one node gives no sign of life, or its link to the others is cut, and all other
    ranks wait."""
    UNKNOWN = "unknown"


CERTAIN = frozenset((HangWitness.STOPPED, HangWitness.DEAD, HangWitness.MISMATCHED))
"""Witnesses after which no training goes on by itself."""
OF_ONE_NODE = frozenset((HangWitness.STOPPED, HangWitness.DEAD, HangWitness.LOST))
"""Witnesses that blame one node: a run that morphs goes on without it."""

SAID_EARLY = CERTAIN | {HangWitness.LOST}
"""Witnesses that are told before anything is done."""


class HangAction(str, Enum):
    """The action that vjob took against a hang."""

    REPORT = "report"
    RESTART = "restart"
    REQUEUE = "requeue"
    STOP = "stop"


@dataclass(frozen=True)
class Hang:
    """A hang, as the agents saw it."""

    witness: HangWitness
    since: float
    """Time of the last progress, in seconds since 1970."""
    seen_at: float
    rank: Optional[int] = None
    """The odd rank; None where no rank is."""
    node: str = ""
    nodes: int = 0
    """Number of nodes that stood."""
    collective: str = ""
    """The collective that some ranks called and the others did not, such as `all_reduce 5`."""
    group: str = ""
    called_by: Tuple[int, ...] = ()
    missing: Tuple[int, ...] = ()
    other: str = ""
    """The collective that the missing ranks called in its place, if that is known."""
    place: str = ""
    """Innermost frame of the odd rank: `sleep (train.py:33)`."""
    last_call: str = ""
    """The last collective that all ranks called, where they called the same; of a mute rank, the
    one in which the others wait."""
    is_mute: bool = False
    """Python of the odd rank does not run, though its process does."""
    below: int = 0
    """The process below the odd rank that is stopped; 0 where it is the rank's own."""
    action: HangAction = HangAction.REPORT
    acts_at: Optional[float] = None
    """Time at which the action is taken, where it is only suspected so far."""
    until: Optional[float] = None
    """Time at which the steps went on, or the ranks were ended."""
    version: int = HANG_VERSION

    def as_json(self) -> Dict[str, Any]:
        return asdict(self)


def parse_hang(value: Any) -> Optional[Hang]:
    """A `Hang` from JSON; None where it is missing, damaged or of a later version."""
    if not isinstance(value, Mapping) or value.get("version") != HANG_VERSION:
        return None
    try:
        words: dict[str, Any] = {name: str(value.get(name, "")) for name in _WORDS}
        rank = value.get("rank")
        return Hang(
            witness=_parse(HangWitness, value.get("witness"), HangWitness.UNKNOWN),
            since=float(value["since"]),
            seen_at=float(value["seen_at"]),
            rank=None if rank is None else int(rank),
            nodes=int(value.get("nodes", 0)),
            is_mute=value.get("is_mute") is True,
            below=int(value.get("below", 0)),
            called_by=tuple(map(int, value.get("called_by", ()))),
            missing=tuple(map(int, value.get("missing", ()))),
            action=_parse(HangAction, value.get("action"), HangAction.REPORT),
            until=None if value.get("until") is None else float(value["until"]),
            acts_at=None if value.get("acts_at") is None else float(value["acts_at"]),
            **words,
        )
    except (KeyError, TypeError, ValueError):
        return None


_WORDS = ("node", "collective", "group", "other", "place", "last_call")


def _parse(kind: Any, word: Any, default: Any) -> Any:
    try:
        return kind(word)
    except ValueError:
        return default
