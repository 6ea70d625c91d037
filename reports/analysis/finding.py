"""One sentence of the report, and how its numbers are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence of the report."""

    weight: float
    """The part of the time that it is about; 1 and more for what must be read first."""
    sentence: str
    evidence: str
    """Where the number comes from."""
    key: str
    """The conf key to change; empty where no key helps."""


def percent(share: float) -> str:
    return f"{100 * share:.3g} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def in_units(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
