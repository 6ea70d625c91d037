"""The whole corpus: what the reader was developed on, and what it met once."""

from __future__ import annotations

import random
from functools import cache
from types import ModuleType
from typing import TypeVar

from benchmarks.formats import (
    apart,
    classic,
    frameworks,
    generative,
    language,
    met_later,
    met_once,
    negative_rows,
    negatives,
    reinforcement,
    rows,
    small,
    speech,
    vision,
)
from benchmarks.formats.model import Format, Negative

PROGRAMS: tuple[ModuleType, ...] = (
    frameworks,
    language,
    vision,
    generative,
    speech,
    reinforcement,
    classic,
    small,
    rows,
    met_later,
    met_once,
)


@cache
def list_formats() -> dict[str, Format]:
    """Formats for development, by name."""
    drawn = _draw_apart()
    return {name: item for name, item in _list(Format, *PROGRAMS).items() if name not in drawn}


@cache
def list_apart() -> dict[str, Format]:
    """Formats that the reader met once, when it was done."""
    return {**_list(Format, apart), **_draw_apart()}


def _draw_apart() -> dict[str, Format]:
    """Half of the rows, drawn by a seed before they were read."""
    found = _list(Format, rows)
    return {
        name: found[name] for name in random.Random("apart").sample(sorted(found), len(found) // 2)
    }


@cache
def list_negatives() -> dict[str, Negative]:
    return _list(Negative, negatives, negative_rows, small, met_later)


Kind = TypeVar("Kind", Format, Negative)


def _list(kind: type[Kind], *modules: ModuleType) -> dict[str, Kind]:
    found = [item for module in modules for item in vars(module).values()]
    return {item.name: item for item in found if isinstance(item, kind)}
