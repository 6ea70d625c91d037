"""Define the look of the screen: colours, and signs and bars in Unicode or ASCII.

Every colour has a word or sign beside it with the same meaning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.color import Color
from rich.style import Style

from varuna_core.records.logs.tail import clean
from vjob.jobs.monitor.model.snapshot import Health
from vjob.shelf.view.table import Tone

BACKGROUND = "#10141a"
PANEL = "#1b222c"
PLAIN = Style(color="#d5dbe3", bold=False)
DIM = Style(color="#8b97a6", bold=False)
STRONG = Style(color="#ffffff", bold=True)
TITLE = Style(color="#9fb4cc", bold=True)
ACTIVE = Style(color="#ffffff", bold=True, underline=True)
HERE = Style(color="#ffffff", bgcolor="#2c3f57")
GOOD = Style(color="#6fce8b", bold=False)
BAD = Style(color="#ff8f85", bold=False)
WARM = Style(color="#f2c262", bold=False)
FOUND = Style(color="#10141a", bgcolor="#f2c262", bold=True)
KEY = Style(color="#8cc8ff", bold=True)
TONES = {
    Tone.PLAIN: PLAIN,
    Tone.DIM: DIM,
    Tone.STRONG: STRONG,
    Tone.GOOD: GOOD,
    Tone.BAD: BAD,
}
HEALTH = {
    Health.HEALTHY: "#6fce8b",
    Health.DONE: "#6fce8b",
    Health.PENDING: "#8cc8ff",
    Health.STARTING: "#8cc8ff",
    Health.RUNNING: "#8cc8ff",
    Health.CHECKPOINTING: "#8cc8ff",
    Health.MORPHING: "#8cc8ff",
    Health.REQUEUED: "#f2c262",
    Health.SLOW: "#f2c262",
    Health.STALLED: "#ff8f85",
    Health.FAILING: "#ff8f85",
    Health.DEAD: "#ff8f85",
    Health.CANCELLED: "#f2c262",
    Health.REFUSED: "#ff8f85",
    Health.UNKNOWN: "#c3b1f5",
}
SPEAKERS = ("#8cc8ff", "#6fce8b", "#c3b1f5", "#f2c262", "#79d6d1", "#f0a6ca", "#b9d36c", "#e8a87c")
"""Colours of ranks, or of nodes, in the merged log."""
ON_LIGHT = {
    BACKGROUND: "#ffffff",
    PANEL: "#eef1f5",
    "#2c3f57": "#d3e3f6",
    "#d5dbe3": "#1f2630",
    "#8b97a6": "#525c6a",
    "#ffffff": "#000000",
    "#9fb4cc": "#34506e",
    "#6fce8b": "#0a6333",
    "#ff8f85": "#a81f17",
    "#f2c262": "#7a4f00",
    "#8cc8ff": "#0b559f",
    "#c3b1f5": "#5b3fb0",
    "#79d6d1": "#005f61",
    "#f0a6ca": "#98205f",
    "#b9d36c": "#4c5f00",
    "#e8a87c": "#84431a",
}
"""Replacement of each colour on a terminal with a light background."""
LIGHT_NUMBERS = ("7", *map(str, range(9, 16)))
"""Numbers of a terminal's light colours; 8 is a dark grey."""


def is_light(environ: Mapping[str, str]) -> bool:
    """Return True if COLORFGBG, `foreground;background`, has a light background."""
    return environ.get("COLORFGBG", "").rpartition(";")[2] in LIGHT_NUMBERS


@lru_cache(maxsize=4096)
def lighten(style: Style) -> Style:
    """Return the style for a light background."""
    return style + Style.from_color(_lighten(style.color), _lighten(style.bgcolor))


def _lighten(colour: Color | None) -> Color | None:
    if colour is None or colour.triplet is None:
        return None
    found = ON_LIGHT.get(colour.triplet.hex)
    return None if found is None else Color.parse(found)


def badge(health: Health) -> Style:
    """Return the style of a verdict's word on a coloured background."""
    return Style(color="#10141a", bgcolor=HEALTH[health], bold=True)


def word(health: Health) -> Style:
    """Return the style of a verdict's word in a row."""
    return Style(color=HEALTH[health], bold=False)


def style_of(tone: Tone | Health) -> Style:
    """Return the style of a table cell."""
    return word(tone) if isinstance(tone, Health) else TONES[tone]


def speaker(number: int) -> Style:
    return Style(color=SPEAKERS[number % len(SPEAKERS)])


COERCED = "C.UTF-8"
"""LC_CTYPE as set by Python itself in the locale C (PEP 538)."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The symbols that the screen draws on one kind of terminal."""

    is_unicode: bool
    levels: str
    """Levels for sparklines, from low to high."""
    full: str
    empty: str
    culprit: str
    here: str
    """Sign of the cursor's row."""
    advice: str
    up: str
    down: str
    degree: str
    cut: str
    """Sign that replaces what does not fit."""

    def plain(self, text: str) -> str:
        """Return text on one line without control characters, in ASCII if the terminal needs it."""
        text = clean(text.expandtabs(4).replace("\n", " "))
        return text if self.is_unicode else text.encode("ascii", "replace").decode()

    def bar(self, percent: float, width: int) -> str:
        """Return a bar that fills `percent` of `width` cells."""
        filled = round(min(max(percent, 0.0), 100.0) / 100 * width)
        return self.full * filled + self.empty * (width - filled)

    def spark(self, values: Sequence[float | None], width: int, *, top: float | None = None) -> str:
        """Draw the last values, one for each cell, scaled between their least and greatest.

        With `top`, the scale is from 0 to `top`. Missing values leave gaps.
        """
        shown = list(values)[-width:] if width > 0 else []
        known = [value for value in shown if value is not None and math.isfinite(value)]
        low = 0.0 if top is not None else min(known, default=0.0)
        high = top if top is not None else max(known, default=0.0)
        return "".join(self._level(value, low, high) for value in shown)

    def curve(self, values: Sequence[float | None], width: int, *, flat: float = 0.0) -> str:
        """Draw all values in `width` cells, as means of neighbours if there are more.

        Values that differ by less than the share `flat` are drawn as a level line.
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
        """Cut text to at most `width` characters, with a sign if it was cut."""
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
    degree="C",
    cut="~",
)


def choose_marks(environ: Mapping[str, str]) -> Marks:
    """Choose ASCII unless the locale is UTF-8; a locale set by Python itself does not count."""
    ctype = environ.get("LC_CTYPE", "")
    lang = environ.get("LANG", "")
    if ctype == COERCED and lang in ("", "C", "POSIX"):
        ctype = ""
    locale = environ.get("LC_ALL") or ctype or lang
    return UNICODE if "utf8" in locale.lower().replace("-", "") else ASCII
