"""A profile fitted to a measured run, by factors on its times.

    stage    0            1               2        what a stage took for a micro-batch is the sum of
    holds    embedding +  3 blocks        blocks   its segments' times, each times its class' factor
             2 blocks                     + head   (segments that are alike are a class)

Least squares find the factors of each kind of GPU, drawn a little to their common one, which is all
that there is where stages do not tell the classes apart. A link has one factor each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.profile import (
    FIGURE_OF,
    TIMES,
    Cell,
    GpuProfile,
    LinkTime,
    Profile,
    Where,
)

Array = Any
DRAWN = 1e-3
"""How strongly factors are drawn to the common one: as if times were 1 % off, factors 30 %."""
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
"""Of the common factor, that a class may have: what is beyond that is noise of small segments."""

STANDS_FOR = (
    ("recompute_s", "forward_s"),
    ("selective_s", "recompute_s"),
    ("input_grad_s", "backward_s"),
    ("weight_grad_s", "backward_s"),
    ("backward_s", "input_grad_s"),
)
"""A figure that was not measured is off as another one, if that was."""


@dataclass(frozen=True, kw_only=True)
class MeasuredAction:
    """Measured time of one action of a stage, for a micro-batch."""

    gpu: str
    begin: int
    """Its first segment."""
    end: int
    """That after its last one."""
    action: str
    """F f R B I W."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Message:
    """Measured message to the next stage or back; `num_bytes` of all that share the link."""

    sender: str
    receiver: str
    where: Where
    num_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The factor that a figure was multiplied by."""

    what: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Recalibrated:
    profile: Profile
    factors: tuple[Factor, ...]


def recalibrate(
    profile: Profile,
    works: Sequence[MeasuredAction],
    messages: Sequence[Message] = (),
    *,
    micro_batch: int,
    tensor: int,
    label: str,
) -> Recalibrated:
    """Fit the tensor degree that was run; other micro-batch sizes get the same factors.

    `label` says in the new profile's `software` what it was fitted to.
    """
    if not works:
        raise PlanningError("the trace has no actions to fit a profile to")
    factors: list[Factor] = []
    gpus = dict(profile.gpus)
    for gpu in sorted({work.gpu for work in works}):
        own = [work for work in works if work.gpu == gpu]
        cell = profile.find_cell(gpu, micro_batch, tensor)
        classes = _find_classes(profile.find_parameters(tensor), cell)
        found = _fit_all(cell, own, classes)
        gpus[gpu] = _scale(profile.find_gpu(gpu), found, tensor)
        factors += _tell(gpu, found, classes)
    links = dict(profile.network.links)
    for key in sorted({(m.sender, m.receiver, m.where) for m in messages}):
        told = [m for m in messages if (m.sender, m.receiver, m.where) == key]
        link = profile.network.find(*key)
        thought = np.array([link.find_time(m.num_bytes) for m in told])
        took = np.array([m.seconds for m in told])
        if not thought.any():
            continue
        factor = float(thought @ took / (thought @ thought))
        links[key] = scale_link(link, factor)
        factors.append(Factor(what=f"{key[2]}-node link {key[0]} to {key[1]}", value=factor))
    new = replace(
        profile,
        gpus=gpus,
        network=replace(profile.network, links=links),
        software={**profile.software, "recalibrated": label},
    )
    return Recalibrated(profile=new, factors=tuple(factors))


def _find_classes(parameters: Sequence[int], cell: Cell) -> list[list[int]]:
    """Segments that are alike: as many parameters, as much passed on and kept."""
    classes: dict[Any, list[int]] = {}
    rows = zip(parameters, cell.output_bytes, cell.graph_bytes, strict=True)
    for segment, row in enumerate(rows):
        classes.setdefault(tuple(f"{figure:.2e}" for figure in row), []).append(segment)
    return list(classes.values())


def _fit_all(
    cell: Cell, works: Sequence[MeasuredAction], classes: list[list[int]]
) -> dict[str, Array]:
    """By figure a factor of each segment."""
    size = len(cell.forward_s)
    found: dict[str, Array] = {}
    for group in (("F", "f"), ("R",), ("B",), ("I",), ("W",)):
        told = [work for work in works if work.action in group]
        if told:
            name = FIGURE_OF[group[0]]
            action_s = cell.action_s[TIMES.index(name)]
            told = [replace(work, seconds=max(0.0, work.seconds - action_s)) for work in told]
            found[name] = _fit(np.array(getattr(cell, name)), told, classes, size)
    for name, like in STANDS_FOR:
        if like in found:
            found.setdefault(name, found[like])
    return found


def _fit(
    costs: Array, works: Sequence[MeasuredAction], classes: list[list[int]], size: int
) -> Array:
    matrix = np.zeros((len(works), len(classes)))
    for row, work in enumerate(works):
        for column, members in enumerate(classes):
            matrix[row, column] = sum(costs[s] for s in members if work.begin <= s < work.end)
    took = np.array([work.seconds for work in works])
    whole = matrix.sum(axis=1)
    known = whole > 0
    if not known.any():
        return np.ones(size)
    matrix, took, whole = matrix[known], took[known], whole[known]
    common = took.sum() / whole.sum()
    apart = _solve(matrix / whole[:, None], took / whole / common - 1)
    factors = np.empty(size)
    for column, members in enumerate(classes):
        factors[members] = common * (1 + apart[column])
    return factors


def _solve(shares: Array, left: Array) -> Array:
    """How far each class is from the common factor, as a share of it: one that would go beyond
    the limits stays there, and the others are found again."""
    count = shares.shape[1]
    found, is_free = np.zeros(count), np.ones(count, dtype=bool)
    while is_free.any():
        rest = left - shares[:, ~is_free] @ found[~is_free]
        drawn = np.vstack([shares[:, is_free], np.sqrt(DRAWN) * np.eye(is_free.sum())])
        aims = np.concatenate([rest, np.zeros(is_free.sum())])
        found[is_free] = np.linalg.lstsq(drawn, aims, rcond=None)[0]
        kept = np.clip(found, LEAST_SHARE - 1, MOST_SHARE - 1)
        beyond = is_free & (kept != found)
        if not beyond.any():
            break
        found[beyond] = kept[beyond]
        is_free &= ~beyond
    return found


def _scale(gpu: GpuProfile, found: dict[str, Array], tensor: int) -> GpuProfile:
    def scale(cell: Cell) -> Cell:
        changed: dict[str, Any] = {
            name: tuple(float(v) for v in np.array(getattr(cell, name)) * factors)
            for name, factors in found.items()
            if getattr(cell, name)
        }
        return replace(cell, **changed)

    cells = {key: scale(cell) if key[1] == tensor else cell for key, cell in gpu.cells.items()}
    return replace(gpu, cells=cells)


def _tell(gpu: str, found: dict[str, Array], classes: list[list[int]]) -> list[Factor]:
    told = []
    for name, factors in found.items():
        for members in classes:
            first, last = members[0], members[-1]
            where = f"segment {first}" if first == last else f"segments {first} to {last}"
            words = f"{gpu}, {name.removesuffix('_s').replace('_', ' ')}, {where}"
            told.append(Factor(what=words, value=float(factors[first])))
    return told


def scale_link(link: LinkTime, factor: float) -> LinkTime:
    points = tuple((size, took * factor) for size, took in link.points)
    return replace(link, points=points)
