"""Three trainings of 300 steps, each led through eight morphs: what happens, and what is left then.

    plain   one job of a queue that others may preempt, and jobs of another queue that join it
    het     a het job of two queues; it grows from one of them, and loses its second component
    split   the same two groups as two jobs, the second of which goes, comes back, and goes for good

Six layers on a pipeline of two as asked: of 6 nodes are used 6 (3 x 2), of 5 and of 4 four (2 x 2),
of 3 three (3 x 1), of 2 two (2 x 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.theatre import Theatre


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One morph."""

    what: str
    do: Callable[[Theatre], None]
    members: int
    """Nodes of the attempt that the run is to come to."""


@dataclass(frozen=True, kw_only=True)
class Story:
    cluster: str
    members: int
    scenes: tuple[Scene, ...]


GROUPS = """nodes:
    - {group: one, count: 2, queue: gpu1, ranks: 1}
    - {group: two, count: 2, queue: gpu2, ranks: 1}
  hetero: """

PLAIN = Story(
    cluster="nodes: [{group: all, count: 4, queue: low, ranks: 1}]",
    members=4,
    scenes=(
        Scene(what="2 nodes of another queue join", do=lambda it: it.grow(2, "all"), members=6),
        Scene(what="a node loses its power", do=lambda it: it.darken(3), members=4),
        Scene(what="shrunk by 2", do=lambda it: it.shrink(2), members=3),
        Scene(
            what="preempted, and requeued with the 2 nodes that are left",
            do=Theatre.lose_all_but_two,
            members=2,
        ),
        Scene(what="all nodes are free again, 2 join", do=Theatre.grow_anew, members=4),
        Scene(what="2 more nodes join", do=lambda it: it.grow(2, "all"), members=6),
        Scene(what="their job is cancelled", do=Theatre.cancel_last_join, members=4),
        Scene(what="shrunk by 1", do=lambda it: it.shrink(1), members=3),
    ),
)

HET = Story(
    cluster=f"{GROUPS}hetjob",
    members=4,
    scenes=(
        Scene(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Scene(what="shrunk by 2", do=lambda it: it.shrink(2), members=4),
        Scene(
            what="what stays on a node of the second component is killed",
            do=lambda it: it.kill_node(3),
            members=3,
        ),
        Scene(what="warned, requeued with all nodes", do=Theatre.warn, members=4),
        Scene(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Scene(what="the second component is cancelled", do=Theatre.cancel_component, members=4),
        Scene(
            what="a node that joined loses its power",
            do=lambda it: it.darken(max(it.read_members())),
            members=3,
        ),
        Scene(what="shrunk by 1", do=lambda it: it.shrink(1), members=2),
    ),
)

SPLIT = Story(
    cluster=f"{GROUPS}split",
    members=4,
    scenes=(
        Scene(
            what="a node of the second job loses its power", do=lambda it: it.darken(3), members=3
        ),
        Scene(
            what="the second job is requeued and held",
            do=Theatre.hold_half,
            members=2,
        ),
        Scene(what="it is released, all have power", do=Theatre.release_half, members=4),
        Scene(what="2 nodes join", do=lambda it: it.grow(2, "gpu2"), members=6),
        Scene(
            what="what stays on a node of the first job is killed",
            do=lambda it: it.kill_node(1),
            members=4,
        ),
        Scene(what="warned, all jobs requeued", do=Theatre.warn, members=6),
        Scene(what="the second job is cancelled", do=Theatre.cancel_half, members=4),
        Scene(what="shrunk by 1", do=lambda it: it.shrink(1), members=3),
    ),
)

STORIES = {"plain": PLAIN, "het": HET, "split": SPLIT}
