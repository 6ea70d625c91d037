"""The result of a try, as a table and as JSON. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from varuna_core.facts.cause import EndCause
from varuna_core.records.logs.tail import clean

WIDTH = 80
LABEL = 11
MEASURED = "measured"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A problem that would stop the whole run."""

    what: str
    """Kind of the problem: starts, steps, checkpoint or submit."""
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
    """One answer of a try, with its certainty."""

    name: str
    text: str
    certainty: str
    """`measured`, `measured on one node`, or `not known: ...` if `text` is empty."""
    values: dict[str, Any]
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
    starts = not any(finding.what in ("starts", "submit") for finding in result.findings)
    for row in result.rows:
        if row.text or starts:  # what it might take, nobody asks of what does not start
            text = f"{row.text} ({row.certainty})" if row.text else row.certainty
            lines += _wrap(row.name, text, width)
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


def unknown(name: str, why: str, **values: Any) -> Row:
    """Return a row without an answer; `values` are the facts that are known nevertheless."""
    return Row(name=name, text="", certainty=f"not known: {why}", values=values)
