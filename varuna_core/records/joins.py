"""Jobs that bring more nodes to a run that may morph: morph/joins/<number>.json.

Each is a group of nodes behind those of the run's plan, and its seats stay its own when it is gone.
Two who ask at once get different ones: a file lands once (`write_first`), and whoever comes second
reads what the first one took and asks again.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, List, Optional, Sequence

from varuna_core.records.files import list_names, read_json, write_first, write_json
from varuna_core.records.plan import GroupPlan, Plan, parse_group
from varuna_core.records.runfolder import MorphFolder


@dataclass(frozen=True)
class Join:
    """joins/<number>.json: what was asked for; it never changes."""

    number: int
    group: GroupPlan
    asked: float
    """When, in seconds since the epoch."""
    host: str
    pid: int
    """Who asked, on `host`, as long as there is no job."""
    pid_start: Optional[str]
    by_itself: bool = False
    """Whether the run asked for it (`vjob tend`), and no person."""

    @property
    def name(self) -> str:
        """That of its group, batch script and logs."""
        return self.group.name

    @property
    def seats(self) -> range:
        return range(self.group.first_node, self.group.first_node + self.group.count)


@dataclass(frozen=True)
class JoinJob:
    """joins/<number>.job.json: what became of it in the scheduler."""

    job: Optional[str]
    """None where it refused."""
    reason: str = ""


def read_joins(folder: MorphFolder) -> List[Join]:
    """In the order in which seats were given out."""
    names = set(list_names(folder.joins))
    found: List[Join] = []
    while f"{len(found)}.json" in names:
        join = _parse(read_json(folder.join(len(found))))
        if join is None:
            break  # of another version
        found.append(join)
    return found


def read_join_job(folder: MorphFolder, join: Join) -> Optional[JoinJob]:
    """None as long as the scheduler has not answered."""
    value = read_json(folder.join_job(join.number))
    if not isinstance(value, dict):
        return None
    with contextlib.suppress(TypeError):
        return JoinJob(**value)
    return None


def write_join_job(folder: MorphFolder, join: Join, value: JoinJob) -> None:
    write_json(folder.join_job(join.number), asdict(value))


def reserve(folder: MorphFolder, build: Callable[[Sequence[Join]], Join]) -> Join:
    """The join that `build` makes of those before it, which it may refuse by raising."""
    folder.make()
    while True:
        join = build(read_joins(folder))
        if write_first(folder.join(join.number), asdict(join)):
            return join


def widen(plan: Plan, joins: Sequence[Join]) -> Plan:
    """The run's plan with the nodes that were asked for later behind its own."""
    if not joins or plan.morphing is None:
        return plan
    joined = sum(join.group.count for join in joins)
    return replace(
        plan,
        groups=(*plan.groups, *(join.group for join in joins)),
        morphing=replace(plan.morphing, joined=joined),
    )


def _parse(value: Any) -> Optional[Join]:
    with contextlib.suppress(TypeError, KeyError):
        return Join(**{**value, "group": parse_group(value["group"])})
    return None
