"""What a try found, as a table and as JSON. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from varuna_core.records.logs.tail import clean

WIDTH = 80
LABEL = 11
UNKNOWN = "not known"
MEASURED = "measured"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that would stop the whole run."""

    what: str
    """starts, steps, checkpoint, memory or submit."""
    cause: str
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    """Lines of its logs."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer, and how sure it is."""

    name: str
    text: str
    certainty: str
    """measured, `estimated, -75 to +80 %`, or `not known: ...`, where the text is empty."""
    values: dict[str, Any]
    """The same for programs, units in the names."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a try."""

    conf: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    differs: tuple[str, ...]
    """How what was tried differs from the whole run."""
    took_s: float
    files: str = ""
    """The run folder of the try, where it is kept."""

    @property
    def is_healthy(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "conf": self.conf,
            "healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "differs": list(self.differs),
            "took_s": round(self.took_s, 1),
            "files": self.files,
        }


def render(result: Result, width: int = WIDTH) -> str:
    """What was found first, then the table, then how the try differs from the whole run."""
    lines: list[str] = []
    for finding in result.findings:
        lines += _wrap("FOUND", clean(finding.cause), width)
        lines += _wrap("", f"-> {clean(finding.remedy)}", width) if finding.remedy else []
        for text in finding.evidence:
            lines += [f"{'':{LABEL}}| {clean(text)}"[:width]]
    starts = not any(finding.what in ("starts", "submit") for finding in result.findings)
    for row in result.rows:
        if not row.text and not starts:
            continue  # what it might take, nobody asks of what does not start
        text = f"{row.text} ({row.certainty})" if row.text else row.certainty
        lines += _wrap(row.name, clean(text), width)
    if result.differs:
        lines += _wrap("differs", "; ".join(result.differs), width)
    if result.files:
        lines += [f"{'files':{LABEL}}{result.files}"]
    return "\n".join(lines)


def _wrap(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=f"{label:{LABEL}}",
        subsequent_indent=" " * LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def unknown(name: str, why: str, **values: Any) -> Row:
    """A row without an answer; `values` are what is known all the same."""
    first = why.strip().splitlines()[0] if why.strip() else "nothing is known about it"
    return Row(name=name, text="", certainty=f"{UNKNOWN}: {first}", values=values)
