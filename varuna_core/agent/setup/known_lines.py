"""known_lines.json: the rows of the catalogue that a node needs, as they were at submit.

A node has no plug-ins, so a submit writes the rows about containers there.
"""

from __future__ import annotations

from typing import Iterable

from varuna_core.facts.catalogue.known_line import KnownLine
from varuna_core.facts.catalogue.tables import (
    Rows,
    dump_rows,
    match_rows,
    parse_rows,
)
from varuna_core.facts.remedy import Context, context_of, render_all
from varuna_core.records.files import read_json, write_json
from varuna_core.records.plan import Plan
from varuna_core.records.runfolder import RunFolder


def write_known_lines(run: RunFolder, rows: Iterable[KnownLine]) -> None:
    write_json(run.known_lines, {"format": 1, "rows": dump_rows(rows)})


def read_known_lines(run: RunFolder) -> Rows:
    """Read the rows of known_lines.json of a run, in order."""
    value = read_json(run.known_lines)
    return parse_rows(value.get("rows") if isinstance(value, dict) else None)


def add_remedy(run: RunFolder, plan: Plan, text: str) -> str:
    """Return the text of a problem, followed by ` -> REMEDY` if a row has a remedy for it."""
    row = match_rows(read_known_lines(run), text)
    remedy = render_all(row.remedies, get_context(plan)) if row is not None else ""
    return f"{text} -> {remedy}" if remedy and remedy not in text else text


def get_context(plan: Plan) -> Context:
    return context_of(plan.scheduler)
