"""All rows of the catalogue by scope, the lookup of the row for a text, and known_lines.json.

Lines of logs are looked up in one table that spans the scopes (`log_rows`): messages of container
runtimes come before the same messages of ranks, and a GPU fault before the CUDA error that it leads
to.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Tuple

from varuna_core.facts.catalogue import containers, node, rank_output, slurm, ssh
from varuna_core.facts.catalogue.known_line import Fate, KnownLine, Proof, Scope, Stream
from varuna_core.facts.catalogue.patterns import MOST_CHARS, PatternError, check_pattern
from varuna_core.facts.cause import EndCause
from varuna_core.facts.cluster import Waiting
from varuna_core.facts.remedy import Action, Remedy, Target

Rows = Tuple[KnownLine, ...]

PLACES_IN_LOGS: Mapping[Scope, str] = {
    Scope.CONTAINER: "logged warning",
    Scope.NODE: "cuda out of memory",
    Scope.SCHEDULER: "not a number",
}
"""For each other scope, the row about ranks before which its rows are inserted in `log_rows`."""
MOST_TEXT = 64 * 1024
"""Number of characters at the end of a text of several lines that are searched."""


class CatalogueError(ValueError):
    """Raised for rows that conflict in one table; the message says why."""


GENERAL_FROM = rank_output.PYTHON_EXCEPTION
"""Name of the first of the general rows, which match any error and explain none."""


def merge_rows(ours: Rows, theirs: Iterable[KnownLine]) -> Rows:
    """Return the rows of one scope with those of plug-ins. A plug-in's row is inserted before the
    general rows, or before the row that its `before` names.

    Raise CatalogueError if a name already exists or a `before` does not, and PatternError for a
    pattern that may take too long.
    """
    merged: List[KnownLine] = list(ours)
    for row in theirs:
        names = [other.name for other in merged]
        if row.name in names:
            raise CatalogueError(f"two rows of scope {row.scope.value} are named {row.name!r}")
        check_pattern(row.pattern)
        if row.before and row.before not in names:
            raise CatalogueError(f"{row.name!r} is to come before {row.before!r}, an unknown row")
        general = GENERAL_FROM if GENERAL_FROM in names else ""
        before = row.before or general
        merged.insert(names.index(before) if before else len(merged), row)
    return tuple(merged)


def _check_names(rows: Rows) -> Rows:
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CatalogueError(f"several rows of scope {rows[0].scope.value} are named {twice[0]!r}")
    return rows


class Catalogue:
    """The rows of all scopes."""

    def __init__(self, rows: Mapping[Scope, Rows]) -> None:
        self._rows = {scope: _check_names(rows.get(scope, ())) for scope in Scope}

    def add(self, theirs: Iterable[KnownLine]) -> Catalogue:
        """Return a catalogue that also has the rows of one plug-in."""
        found: Dict[Scope, List[KnownLine]] = {}
        for row in theirs:
            found.setdefault(row.scope, []).append(row)
        more = {scope: merge_rows(self._rows[scope], rows) for scope, rows in found.items()}
        return Catalogue({**self._rows, **more})

    def rows(self, scope: Scope, only: Collection[str] = ()) -> Rows:
        """Return a scope's rows in order; with `only`, those that apply to one of its members."""
        wanted = set(only)
        return tuple(
            row
            for row in self._rows[scope]
            if not wanted or not row.only or wanted.intersection(row.only)
        )

    def find(self, scope: Scope, name: str) -> Optional[KnownLine]:
        return next((row for row in self._rows[scope] if row.name == name), None)

    def match(self, scope: Scope, text: str, only: Collection[str] = ()) -> Optional[KnownLine]:
        """Return the first row of a scope that matches a text, which may have several lines."""
        return match_rows(self.rows(scope, only), text)

    def log_rows(self) -> Rows:
        """Return the rows for lines of logs, in the order in which they are tried."""
        places = {name: scope for scope, name in PLACES_IN_LOGS.items()}
        found: List[KnownLine] = []
        for row in self._rows[Scope.RANK]:
            if row.name in places:
                found += self._rows[places[row.name]]
            found.append(row)
        return tuple(found)


def match_rows(rows: Iterable[KnownLine], text: str) -> Optional[KnownLine]:
    """Return the first row that matches a text; its lines are truncated to `MOST_CHARS`."""
    cut = cut_lines(text)
    return next((row for row in rows if compile_pattern(row.pattern).search(cut)), None)


def cut_lines(text: str) -> str:
    return "\n".join(line[:MOST_CHARS] for line in text[-MOST_TEXT:].split("\n"))


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> "re.Pattern[str]":
    """Compile a pattern at its first use, since most rows are never tried."""
    return re.compile(pattern)


BUILT_IN = Catalogue(
    {
        Scope.RANK: rank_output.ROWS,
        Scope.NODE: node.ROWS,
        Scope.SCHEDULER: slurm.LOG_LINES,
        Scope.CONTAINER: containers.ROWS,
        Scope.SSH: ssh.ROWS,
        Scope.SUBMIT: slurm.REFUSALS,
        Scope.PENDING: slurm.REASONS,
    }
)
"""The rows of vjob itself."""


def dump_rows(rows: Iterable[KnownLine]) -> List[Dict[str, Any]]:
    """Convert rows to plain JSON values, without fields that have their default."""
    usual = asdict(KnownLine("", "", Scope.RANK))
    return [
        {
            key: value
            for key, value in asdict(row).items()
            if key in ("name", "pattern", "scope") or value != usual[key]
        }
        for row in rows
    ]


def parse_rows(value: Any) -> Rows:
    """Parse rows from their JSON; rows that this version does not understand are skipped."""
    found = []
    for item in value if isinstance(value, list) else []:
        try:
            found.append(_parse_row(item))
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return tuple(found)


def _parse_row(item: Dict[str, Any]) -> KnownLine:
    known = {each.name for each in fields(KnownLine)}
    given = {key: value for key, value in item.items() if key in known}
    enums: Dict[str, Any] = {
        "scope": Scope,
        "stream": Stream,
        "proof": Proof,
        "cause": EndCause,
        "fate": Fate,
        "waits": Waiting,
    }
    for key, enum in enums.items():
        if given.get(key) is not None:
            given[key] = enum(given[key])
    given["remedies"] = tuple(_parse_remedy(one) for one in given.get("remedies", ()))
    given["only"] = tuple(given.get("only", ()))
    row = KnownLine(**given)
    check_pattern(row.pattern)
    return row


def _parse_remedy(item: Dict[str, Any]) -> Remedy:
    target = item.get("target")
    return Remedy(
        Action(item["action"]),
        Target(target) if target is not None else None,
        value=str(item.get("value", "")),
        detail=str(item.get("detail", "")),
        when=str(item.get("when", "")),
        instead=bool(item.get("instead", False)),
    )


__all__ = ["BUILT_IN", "Catalogue", "CatalogueError", "PatternError", "merge_rows"]
