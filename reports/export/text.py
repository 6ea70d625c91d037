"""Render the report for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from varuna_core.facts.cause import End
from varuna_core.facts.finding import dump_value
from varuna_core.facts.known import Evidence, NotKnown, Sure, Value, Within, as_json
from varuna_core.records.formatting import format_duration
from varuna_core.records.logs.tail import COLOUR
from vjob.reports.analysis.accounting import describe_class, format_least
from vjob.reports.analysis.findings import Finding
from vjob.reports.analysis.headline import Headline, list_facts
from vjob.reports.analysis.measures import Analysis
from vjob.reports.analysis.opening import write_opening
from vjob.reports.load.tables import Job
from vjob.reports.page.sections import ReportTable, build_sections, explain_time, shorten

MOST_LINES = 12
"""Rows shown of a table, counting those at its start and at its end."""


def render_text(job: Job, analysis: Analysis, findings: list[Finding], *, is_partial: bool) -> str:
    """Render all sections that have content. Control characters from logs are replaced."""
    lines: list[str] = [f"report of {job.sources.name}"]
    if is_partial:
        lines.append("the job has not ended: this is the report so far")
    lines += textwrap.wrap(write_opening(job, analysis, findings), 80)
    lines += ["", *(f"  {one.name}: {one.value}" for one in list_facts(analysis.headline))]
    time = _list_time(analysis)
    if time.rows:
        lines += ["", "TIME", *(f"  {line}" for line in render_table(time, len(time.rows)))]
        lines.append(f"  {explain_time(analysis.accounting, is_partial=is_partial)}")
    if findings:
        lines += ["", "FINDINGS", *(f"  {line}" for line in _render_findings(findings))]
    for table in build_sections(job, analysis):
        most = len(table.rows) if table.title == "job" else MOST_LINES
        lines += ["", table.title.upper(), *(f"  {line}" for line in render_table(table, most))]
        if table.title == "stages" and analysis.suggestion is not None:
            lines.append(f"  suggested partition: {analysis.suggestion}")
    return "".join(_clean(line) + "\n" for line in lines)


def build_json(
    job: Job, analysis: Analysis, findings: list[Finding], *, is_partial: bool, end: End | None
) -> dict[str, Any]:
    """Build the report's JSON: headline, end of the run, time of all ranks by class, findings."""
    accounting = analysis.accounting
    seconds, shares, bounds = accounting.seconds, accounting.shares, accounting.bounds
    return {
        "format": 2,
        "job": job.sources.name,
        "is_partial": is_partial,
        "end": None if end is None else dump_value(asdict(end)),
        "headline": show_headline(analysis.headline),
        "time": [
            {
                "class": name,
                "seconds": seconds[name],
                "share": shares[name],
                "at_most": bounds[name][1],
                "parts": dict(accounting.start) if name == "start" else {},
            }
            for name in shares
        ],
        "findings": [show_finding(one) for one in findings],
    }


def show_headline(found: Headline) -> dict[str, Any]:
    """Return each headline figure with its evidence: a value, bounds, or why it is not known."""
    values = {one.name: getattr(found, one.name) for one in fields(found)}
    speeds = [{**asdict(one), "utilization": one.utilization} for one in found.speeds]
    known = (Value, Within, NotKnown)
    shown = {
        name: as_json(value) if isinstance(value, known) else value
        for name, value in values.items()
    }
    return {**shown, "speeds": speeds}


def show_finding(found: Finding) -> dict[str, Any]:
    """Return a finding as a mapping: rule and values, then the sentence made from them."""
    values = {name: _to_plain(value) for name, value in found.values.items()}
    evidence = [asdict(Evidence(found.evidence, Sure.MEASURED))]
    return {**asdict(found), "values": values, "evidence": evidence}


def _to_plain(value: Any) -> Any:
    """Convert a numpy number to a Python number for JSON."""
    return value.item() if hasattr(value, "item") else value


def _clean(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in COLOUR.sub("", line))


def _render_findings(findings: list[Finding]) -> Iterator[str]:
    for number, finding in enumerate(findings, start=1):
        yield f"{number}. {finding.sentence}"
        if finding.cost:
            yield f"   costs: {finding.cost}"
        yield f"   from: {finding.evidence}"
        if finding.key:
            yield f"   change: {finding.key}"


def render_table(table: ReportTable, most: int = MOST_LINES) -> Iterator[str]:
    """Render a table: two columns without names as `key: value`, others as aligned columns."""
    rows, left_out = shorten(table.rows, most)
    if len(table.columns) == 2 and not table.columns[0]:
        lines = [f"{key}: {value}" for key, value in rows]
    else:
        cells = [table.columns, *rows]
        widths = [max(len(row[at]) for row in cells) for at in range(len(table.columns))]
        lines = [_align(row, widths).rstrip() for row in cells]
    if table.shares and not left_out:
        bars = ["", *("#" * round(40 * share) for share in table.shares)]
        lines = [f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]
    if left_out:
        lines.insert(len(lines) - len(rows) // 2, f"... {left_out} more")
    yield from lines


def _align(row: tuple[str, ...], widths: list[int]) -> str:
    """Align a row, with the last column, which often holds words, to the left."""
    first = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
    return "  ".join([*first, row[-1]])


def _list_time(analysis: Analysis) -> ReportTable:
    """Build the table of all ranks' time by class."""
    found = analysis.accounting
    rows = [
        (
            name,
            format_least(found, name),
            format_duration(found.seconds[name]),
            describe_class(found, name),
        )
        for name in found.shares
    ]
    columns = ("class", "share", "of all ranks", "what")
    return ReportTable(title="time", columns=columns, rows=rows)
