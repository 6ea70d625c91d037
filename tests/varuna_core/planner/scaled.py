"""Profiles that are off by known factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from varuna_core.planner.profile.profile import TIMES, Cell, Profile


def scale_times(
    profile: Profile, kinds: set[str], is_meant: Callable[[int], bool], factor: float
) -> Profile:
    """The profile with the times of some segments on some kinds of GPU multiplied."""

    def scale(cell: Cell) -> Cell:
        changed: dict[str, Any] = {
            name: tuple(
                took * factor if is_meant(segment) else took
                for segment, took in enumerate(getattr(cell, name))
            )
            for name in (*TIMES, "selective_s")
        }
        return replace(cell, **changed)

    gpus = {
        kind: replace(gpu, cells={key: scale(cell) for key, cell in gpu.cells.items()})
        if kind in kinds
        else gpu
        for kind, gpu in profile.gpus.items()
    }
    return replace(profile, gpus=gpus)
