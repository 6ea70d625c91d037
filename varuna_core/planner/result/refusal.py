"""Explain why no plan exists: which wishes conflict, by how much, and what would be possible
instead.

smallest set     the fewest wishes that already rule out every plan together
by how much      the least memory, times that of these GPUs, with which the wishes could be kept
zero 3           the plan that keeps all wishes with it, which no search tries unasked
nearest          the plan that keeps the most wishes, with what it changes
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from varuna_core.planner.model.cluster import Cluster
from varuna_core.planner.model.training import TrainingModel
from varuna_core.planner.profile.errors import MissingData, PlanningError
from varuna_core.planner.profile.profile import Profile
from varuna_core.planner.result.band import prefer_simpler
from varuna_core.planner.search.deadline import Deadline, within
from varuna_core.planner.search.search import Candidate, Search, Searched
from varuna_core.planner.search.several import (
    NAMES,
    build_guide,
    is_by_costs,
    list_names,
    try_several,
)
from varuna_core.planner.search.space import Wishes

KEYS: Mapping[str, str] = {
    "stages": "parallel.pipeline",
    "replicas": "parallel.data",
    "tensor": "parallel.tensor",
    "micro_batch": "train.micro_batch_size",
    "zero": "parallel.zero",
    "schedule": "parallel.schedule",
    "recompute": "parallel.recompute",
    "partition": "parallel.partition",
}
"""The conf key of each field of Wishes."""
MOST_MEMORY = 64.0
"""The largest multiple of GPU memory tried: if even this does not help, memory is not the cause."""

Find = Callable[..., "Candidate | None"]
"""Function from a profile and wishes to a plan: any, or the best found within some seconds."""
LOOK_S = 2.0
ONE_STAGE_SHARE, SIMPLER_SHARE = 0.6, 0.05
"""Shares of a search's time for plans with one stage a rank, and for a simpler plan. Plans with
several stages a rank get the rest."""


class _TimeIsUp(Exception):
    """Raised when the time limit passes while reasons for a refusal are looked for."""


def search_or_explain(
    profile: Profile,
    training: TrainingModel,
    cluster: Cluster,
    wishes: Wishes,
    *,
    deadline: Deadline,
    may_have_zero_3: bool = False,
) -> Searched:
    """Search for the best plan, and prefer a simpler one within its band.

    If there is none, the error has the reasons and a plan that would do.
    """
    impossible = find_impossible(profile, cluster, wishes)
    try:
        if not impossible:
            question, searched = _search(profile, training, cluster, wishes, deadline)
            # Of a schedule that is asked for nothing simpler is.
            if is_by_costs(wishes):
                return searched
            return prefer_simpler(question, searched, deadline)
    except MissingData:
        raise
    except PlanningError as error:
        impossible = str(error)

    def find(held: Profile, wanted: Wishes, within_s: float = 0.0) -> Candidate | None:
        if deadline.is_over():
            raise _TimeIsUp
        if find_impossible(held, cluster, wanted):
            return None
        try:
            short = within(within_s, deadline.clock)
            return _search(held, training, cluster, wanted, short)[1].best
        except PlanningError:
            return None

    lines = [impossible]
    try:
        lines += _explain(find, profile, cluster, wishes, may_have_zero_3)
    except _TimeIsUp:
        lines.append("the time limit of the search leaves no time to find more reasons")
    raise PlanningError("\n  ".join(lines))


def _search(
    profile: Profile,
    training: TrainingModel,
    cluster: Cluster,
    wishes: Wishes,
    deadline: Deadline,
) -> tuple[Search, Searched]:
    """Search plans with one stage a rank, then plans with several; return the question and the best
    of both."""
    guide = build_guide(wishes)
    share = ONE_STAGE_SHARE if list_names(training, wishes) else 1 - SIMPLER_SHARE
    question = Search(profile, training, cluster, guide, deadline.part(share))
    searched, error = None, None
    try:
        searched = question.run()
    except MissingData:
        raise
    except PlanningError as nothing:
        error = nothing
    found = try_several(question, searched, wishes, deadline.part(1 - SIMPLER_SHARE))
    if found is None:
        raise error or PlanningError(f"no plan with schedule {wishes.schedule} fits in memory")
    return question, found


def find_impossible(profile: Profile, cluster: Cluster, wishes: Wishes) -> str:
    """Return a contradiction between the wishes that follows from numbers alone; empty if none."""
    segments = profile.model.num_segments
    if wishes.partition is not None:
        total = sum(wishes.partition)
        if total != segments:
            return (
                f"parallel.partition counts {total} segments, but the model has {segments} (its "
                "layers, the embedding and the head)"
            )
        each, over = divmod(len(wishes.partition), wishes.stages or len(wishes.partition))
        if wishes.stages is not None and (over or (each > 1) != (wishes.schedule in NAMES)):
            return (
                f"parallel.partition has {len(wishes.partition)} numbers, but parallel.pipeline "
                f"is {wishes.stages}"
            )
    stages = wishes.stages or 1
    if wishes.partition is not None and wishes.schedule not in NAMES:
        stages = len(wishes.partition)
    if stages > segments and wishes.least:
        return (
            f"{stages} stages are more than the model's {segments} segments (its layers, the "
            f"embedding and the head): at most {segments} stages, or a partition with zeros"
        )
    tensor = wishes.tensor or 1
    needed = stages * (wishes.replicas or 1) * tensor
    if needed > cluster.num_gpus:
        named = " x ".join(
            f"{KEYS[name]} {value}"
            for name, value in (
                ("stages", stages if stages > 1 else None),
                ("replicas", wishes.replicas),
                ("tensor", wishes.tensor),
            )
            if value is not None
        )
        return f"{named} needs {needed} GPUs, but there are {cluster.num_gpus}"
    largest = max(kind.gpus for kind in cluster.kinds)
    if tensor > largest:
        return (
            f"parallel.tensor {tensor} must fit in a node, but no node has more than {largest} GPUs"
        )
    return ""


def _explain(
    find: Find, profile: Profile, cluster: Cluster, wishes: Wishes, may_have_zero_3: bool
) -> Iterator[str]:
    named = list_wishes(wishes)
    clash = _find_clash(find, profile, wishes, named)
    if len(clash) > 1:
        yield "these cannot be combined: " + ", ".join(_say(wishes, name) for name in clash)
    elif clash:
        yield (f"{_say(wishes, clash[0])} alone rules out every plan of this batch on these nodes")
    factor = _find_memory(find, profile, wishes)
    if factor is not None:
        kinds = sorted({kind.gpu for kind in cluster.kinds})
        words = ", ".join(
            f"{kind} {profile.find_gpu(kind).memory_bytes * factor / 2**30:.0f} GB instead of "
            f"{profile.find_gpu(kind).memory_bytes / 2**30:.0f}"
            for kind in kinds
        )
        yield f"a plan would fit with {factor:.2f} times the memory ({words})"
    if may_have_zero_3 and wishes.zero is None:
        best = find(profile, replace(wishes, zero=3), LOOK_S)
        if best is not None:
            took = f"at most {best.step_s:.4g} s a step"
            yield f"a plan fits with parallel.zero: 3 ({best.option}; {took})"
    for count in range(1, len(named) + 1):
        found = []
        for dropped in itertools.combinations(named, count):
            best = find(profile, drop(wishes, dropped), LOOK_S)
            if best is not None:
                found.append((best.step_s, dropped, best))
        if found:
            _, dropped, best = min(found, key=lambda one: one[0])
            changes = ", ".join(
                f"{KEYS[name]}: {_get_value(best, name)}"
                for name in dropped
                if _get_value(best, name) != str(getattr(wishes, name))
            )
            took = f"{best.step_s:.4g} s a step"
            yield f"the nearest plan that fits has {changes} ({best.option}; {took})"
            return
    yield "no choice of these keys fits on these nodes: add nodes, or GPUs with more memory"


def list_wishes(wishes: Wishes) -> list[str]:
    return [name for name in KEYS if getattr(wishes, name) is not None]


def drop(wishes: Wishes, names: tuple[str, ...]) -> Wishes:
    """Return the wishes with the fields `names` left to the search. Without the partition, no stage
    may be empty."""
    left: dict[str, Any] = dict.fromkeys(names)
    if "partition" in names:
        left["least"] = 1
    return replace(wishes, **left)


def _find_clash(find: Find, profile: Profile, wishes: Wishes, named: list[str]) -> tuple[str, ...]:
    """Return the smallest set of wishes that rules out all plans; empty if none fits anyway."""
    for count in range(len(named)):
        for kept in itertools.combinations(named, count):
            others = tuple(name for name in named if name not in kept)
            if find(profile, drop(wishes, others)) is None:
                return kept
    return tuple(named)


def _find_memory(find: Find, profile: Profile, wishes: Wishes) -> float | None:
    """Return the least multiple of memory with which a plan exists; None if there is none."""

    def scale(factor: float) -> Profile:
        gpus = {
            kind: replace(gpu, memory_bytes=gpu.memory_bytes * factor)
            for kind, gpu in profile.gpus.items()
        }
        return replace(profile, gpus=gpus)

    if find(scale(MOST_MEMORY), wishes) is None:
        return None
    low, high = 1.0, MOST_MEMORY
    while high > low * 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if find(scale(middle), wishes) is not None else (middle, high)
    return high


def _say(wishes: Wishes, name: str) -> str:
    value = getattr(wishes, name)
    shown = "-".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{KEYS[name]} {shown}"


def _get_value(best: Candidate, name: str) -> str:
    option = best.option
    values = {
        "stages": len(best.placed.sites),
        "replicas": option.shape.replicas,
        "tensor": option.shape.tensor,
        "micro_batch": option.shape.micro_batch,
        "zero": option.shape.zero,
        "schedule": option.schedule,
        "recompute": option.recompute,
        "partition": "-".join(str(e - a) for a, e in itertools.pairwise(best.bounds)),
    }
    return str(values[name])


assert set(KEYS) == {field.name for field in fields(Wishes)} - {"least"}
