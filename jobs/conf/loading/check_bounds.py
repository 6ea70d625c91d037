"""Check numbers against the bounds in the schema, and find a problem's place in the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from vjob.jobs.conf.parse import find_bounds, get_annotations
from vjob.jobs.conf.redact import show
from vjob.jobs.conf.schema import Bound, JobConf
from vjob.jobs.conf.yaml_tree import join_key
from vjob.jobs.errors import KeyProblem, Problem


def locate(problems: Iterable[KeyProblem], lines: Mapping[str, str]) -> list[Problem]:
    """Return the problems of keys, each with the place (file and line) of its key."""
    return [
        Problem(where=locate_line(lines, key), key=key, value=show(key, value), message=message)
        for key, value, message in problems
    ]


def locate_line(lines: Mapping[str, str], key: str) -> str:
    """Return the place (file and line) of a key, or of the nearest written section around it."""
    while key and key not in lines:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return lines.get(key, "conf")


def check_numbers(conf: JobConf) -> Iterator[KeyProblem]:
    """Yield numbers outside the schema's bounds."""
    yield from check_section(conf, "")


def check_section(section: object, key: str) -> Iterator[KeyProblem]:
    cls: type = type(section)
    for name, hint in get_annotations(cls).items():
        value, inner, bounds = getattr(section, name), join_key(key, name), find_bounds(hint)
        if is_dataclass(value):
            yield from check_section(value, inner)
        elif isinstance(value, tuple):
            items = {f"{inner}[{index}]": item for index, item in enumerate(value)}
            yield from _check_items(items, bounds)
        elif isinstance(value, Mapping):
            items = {join_key(inner, word): item for word, item in value.items()}
            yield from _check_items(items, bounds)
        elif isinstance(value, int | float):
            for bound in bounds:
                if not bound.allows(value):
                    yield inner, value, f"must be {bound}"


def _check_items(items: Mapping[str, Any], bounds: Sequence[Bound]) -> Iterator[KeyProblem]:
    """Check node groups, and numbers in a list or mapping; messages give the whole range."""
    for key, item in items.items():
        if is_dataclass(item):
            yield from check_section(item, key)
        elif not all(bound.allows(item) for bound in bounds):
            yield key, item, f"must be {' and '.join(map(str, bounds))}"
