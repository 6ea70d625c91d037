"""The result of a try, as a table and as JSON. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from varuna_core.facts.cause import EndCause
from varuna_core.records.logs.tail import clean

WIDTH = 80
LABEL = 11
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A problem that would stop the whole run."""

    cause: str
    """The cause, as a sentence."""
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    """Lines of the run's logs that show the problem."""
    rule: str = ""
    """Name of the rule of `vjob status`, or of the try, that found it."""
    end: EndCause | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer of a try."""

    name: str
    text: str
    """The answer as it was measured, or `not known: ` and the reason."""
    values: dict[str, Any] = field(default_factory=dict)
    """The same answer for programs, with units in the names."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a try."""

    conf: str
    rows: tuple[Row, ...]
    findings: tuple[Trouble, ...]
    differs: tuple[str, ...]
    """Differences between the try and the whole run."""
    took_s: float
    stacks: tuple[str, ...] = ()
    """Lines of the ranks' stacks, if no step was seen."""
    files: str = ""
    """The run folder of the try, if it was kept."""

    @property
    def is_healthy(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        values = {**asdict(self), "took_s": round(self.took_s, 1)}
        return {"format": FORMAT, "healthy": self.is_healthy, **values}


def render(result: Result, width: int = WIDTH) -> str:
    """Render what was found, then the table, then how the try differs from the whole run."""
    lines: list[str] = []
    for finding in result.findings:
        lines += _wrap("FOUND", finding.cause, width)
        for remedy in finding.remedy.splitlines():
            lines += _wrap("", f"-> {remedy}", width)
        lines += [f"{'':{LABEL}}| {clean(text)}"[:width] for text in finding.evidence]
    for row in result.rows:
        lines += _wrap(row.name, row.text, width)
    lines += [f"{'':{LABEL}}| {clean(text)}"[:width] for text in result.stacks]
    lines += _wrap("differs", "; ".join(result.differs), width)
    lines += [f"{'files':{LABEL}}{result.files}"] if result.files else []
    return "\n".join(lines)


def _wrap(label: str, text: str, width: int) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        clean(text),
        width=width,
        initial_indent=f"{label:{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )
