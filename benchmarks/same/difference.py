"""Differences of two commits' outputs, and the allow-list that says which are meant.

A place is a JSON path such as `verdict.reason` or `jobs[0].id`, or a line of a text with `-` or `+`
before it. An allowance holds patterns for the names of outputs and for places, as fnmatch has them,
but with `[` as itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import ndiff
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

MAX_DIFFED = 3000
"""Lines; difflib takes minutes on longer texts."""
NOT_THERE = "(not there)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    """Name of the output, such as `status/fails/slurm-TIMEOUT`."""
    place: str
    before: str = ""
    after: str = ""

    @property
    def kind(self) -> str:
        """What happened to the place: it came, it went, or it has another value."""
        if NOT_THERE in (self.before, self.after):
            return "came" if self.before == NOT_THERE else "went"
        return "changed"

    def __str__(self) -> str:
        if self.place[:1] in "-+":
            return self.place
        return f"{self.place}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Differences that one step of work was meant to make."""

    step: str
    why: str
    outputs: tuple[str, ...]
    places: tuple[str, ...]

    def allows(self, difference: Difference) -> bool:
        return _matches(difference.name, self.outputs) and _matches(difference.place, self.places)


def read_allowances(path: Path) -> tuple[str, list[Allowance]]:
    """The commit that the file is written for, and the differences from it that are meant."""
    value = yaml.safe_load(path.read_text())
    return value["base"], [
        Allowance(
            step=row["step"],
            why=row["why"],
            outputs=tuple(row["outputs"]),
            places=tuple(row["places"]),
        )
        for row in value["meant"]
    ]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """All differences: of texts by line, of JSON values by path; outputs that one lacks."""
    found: list[Difference] = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            here = "before" if name in before else "after"
            found.append(Difference(name=name, place=f"only {here}"))
            continue
        one, two = before[name], after[name]
        if isinstance(one, str) and isinstance(two, str):
            found += (Difference(name=name, place=line) for line in compare_lines(one, two))
        else:
            found += (
                Difference(name=name, place=place, before=old, after=new)
                for place, old, new in compare_values(one, two)
            )
    return found


def compare_lines(before: str, after: str) -> list[str]:
    """Lines that went (`-line`) and that came (`+line`), in order."""
    if before == after:
        return []
    one, two = before.splitlines(), after.splitlines()
    if max(len(one), len(two)) > MAX_DIFFED:
        here, there = Counter(one), Counter(two)
        return [f"-{line}" for line in here - there] + [f"+{line}" for line in there - here]
    return [line[0] + line[2:] for line in ndiff(one, two) if line[0] in "-+"]


def compare_values(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Places where two JSON values differ; a list of another length differs as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            place = f"{path}.{key}" if path else str(key)
            if key not in before or key not in after:
                yield place, _show(before, key), _show(after, key)
            else:
                yield from compare_values(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, two) in enumerate(zip(before, after, strict=True)):
            yield from compare_values(one, two, f"{path}[{index}]")
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield path, repr(before), repr(after)


def sort_out(
    differences: Iterable[Difference], allowances: Sequence[Allowance]
) -> tuple[list[Difference], dict[str, int]]:
    """Differences that nothing allows; and how many each allowance let through, by its step."""
    refused: list[Difference] = []
    allowed = {one.step: 0 for one in allowances}
    for difference in differences:
        for one in allowances:
            if one.allows(difference):
                allowed[one.step] += 1
                break
        else:
            refused.append(difference)
    return refused, allowed


def _show(mapping: Mapping[str, Any], key: str) -> str:
    return repr(mapping[key]) if key in mapping else NOT_THERE


def _matches(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)
