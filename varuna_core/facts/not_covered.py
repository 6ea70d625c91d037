"""Parts of a plan that its profile does not cover, and the possible error of a prediction for each.

A factor is the measured time divided by the derived time: bounds that hold in nine of ten cases,
taken from the benchmark that the evidence names, or the reason why there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, Optional, Tuple

from varuna_core.facts.known import Bounded, Evidence, NotKnown, Sure, Within, as_json


class Lack(str, Enum):
    """The kind of a part of a plan that its profile does not cover: the part was not measured, or
    its estimate was never compared with a measured time."""

    SIZE = "size"
    """Micro-batches whose size differs from the measured sizes."""
    ESTIMATE = "estimate"
    """Times of a GPU that were estimated from data sheets."""
    LINK = "link"
    SUM = "sum"
    """An all-reduce over replicas that was estimated from rings over links, not measured in such a
    group."""
    MEMORY = "memory"
    """A GPU that is named without the size of its memory."""
    MODEL = "model"
    """The model and sequence length of a user's script, which only the script knows."""
    SOFTWARE = "software"


@dataclass(frozen=True)
class NotCovered:
    """One part of a plan that its profile does not cover."""

    lack: Lack
    subject: str
    """The GPU, the two GPUs of a link, or the group of ranks that is concerned."""
    factor: Bounded[float]
    wanted: Optional[int] = None
    measured: Tuple[int, ...] = ()
    """The profile's sizes if `lack` is SIZE; `wanted` then has the plan's sizes."""

    def as_json(self) -> Dict[str, Any]:
        return {
            "lack": self.lack.value,
            "subject": self.subject,
            "factor": as_json(self.factor),
            "wanted": self.wanted,
            "measured": list(self.measured),
        }


def read_not_covered(value: Any) -> NotCovered | None:
    """Parse the output of `as_json`; None for anything else."""
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
    """Return a sentence without its full stop: what was not measured, and how large the error of
    such times was."""
    sizes = ", ".join(map(str, one.measured))
    said = {
        Lack.SIZE: f"micro-batch {one.wanted} was not measured on {one.subject}, only {sizes}",
        Lack.ESTIMATE: f"times of {one.subject} are from data sheets",
        Lack.LINK: f"the link between {one.subject} was not measured",
        Lack.SUM: f"no all-reduce over {one.subject} was measured",
        Lack.MEMORY: f"{one.subject}, which may have another amount of memory",
        Lack.MODEL: f"{one.subject}, whose model and sequence length are not compared",
        Lack.SOFTWARE: f"the versions of {one.subject} could not be compared",
    }[one.lack]
    if isinstance(one.factor, Within):
        return f"{said}: the true time is {one.factor.low:g} to {one.factor.high:g} times as long"
    return f"{said}: {one.factor.reason}" if isinstance(one.factor, NotKnown) else said
