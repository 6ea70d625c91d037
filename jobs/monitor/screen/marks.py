"""Bars, sparklines and signs, in Unicode or, where the terminal may not have it, in ASCII."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from varuna_core.records.logs.tail import clean

COERCED = "C.UTF-8"
"""What Python itself puts into LC_CTYPE where the locale is C (PEP 538)."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The signs of one kind of terminal."""

    is_unicode: bool
    levels: str
    """From low to high, for sparklines."""
    full: str
    empty: str
    culprit: str
    here: str
    """The row of the cursor."""
    advice: str
    up: str
    down: str
    dash: str
    degree: str
    cut: str
    """In place of what does not fit."""

    def plain(self, text: str) -> str:
        """Text of a log as this terminal shows it: nothing that could steer it, on one line."""
        text = clean(text.expandtabs(4).replace("\n", " "))
        return text if self.is_unicode else text.encode("ascii", "replace").decode()

    def bar(self, percent: float, width: int) -> str:
        """`percent` of `width` cells."""
        filled = round(min(max(percent, 0.0), 100.0) / 100 * width)
        return self.full * filled + self.empty * (width - filled)

    def spark(self, values: Sequence[float | None], width: int, *, top: float | None = None) -> str:
        """The last values, one a cell, between their least and their most.

        With `top` from 0 to it. What is no number is a gap.
        """
        shown = list(values)[-width:] if width > 0 else []
        known = [value for value in shown if value is not None and math.isfinite(value)]
        low = 0.0 if top is not None else min(known, default=0.0)
        high = top if top is not None else max(known, default=0.0)
        return "".join(self._level(value, low, high) for value in shown)

    def curve(self, values: Sequence[float | None], width: int, *, flat: float = 0.0) -> str:
        """All of the values in `width` cells: means of neighbours where they are more.

        Values that differ by less than a share of `flat` make a level line, not one that jumps.
        """
        shown = list(values)
        if 0 < width < len(shown):
            edges = [number * len(values) // width for number in range(width + 1)]
            shown = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
        known = [value for value in shown if value is not None and math.isfinite(value)]
        if known and max(known) - min(known) < flat * max(map(abs, known)):
            shown = [None if value is None else known[0] for value in shown]
        return self.spark(shown, width)

    def _level(self, value: float | None, low: float, high: float) -> str:
        if value is None or not math.isfinite(value):
            return " "
        last = len(self.levels) - 1
        share = (value - low) / (high - low) if high > low else 0.0
        return self.levels[round(min(max(share, 0.0), 1.0) * last)]

    def fit(self, text: str, width: int) -> str:
        """At most `width` characters, with a sign where it was cut."""
        if len(text) <= width:
            return text
        return text[: width - len(self.cut)] + self.cut if width > len(self.cut) else text[:width]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


UNICODE = Marks(
    is_unicode=True,
    levels="▁▂▃▄▅▆▇█",
    full="■",
    empty="·",
    culprit="●",
    here="›",  # noqa: RUF001 - an arrow, not a greater-than sign
    advice="→",
    up="▲",
    down="▼",
    dash="–",  # noqa: RUF001 - says that nothing is known
    degree="°",
    cut="…",
)
ASCII = Marks(
    is_unicode=False,
    levels="_.-=+*#",
    full="#",
    empty=".",
    culprit="!",
    here=">",
    advice="->",
    up="^",
    down="v",
    dash="-",
    degree="C",
    cut="~",
)


def choose_marks(environ: Mapping[str, str]) -> Marks:
    """ASCII unless the locale says UTF-8; Python's own word for it counts for nothing."""
    ctype = environ.get("LC_CTYPE", "")
    lang = environ.get("LANG", "")
    if ctype == COERCED and lang in ("", "C", "POSIX"):
        ctype = ""
    locale = environ.get("LC_ALL") or ctype or lang
    return UNICODE if "utf8" in locale.lower().replace("-", "") else ASCII
