"""Parse times and sizes as people write them: `90`, `2h`, `1d12h`, `1:30:00`; `64`, `64G`, `1T`.

A bare number counts in the unit of its key or option. Two numbers with a colon are refused: Slurm
reads `12:30` as minutes, people as hours. The result is exact; a key for whole numbers refuses
fractions instead of rounding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Literal

_NUMBER = re.compile(r"\d{1,12}(\.\d{1,20})?(?:[eE][+-]?\d{1,2})?")
_CLOCK = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]?\d):([0-5]?\d)")
_TIME = re.compile(
    r"(?:(\d{1,9}(?:\.\d{1,20})?) ?d ?)?(?:(\d{1,9}(?:\.\d{1,20})?) ?h ?)?"
    r"(?:(\d{1,9}(?:\.\d{1,20})?) ?m(?:in)? ?)?(?:(\d{1,12}(?:\.\d{1,20})?) ?s)?"
)
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,20})?) ?([KMGT])(?:i?B)?", re.IGNORECASE)
_DAYTIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?")
_SHORT_CLOCK = re.compile(r"(\d+):(\d\d)")
_SECONDS = (86400, 3600, 60, 1)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Unit:
    """Unit of a number, in the annotation of its key: `Annotated[int, MINUTES]`."""

    name: str
    kind: Literal["time", "memory"]
    size: int
    """Size of the unit in seconds or bytes."""

    @property
    def forms(self) -> str:
        """Description of the forms in which a value may be written."""
        if self.kind == "memory":
            return f"a whole number of {self.name}, or a size such as 512M, 64G or 1T"
        return f"a whole number of {self.name}, or a time such as 90s, 30m, 2h, 1d12h or 1:30:00"


SECONDS = Unit("seconds", "time", 1)
MINUTES = Unit("minutes", "time", 60)
HOURS = Unit("hours", "time", 3600)
DAYS = Unit("days", "time", 86400)
GIB = Unit("GiB", "memory", 1 << 30)
MIB = Unit("MiB", "memory", 1 << 20)


def parse_quantity(text: str, unit: Unit) -> Fraction | None:
    """Return the value in this unit; None for a text that is no quantity."""
    text = text.strip()
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    base = parse_duration(text) if unit.kind == "time" else parse_size(text)
    return None if base is None else base / unit.size


def parse_duration(text: str) -> Fraction | None:
    """Return the seconds of `1d12h`, `1:30:00` or Slurm's `1-12:00:00`; None for another text."""
    clock = _CLOCK.fullmatch(text)
    if clock:
        return Fraction(sum(int(n or 0) * s for n, s in zip(clock.groups(), _SECONDS, strict=True)))
    words = _TIME.fullmatch(text)
    if not text or not words:
        return None
    return sum(
        (Fraction(n or 0) * s for n, s in zip(words.groups(), _SECONDS, strict=True)), Fraction(0)
    )


def parse_size(text: str) -> Fraction | None:
    """Return the bytes of `64G`, `64GB` or `64GiB`, which all mean the same, as for Slurm."""
    found = _SIZE.fullmatch(text)
    return None if found is None else Fraction(found[1]) * 1024 ** _POWERS[found[2].upper()]


def parse_moment(text: str, now: datetime) -> datetime | None:
    """Parse `14:30` (the last time it was), a date with or without time, or `2h` (that long ago).

    Return None for other text, such as a bare number, which could be a time or an age.
    """
    text = text.strip()
    clock = _DAYTIME.fullmatch(text)
    if clock:
        hour, minute, second = (int(part or 0) for part in clock.groups())
        if hour > 23:
            return None
        then = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return then if then <= now else then - timedelta(days=1)
    age = parse_duration(text) if ":" not in text else None
    if age is not None:
        return now - timedelta(seconds=float(age)) if age < 10**10 else None
    try:
        found = datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" if "Z" in text else ""))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=now.tzinfo)


def explain_refusal(text: str, unit: Unit) -> str:
    """Explain why a text is not a whole number in this unit."""
    short = _SHORT_CLOCK.fullmatch(text.strip()) if unit.kind == "time" else None
    if short:
        first, second = short.groups()
        return f"could be hours or minutes: write {text.strip()}:00, or {int(first)}m{int(second)}s"
    value = parse_quantity(text, unit)
    if value is not None and value.denominator != 1:
        return f"must be a whole number of {unit.name}"
    return f"must be {unit.forms}"
