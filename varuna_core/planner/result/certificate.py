"""Render a search's proof as text: the classes of plans that it covers, and their common gap."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from varuna_core.planner.search.coverage import Coverage, PlanClass, Stop
from varuna_core.planner.search.search import Searched

WIDTH = 80
WHY = {
    Stop.TIME: "stopped by time",
    Stop.NUMBER: "the search reached its limit of plans",
    Stop.ONLY_ASKED: "planned only if the conf asks for it",
    Stop.NO_FIGURES: "the profile has no figures for such plans",
    Stop.ONE_STAGE: "planned only with one stage per rank",
    Stop.ONE_F_ONE_B: "such plans save memory, but 1f1b needs less",
    Stop.NEVER_FASTER: "never faster than zero 1 under this model",
}
"""Phrases for the reasons why a class of plans was searched in part or not at all."""


def render_certificate(searched: Searched) -> str:
    """Render the classes of plans, how far each was searched, and which were not searched."""
    some = [one for one in searched.classes if one.coverage is not Coverage.NOT]
    others = [one for one in searched.classes if one.coverage is Coverage.NOT]
    lines = [f"certificate, for this cost model at median times: {_state_bound(searched)}"]
    for one in some:
        reason = "" if one.why is None else f": {WHY[one.why]}"
        how = "searched wholly"
        if one.coverage is not Coverage.WHOLLY:
            how = f"searched in part, {one.done} of {one.of} shapes"
        named = f"{_name_number(one.stages_per_rank)} ({', '.join(one.schedules)})"
        lines.append(f"  {named}: {how}{reason}")
    first = some[0]
    lines.append(f"  each with {'; '.join(_list_values(first, is_several=False))}")
    lines.append(f"  placements: {first.placements}, replicas of a stage together; every partition")
    for one in others:
        assert one.why is not None
        lines.append(f"  not searched: {', '.join(_list_values(one))}: {WHY[one.why]}")
    return "\n".join(_wrap(line, "    ") for line in lines)


def _state_bound(searched: Searched) -> str:
    chosen_s = searched.chosen.step_s
    if searched.gap == 0:
        return f"none of these plans is faster than {chosen_s:.4g} s; gap 0 %"
    return (
        f"none of these plans can take less than {searched.bound_s:.4g} s, this one takes "
        f"{chosen_s:.4g} s; gap {searched.gap:.1%}: a faster plan may or may not exist"
    )


def _name_number(stages_per_rank: Sequence[int]) -> str:
    named = "one stage" if stages_per_rank == (1,) else f"{_join(stages_per_rank)} stages"
    return f"{named} a rank"


def _list_values(one: PlanClass, is_several: bool = True) -> Iterator[str]:
    """Yield phrases for the values that define a class of plans."""
    if is_several and one.stages_per_rank:
        yield _name_number(one.stages_per_rank)
    for name, values in (
        ("schedule", one.schedules if is_several else ()),
        ("tensor", one.tensor),
        ("replicas", one.replicas),
        ("micro-batch", one.micro_batches),
        ("recompute", one.recomputes),
        ("zero", one.zero),
    ):
        if values:
            yield f"{name} {_join(values)}"


def _join(values: Sequence[int | str]) -> str:
    """Join numbers, consecutive ones as first and last."""
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, values))


def _wrap(line: str, indent: str) -> str:
    return textwrap.fill(
        line.strip(),
        WIDTH,
        initial_indent=line[: len(line) - len(line.lstrip())],
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
