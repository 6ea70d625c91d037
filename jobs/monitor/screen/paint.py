"""The colours of the screen. None says anything that a word or sign beside it does not say."""

from __future__ import annotations

from rich.style import Style

from vjob.jobs.monitor.model.verdict import Health

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

HEALTH = {
    Health.HEALTHY: "#6fce8b",
    Health.DONE: "#6fce8b",
    Health.PENDING: "#8cc8ff",
    Health.STARTING: "#8cc8ff",
    Health.CHECKPOINTING: "#8cc8ff",
    Health.MORPHING: "#8cc8ff",
    Health.REQUEUED: "#f2c262",
    Health.SLOW: "#f2c262",
    Health.STALLED: "#ff8f85",
    Health.FAILING: "#ff8f85",
    Health.DEAD: "#ff8f85",
    Health.UNKNOWN: "#c3b1f5",
}

SPEAKERS = ("#8cc8ff", "#6fce8b", "#c3b1f5", "#f2c262", "#79d6d1", "#f0a6ca", "#b9d36c", "#e8a87c")
"""Of ranks, or of nodes, in the merged log."""


def badge(health: Health) -> Style:
    """Behind the word of a verdict."""
    return Style(color="#10141a", bgcolor=HEALTH[health], bold=True)


def speaker(number: int) -> Style:
    return Style(color=SPEAKERS[number % len(SPEAKERS)])
