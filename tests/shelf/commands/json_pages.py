"""Reader of docs/json.md: its keys, compared with what commands print."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests import ROOT

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

Keys = Mapping[str, str]
"""Each path with its type."""


def read_page() -> dict[str, Keys]:
    """The keys of each command and object, those of the named objects in it included."""
    rows: dict[str, list[list[str]]] = {}
    title, is_inside = "", False
    for line in (ROOT / "docs/json.md").read_text().splitlines():
        if line.startswith("### "):
            title = line[4:].replace("`", "")
        elif line.startswith("```"):
            is_inside = line == "```text"
        elif is_inside:
            rows.setdefault(title, []).append(line.split()[:2])
    return {title: dict(_expand(rows, title)) for title in rows}


def _expand(rows: Mapping[str, Sequence[Sequence[str]]], title: str) -> Iterator[tuple[str, str]]:
    for path, kind in rows[title]:
        name = kind.rstrip("?")
        known = re.fullmatch(r"(Known|Bounded)\[(\w+)\]", kind)
        if known is not None:
            names = ("value", "low", "high") if known[1] == "Bounded" else ("value",)
            yield from ((f"{path}.{sub}", known[2]) for sub in names)
            yield f"{path}.not_known", "string"
            yield from (
                (f"{path}.evidence[].{sub}", what) for sub, what in _expand(rows, "Evidence")
            )
        elif path.startswith("..."):
            yield from _expand(rows, path[3:])
        elif name in rows:
            yield path, kind.replace(name, "object")
            yield from ((f"{path}.{sub}", what) for sub, what in _expand(rows, name))
        else:
            yield path, kind


class Comparison:
    """What is on the page under a heading beside what was printed."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.problems: set[str] = set()
        self._seen: set[str] = set()

    def add(self, value: Any, path: str = "") -> None:
        kind = self.keys.get(path)
        if kind is not None:
            self._seen.add(path)
        if kind == "any":
            return
        if value is None and kind is not None:
            if not kind.endswith("?"):
                self.problems.add(f"{path} is null, and {kind} on the page")
        elif isinstance(value, dict):
            self._add_object(value, path)
        elif isinstance(value, list):
            self._see_empty(value, f"{path}[]")
            for item in value:
                self.add(item, f"{path}[]")
        elif kind is None:
            self.problems.add(f"{path} is not on the page: {value!r}")
        elif not _fits(NAMES[type(value)], kind):
            self.problems.add(f"{path} is {value!r}, and {kind} on the page")

    def _add_object(self, value: Mapping[str, Any], path: str) -> None:
        is_open = any(key.startswith(f"{path}{{}}") for key in self.keys)
        self._see_empty(value, f"{path}{{}}")
        for key, item in value.items():
            self.add(item, f"{path}{{}}" if is_open else f"{path}.{key}".lstrip("."))

    def _see_empty(self, value: Any, path: str) -> None:
        """An empty list of texts shows that the key exists; one of objects shows none of theirs."""
        if not value and path in self.keys:
            self._seen.add(path)

    def list_problems(self) -> list[str]:
        unseen = [f"{path} was never printed" for path in self.keys if path not in self._seen]
        return sorted(self.problems) + unseen


def _fits(found: str, wanted: str) -> bool:
    wanted = wanted.rstrip("?")
    return found == wanted or (found, wanted) == ("integer", "number")
