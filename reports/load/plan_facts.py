"""The part of plan.json that a report shows, of any version: what makes no sense counts as missing.

`records.plan.read_plan` takes a whole plan of this version or none; a report is also made of a run
that an older vjob left, or of a plan that somebody wrote by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varuna_core.records.files import read_json
from varuna_core.records.plan import Prediction, parse_prediction

SHOWN = ("name", "layout", "pipeline", "data", "tensor", "partition", "stage_map", "planned")


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan says; empty or None where it says nothing."""

    shown: tuple[tuple[str, str], ...] = ()
    """Of SHOWN, as text."""
    groups: tuple[tuple[str, str], ...] = ()
    """Each group of nodes by name, in words."""
    pipeline: int | None = None
    partition: str = ""
    world: int | None = None
    """The number of ranks."""
    prediction: Prediction | None = None


def read_plan_facts(path: Path) -> PlanFacts:
    """Empty where the file is missing or torn."""
    value = read_json(path)
    return parse_plan_facts(value) if isinstance(value, dict) else PlanFacts()


def parse_plan_facts(plan: dict[str, Any]) -> PlanFacts:
    groups = plan.get("groups")
    pipeline = plan.get("pipeline")
    return PlanFacts(
        shown=tuple(
            (key, str(plan[key])[:200]) for key in SHOWN if plan.get(key) not in (None, "")
        ),
        groups=_describe_groups(groups) if isinstance(groups, list) else (),
        pipeline=pipeline if isinstance(pipeline, int) else None,
        partition=str(plan.get("partition") or ""),
        world=_count_ranks(groups) if isinstance(groups, list) else None,
        prediction=parse_prediction(plan.get("prediction")),
    )


def _describe_groups(groups: list[Any]) -> tuple[tuple[str, str], ...]:
    rows = []
    for group in groups:
        if isinstance(group, dict) and {"name", "count", "ranks"} <= group.keys():
            text = f"{group['count']} x {group['ranks']} ranks"
            more = [str(group[key]) for key in ("gpu_type", "queue") if group.get(key)]
            rows.append((f"group {group['name']}", ", ".join([text, *more])[:200]))
    return tuple(rows)


def _count_ranks(groups: list[Any]) -> int | None:
    try:
        return sum(int(group["count"]) * int(group["ranks"]) for group in groups)
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
