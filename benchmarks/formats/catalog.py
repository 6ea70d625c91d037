"""The whole corpus, and its split into the half for development and the half kept apart."""

from __future__ import annotations

import random
from functools import cache
from types import ModuleType

from benchmarks.formats import (
    classic,
    frameworks,
    generative,
    language,
    negatives,
    reinforcement,
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
)
NUM_FORMATS, NUM_NEGATIVES = 100, 30
SPLIT_SEED = 20261128


@cache
def list_formats() -> dict[str, Format]:
    """All formats by name."""
    found = [item for module in PROGRAMS for item in vars(module).values()]
    return {item.name: item for item in found if isinstance(item, Format)}


@cache
def list_negatives() -> dict[str, Negative]:
    found = vars(negatives).values()
    return {item.name: item for item in found if isinstance(item, Negative)}


Halves = tuple[tuple[str, ...], tuple[str, ...]]
"""Names for development, and names kept apart."""


def split_formats() -> Halves:
    return _split(sorted(list_formats()))


def split_negatives() -> Halves:
    return _split(sorted(list_negatives()))


def _split(names: list[str]) -> Halves:
    chosen = set(random.Random(SPLIT_SEED).sample(names, len(names) // 2))
    return tuple(sorted(chosen)), tuple(name for name in names if name not in chosen)
