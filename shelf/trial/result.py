"""The result of a try, as a table and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from varuna_core.facts.cause import EndCause
from varuna_core.records.formatting import wrap_text
from varuna_core.records.logs.tail import clean

WIDTH = 80
LABEL = 12
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
    """A row in the table of a try's results."""

    name: str
    text: str
    """The answer as it was measured, or `not known: ` and the reason."""
    values: dict[str, Any] = field(default_factory=dict)
    """The answer as values for programs, with units in the names."""


@dataclass(kw_only=True)
class Result:
    """Result of a try, filled while it goes on."""

    conf: str
    rows: list[Row] = field(default_factory=list)
    findings: list[Trouble] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    """Differences between the try and the whole run."""
    took_s: float = 0.0
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


def render(result: Result) -> str:
    """Render what was found, then the table, then how the try differs from the whole run."""
    lines = []
    for finding in result.findings:
        lines.append(_label("FOUND", finding.cause))
        lines += [_label("", f"-> {remedy}") for remedy in finding.remedy.splitlines()]
        lines += _quote(finding.evidence)
    lines += [_label(row.name, row.text) for row in result.rows]
    lines += _quote(result.stacks)
    if result.differs:
        lines.append(_label("differs", "; ".join(result.differs)))
    if result.files:
        lines.append(f"{'files':{LABEL}}{result.files}")
    return "\n".join(lines)


def _label(label: str, text: str) -> str:
    return wrap_text(f"{label:{LABEL}}{clean(text)}", WIDTH)


def _quote(lines: Iterable[str]) -> list[str]:
    """Return lines of logs or stacks, cut at the width."""
    return [f"{'':{LABEL}}| {clean(line)}"[:WIDTH] for line in lines]
