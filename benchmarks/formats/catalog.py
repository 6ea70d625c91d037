"""The whole corpus: what the reader was developed on, and what it met once."""

from __future__ import annotations

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
    negatives,
    reinforcement,
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
    met_later,
    met_once,
)


@cache
def list_formats() -> dict[str, Format]:
    """Formats for development, by name."""
    return _list(Format, *PROGRAMS)


@cache
def list_apart() -> dict[str, Format]:
    """Formats that the reader met once, when it was done."""
    return _list(Format, apart)


@cache
def list_negatives() -> dict[str, Negative]:
    return _list(Negative, negatives, small, met_later)


Kind = TypeVar("Kind", Format, Negative)


def _list(kind: type[Kind], *modules: ModuleType) -> dict[str, Kind]:
    found = [item for module in modules for item in vars(module).values()]
    return {item.name: item for item in found if isinstance(item, kind)}
