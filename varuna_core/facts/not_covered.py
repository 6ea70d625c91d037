"""Parts of a plan that its profile does not cover, and how far a prediction may be off for each.

A factor is the measured time over the one that was derived instead: bounds that hold in nine of ten
cases, from the benchmark that its evidence names, or the reason why there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, Optional, Tuple

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Sure, Within, as_json


class Lack(str, Enum):
    """Kinds of parts that were not measured, or not compared."""

    SIZE = "size"
    """Micro-batches of another size than those that were measured."""
    ESTIMATE = "estimate"
    """Times of a GPU from data sheets."""
    LINK = "link"
    SUM = "sum"
    """A sum over replicas, by rings over links instead of a group like theirs."""
    MEMORY = "memory"
    """A GPU named without its size."""
    MODEL = "model"
    """A script's own model and sequence length, which nobody but the script knows."""
    SOFTWARE = "software"


@dataclass(frozen=True)
class NotCovered:
    """One part of a plan that its profile does not cover."""

    lack: Lack
    subject: str
    """The GPU, the two GPUs of a link, or the group of ranks that it concerns."""
    factor: Bounded[float]
    wanted: Optional[int] = None
    measured: Tuple[int, ...] = ()
    """The profile's sizes, where the lack is one of sizes; `wanted` is then the plan's."""

    def as_json(self) -> Dict[str, Any]:
        return {
            "lack": self.lack.value,
            "subject": self.subject,
            "factor": as_json(self.factor),
            "wanted": self.wanted,
            "measured": list(self.measured),
        }


def read_not_covered(value: Any) -> NotCovered | None:
    """Read what `as_json` wrote; None for anything else."""
    try:
        factor = value["factor"]
        evidence = tuple(
            Evidence(**{**one, "sure": Sure(one["sure"])}) for one in factor["evidence"]
        )
        bounds: Bounded[float]
        if "not_known" in factor:
            bounds = NotKnown(str(factor["not_known"]), evidence)
        else:
            bounds = Within(float(factor["low"]), float(factor["high"]), evidence)
        return NotCovered(
            lack=Lack(value["lack"]),
            subject=str(value["subject"]),
            factor=bounds,
            wanted=value["wanted"],
            measured=tuple(value["measured"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def describe_lack(one: NotCovered) -> str:
    """A sentence without its end: what was not measured, and how far such times were off."""
    sizes = ", ".join(map(str, one.measured))
    said = {
        Lack.SIZE: f"micro-batch {one.wanted} was not measured on {one.subject}, only {sizes}",
        Lack.ESTIMATE: f"times of {one.subject} are from data sheets",
        Lack.LINK: f"the link between {one.subject} was not measured",
        Lack.SUM: f"no sum over {one.subject} was measured",
        Lack.MEMORY: f"{one.subject}, which may have another amount of memory",
        Lack.MODEL: f"{one.subject}, whose model and sequence length are not compared",
        Lack.SOFTWARE: f"versions of {one.subject} are not compared",
    }[one.lack]
    if isinstance(one.factor, Within):
        return f"{said}: it takes {one.factor.low:g} to {one.factor.high:g} times as long"
    return f"{said}: {one.factor.reason}" if isinstance(one.factor, NotKnown) else said
