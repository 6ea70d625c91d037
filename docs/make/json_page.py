"""Writes the tables of docs/json.md that show types, from the fields and their docstrings.

A table whose heading is no row of `TABLES` stays as it is written; commands that are staged in the
tests hold those.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from varuna_core.facts.cause import End
from varuna_core.facts.hang import Hang
from varuna_core.facts.known import Evidence, NotKnown, Value
from varuna_core.facts.remedy import Remedy
from varuna_core.records.checkpoints import Damaged, Skipped
from varuna_core.records.exits import Outcome, RankExit
from varuna_core.records.logs.slow_ranks import SlowRank
from vjob.jobs.images.store import Root
from vjob.jobs.monitor.model import snapshot as model
from vjob.jobs.monitor.model.run_row import RunRow
from vjob.jobs.monitor.stacks.group import RankStack
from vjob.reports.analysis.findings import Finding
from vjob.reports.analysis.headline import Headline, Speed
from vjob.shelf.prune import Candidate
from vjob.shelf.trial import result as trial

Row = tuple[str, str, str]
"""A key, its type and a comment."""
LONGEST = 80
"""Characters of a comment."""
NAMES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    Any: "any",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table: the fields of a type, apart from what its JSON has more or less than these."""

    kind: type
    prefix: str = ""
    """`[].` for a list of them."""
    before: tuple[Row, ...] = ()
    after: tuple[Row, ...] = ()
    without: tuple[str, ...] = ()


TABLES: Mapping[str, Table] = {
    "try": Table(
        kind=trial.Result,
        before=(("format", "integer", str(trial.FORMAT)), ("healthy", "boolean", "")),
    ),
    "status": Table(
        kind=RunRow,
        prefix="[].",
        before=(("format", "integer", "1"),),
        without=("state", "is_over", "age_s", "verdict", "loss", "losses", "attempt"),
        after=(
            ("state", "string", "The verdict's word"),
            ("job_state", "string", "The scheduler's"),
            ("advice", "string", ""),
            ("exit_code", "integer", "As of `status JOB`"),
        ),
    ),
    "status JOB": Table(
        kind=model.Snapshot,
        before=(("format", "integer", str(model.FORMAT)),),
        after=(("verdict", "Verdict", "What vjob makes of it"),),
    ),
    "prune": Table(
        kind=Candidate,
        prefix="[].",
        before=(("format", "integer", "1"),),
        after=(("action", "string", "remove, removed, keep, failed"), ("problem", "string", "")),
    ),
    "RankStack": Table(kind=RankStack),
    "Verdict": Table(
        kind=model.Verdict,
        without=("main", "details", "others", "job"),
        after=(
            ("rule", "string", "A heading of docs/verdicts.md"),
            ("exit_code", "integer", "As of the command"),
            ("findings[]", "VerdictFinding", "The first is why it has this health"),
        ),
    ),
    "Evidence": Table(kind=Evidence),
    "Remedy": Table(
        kind=Remedy,
        without=("detail", "when", "instead"),
        after=(("text", "string", "The remedy in words"),),
    ),
    "End": Table(kind=End),
    "Line": Table(kind=model.Line),
    "Progress": Table(kind=model.Progress),
    "Point": Table(kind=model.Point),
    "Phase": Table(kind=model.Phase),
    "Node": Table(kind=model.Node),
    "Gpu": Table(kind=model.Gpu),
    "Rank": Table(kind=model.Rank),
    "Exit": Table(kind=RankExit),
    "Slow": Table(kind=SlowRank),
    "Scheduler": Table(kind=model.Scheduler),
    "Job": Table(kind=model.JobRow),
    "Attempt": Table(kind=model.Attempt),
    "Outcome": Table(kind=Outcome),
    "Hang": Table(kind=Hang),
    "Skipped": Table(kind=Skipped),
    "Damaged": Table(kind=Damaged),
    "Echo": Table(kind=model.Echo),
    "Disk": Table(kind=model.Disk),
    "NewFiles": Table(kind=model.NewFiles),
    "Headline": Table(kind=Headline),
    "Speed": Table(kind=Speed, after=(("utilization", "number?", "`tflops` over `peak`"),)),
    "Finding": Table(kind=Finding, without=("evidence",), after=(("evidence[]", "Evidence", ""),)),
    "Image": Table(kind=Root),
}
HEADINGS = {table.kind: title for title, table in TABLES.items()}
BLOCK = re.compile(r"(^### (.+)\n(?:(?!```|#).*\n)*```text\n)((?:(?!```).*\n)+)", re.MULTILINE)


def render_page(page: str) -> str:
    """The page with all tables of types as their fields are now, the others in columns."""

    def replace(match: re.Match[str]) -> str:
        table = TABLES.get(match[2].replace("`", ""))
        written = [[*line.split(None, 2), ""][:3] for line in match[3].splitlines()]
        return match[1] + render_rows(written if table is None else list_rows(table))

    return BLOCK.sub(replace, page)


def list_rows(table: Table) -> list[Row]:
    """The rows of a type."""
    own = [*table.before, *_list_fields(table.kind, table), *table.after]
    return [(table.prefix + key, kind, comment) for key, kind, comment in own]


def render_rows(rows: Sequence[Sequence[str]]) -> str:
    """Keys, types and comments in columns."""
    widths = [max(len(row[at]) for row in rows) for at in (0, 1)]
    lines = (f"{key:{widths[0]}}  {kind:{widths[1]}}  {said}" for key, kind, said in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def _list_fields(kind: type, table: Table, path: str = "") -> Iterator[Row]:
    hints, docs = typing.get_type_hints(kind), read_docs(kind)
    for field in fields(kind):
        if field.name in table.without:
            continue
        key, name, inner = _describe(hints[field.name], f"{path}{field.name}")
        comment = docs.get(field.name, "") or _list_words(hints[field.name])
        if inner is not None:
            yield from _list_fields(inner, table, f"{key}.")
        elif key.endswith(("{}", "[]")) and type(None) in typing.get_args(hints[field.name]):
            yield f"{path}{field.name}", "object?", comment
            yield key, name.rstrip("?"), ""
        else:
            yield key, name, comment


def _list_words(kind: Any) -> str:
    """The words of an enum, as many as a line holds."""
    for one in (kind, *typing.get_args(kind)):
        if isinstance(one, type) and issubclass(one, Enum):
            text = ", ".join(member.value for member in one)
            return text if len(text) <= LONGEST else text[:LONGEST].rpartition(",")[0] + ", ..."
    return ""


def _describe(kind: Any, path: str) -> tuple[str, str, type | None]:
    """A key, the name of its type, and the type itself where its own fields follow."""
    origin, inner, mark = typing.get_origin(kind), typing.get_args(kind), ""
    if isinstance(kind, types.UnionType) or origin is typing.Union:
        if NotKnown in inner:
            (value,) = (one for one in inner if typing.get_origin(one) is Value)
            key, name, _ = _describe(typing.get_args(value)[0], path)
            return key, f"{'Bounded' if len(inner) > 2 else 'Known'}[{name}]", None
        (kind,) = [one for one in inner if one is not type(None)]
        origin, inner, mark = typing.get_origin(kind), typing.get_args(kind), "?"
    if origin in (tuple, list):
        return _describe(inner[0], f"{path}[]")
    if origin is not None:
        key, name, part = _describe(inner[1], f"{path}{{}}")
        return key, name + mark, part
    if kind in HEADINGS:
        return path, HEADINGS[kind] + mark, None
    return path, NAMES.get(kind, "string") + mark, kind if is_dataclass(kind) else None


def read_docs(kind: type) -> dict[str, str]:
    """The first sentence under each field, those of the types above it included."""
    found: dict[str, str] = {}
    for one in reversed([one for one in kind.__mro__ if is_dataclass(one)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(field.target, ast.Name) and isinstance(after.value, ast.Constant)
                found[field.target.id] = _shorten(" ".join(str(after.value.value).split()))
    return found


def _shorten(text: str) -> str:
    """The first sentence, without what only explains it where that is long; `null` for None."""
    text = re.split(r"\. |; |(?<!\.)\.$", text)[0]
    short = text if len(text) <= LONGEST else text.partition(": ")[0]
    return re.sub(r"\bNone\b", "null", short)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(render_page(Path(name).read_text()))
