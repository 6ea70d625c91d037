"""What a schedule asks of each stage, known without making it: most plans are refused before.

A schedule is made when a partition is to be timed, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Literal

from varuna_core.planner.model.compiled import Compiled, Role
from varuna_core.schedule.choice import build_schedule

Way = Literal["none", "full"]


class Work:
    """A schedule of one stage a rank: the stages' roles, and the actions once asked for."""

    def __init__(self, roles: tuple[Role, ...], make: Callable[[], Compiled]) -> None:
        self.roles, self._make = roles, make

    @cached_property
    def compiled(self) -> Compiled:
        return self._make()


@lru_cache(maxsize=1024)
def find_work(schedule: str, stages: int, num_microbatches: int, recompute: Way) -> Work:
    """Of a schedule whose order depends on no costs."""

    def make() -> Compiled:
        return Compiled(build_schedule(schedule, stages, num_microbatches, recompute=recompute))

    if schedule not in ("gpipe", "1f1b", "varuna"):
        return wrap(make())
    roles = tuple(
        _find_role(schedule, stages - 1 - stage, num_microbatches, recompute)
        for stage in range(stages)
    )
    return Work(roles, make)


def wrap(compiled: Compiled) -> Work:
    """Of a schedule that was made."""
    roles = tuple(compiled.find_role(stage) for stage in range(compiled.num_stages))
    return Work(roles, lambda: compiled)


def _find_role(schedule: str, behind: int, m: int, recompute: Way) -> Role:
    """With so many stages behind this one."""
    ahead = {"gpipe": m, "1f1b": behind + 1, "varuna": behind + 1 + (behind > 0)}[schedule]
    ahead = min(ahead, m)
    # A graph that is used at once is kept: to recompute it would save nothing.
    again = (recompute == "full" or schedule == "varuna") and ahead > 1
    held = ((1, ahead - 1), (0, ahead)) if again else ((ahead, 0),)
    return Role(
        uses=(0, m, m, m, 0, 0) if again else (m, 0, 0, m, 0, 0),
        held=held,
        ahead=ahead,
        num_microbatches=m,
        gradients_last=schedule == "gpipe",
    )
