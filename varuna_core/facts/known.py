"""Values with their evidence, or the reason why they are not known.

A figure that was derived from one line of four hundred says so in `Evidence.seen` and `expected`.
Nothing is concluded from a `NotKnown`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Dict, Generic, Optional, Tuple, TypeVar, Union

T = TypeVar("T")


class Sure(str, Enum):
    """How reliable a piece of evidence is."""

    MEASURED = "measured"
    """Measured by vjob itself with a clock, a counter or an exit code."""
    REPORTED = "reported"
    """Reported by the scheduler, the kernel, a driver or the program."""
    INFERRED = "inferred"
    """Concluded from other facts, such as the absence of a file."""
    ESTIMATED = "estimated"
    """Computed by a model, such as a plan's predicted step time."""


@dataclass(frozen=True)
class Evidence:
    """One source for a value or a cause, and how much of the whole it covers."""

    source: str
    """The source: `sacct`, `exit file`, `rank stderr`, `trace`, `pynvml`, `legacy`."""
    sure: Sure = Sure.REPORTED
    file: str = ""
    line: int = 0
    """Line number in `file`, from 1; 0 if it is not known."""
    text: str = ""
    """The text of the line, the scheduler's word, or what a figure was computed from."""
    seen: int = 0
    """Number of items that were read, such as steps or GPUs."""
    expected: Optional[int] = None
    """Number of items that exist; None if that is not known."""
    since: Optional[float] = None
    until: Optional[float] = None


@dataclass(frozen=True)
class Value(Generic[T]):
    """A known value and its evidence."""

    value: T
    evidence: Tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class NotKnown:
    """The reason why a value is not known."""

    reason: str
    evidence: Tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Within(Generic[T]):
    """Bounds of a value: what is proved, and what cannot be excluded."""

    low: T
    high: T
    evidence: Tuple[Evidence, ...] = ()


Known = Union[Value[T], NotKnown]
Bounded = Union[Value[T], Within[T], NotKnown]


def value_of(known: Bounded[T]) -> Optional[T]:
    """Return the value; None if it is not known, or known only within bounds."""
    return known.value if isinstance(known, Value) else None


def as_json(known: Bounded[Any]) -> Dict[str, Any]:
    """Return `{"value", "evidence"}`, `{"low", "high", "evidence"}` or, with the reason,
    `{"not_known", "evidence"}`."""
    evidence = [asdict(one) for one in known.evidence]
    if isinstance(known, NotKnown):
        return {"not_known": known.reason, "evidence": evidence}
    if isinstance(known, Within):
        return {"low": known.low, "high": known.high, "evidence": evidence}
    return {"value": known.value, "evidence": evidence}
