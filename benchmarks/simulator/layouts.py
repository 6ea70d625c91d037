"""Launches of the simulator's benchmark: their numbers of processes, and the layouts of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from varuna_core.planner.model.cluster import NodeKind

LEFT, RIGHT = "left", "right"
"""The two nodes, and the kinds of GPU that they stand for."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to train the launch's model; ranks go stage by stage, replicas side by side."""

    ranks: int = 1
    """Of each replica."""
    replicas: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: Literal["none", "full"] = "none"
    counts: tuple[int, ...] = ()
    """Segments of each stage."""
    zero: int = 0

    @property
    def name(self) -> str:
        words = [
            f"P{self.ranks} D{self.replicas}",
            self.schedule,
            f"micro-batch {self.micro_batch}",
        ]
        words += ["recompute"] * (self.recompute == "full" and self.schedule != "varuna")
        words += [f"zero {self.zero}"] * bool(self.zero)
        return ", ".join([*words, "-".join(map(str, self.counts))])

    @property
    def stage_map(self) -> list[list[int]]:
        d = self.replicas
        return [[place * d + replica for replica in range(d)] for place in range(self.ranks)]

    @property
    def stages_per_rank(self) -> int:
        return len(self.counts) // self.ranks

    @property
    def bounds(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.counts))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes that are started once: a model, a profile of it, and layouts in turn."""

    title: str
    ranks: int
    model: Literal["gpt", "waits"]
    batch: int
    layouts: tuple[Layout, ...]
    slow_right: float = 1.0
    """How much longer the second half of the ranks takes for everything."""
    rate_mbit: float = 0.0
    """Mbit/s of the link between the two halves; 0: all are on one node."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the model."""

    @property
    def nodes(self) -> list[str]:
        """List the node of each rank."""
        return [node.name for node in self.node_kinds for _ in range(node.gpus)]

    @property
    def kinds(self) -> list[str]:
        """List the kind of GPU that each rank stands for."""
        return [node.gpu for node in self.node_kinds for _ in range(node.gpus)]

    @property
    def node_kinds(self) -> list[NodeKind]:
        """The nodes as the planner has them."""
        if not self.rate_mbit and self.slow_right == 1:
            return [NodeKind(name=LEFT, gpu=LEFT, gpus=self.ranks, count=1)]
        other = LEFT if self.slow_right == 1 else RIGHT
        half = self.ranks // 2
        return [
            NodeKind(name=name, gpu=gpu, gpus=half, count=1)
            for name, gpu in ((LEFT, LEFT), (RIGHT, other))
        ]


GPT = {"layers": 6, "hidden": 128, "heads": 4, "sequence": 256, "vocab": 1024, "dropout": 0.0}
"""Narrow, a thousand tokens a micro-batch: a segment that is profiled alone finds its weights in
the cache, in a stage it may not, and here they are next to nothing."""


def _gpt(**fields: Any) -> Layout:
    return Layout(micro_batch=fields.pop("micro_batch", 4), **fields)


ALONE = Launch(
    title="one process, real arithmetic",
    ranks=1,
    model="gpt",
    batch=32,
    options=GPT,
    layouts=(
        _gpt(counts=(8,)),
        _gpt(counts=(8,), micro_batch=8),
        _gpt(counts=(8,), schedule="gpipe", recompute="full"),
    ),
)

PAIR = Launch(
    title="two processes, a core each, real arithmetic",
    ranks=2,
    model="gpt",
    batch=32,
    options=GPT,
    layouts=(
        _gpt(ranks=2, counts=(4, 4)),
        _gpt(ranks=2, counts=(4, 4), schedule="gpipe"),
        _gpt(ranks=2, counts=(4, 4), recompute="full"),
        _gpt(ranks=2, counts=(4, 4), schedule="varuna", recompute="full"),
        _gpt(ranks=2, counts=(6, 2)),
        _gpt(ranks=2, counts=(4, 4), micro_batch=8),
        _gpt(replicas=2, counts=(8,)),
        _gpt(replicas=2, counts=(8,), micro_batch=8, zero=1),
        _gpt(ranks=2, counts=(2, 2, 2, 2), schedule="interleaved"),
        _gpt(ranks=2, counts=(2, 1, 1, 1, 1, 2), schedule="interleaved"),
        _gpt(ranks=2, counts=(2, 2, 2, 2), schedule="zbv"),
        _gpt(ranks=2, counts=(3, 2, 2, 1), schedule="zbv"),
    ),
)

WAIT_S = 0.008
"""Of each of a usual block's three parts."""
SHARES = (1, 1, 0.5, 1, 1.5, 1, 1, 1, 2, 1, 0.5, 1, 1, 1, 1, 1.5)
WAITS = {"seconds": [WAIT_S * share for share in SHARES], "message": 100_000}
"""A message is 400 kB: 16 ms on the slow link, as a forward of two blocks."""


def _waits(*counts: int, stages_per_rank: int = 1, **fields: Any) -> Layout:
    """The first and the last stage hold a segment more: what is outside all blocks."""
    all_counts = (counts[0] + 1, *counts[1:-1], counts[-1] + 1)
    return Layout(ranks=len(counts) // stages_per_rank, counts=all_counts, **fields)


def _rounds(*counts: int, stages_per_rank: int, **fields: Any) -> Layout:
    return _waits(*counts, schedule="interleaved", stages_per_rank=stages_per_rank, **fields)


def _v(*counts: int, **fields: Any) -> Layout:
    return _waits(*counts, schedule="zbv", stages_per_rank=2, **fields)


FOUR = Launch(
    title="4 processes, timed waits",
    ranks=4,
    model="waits",
    batch=8,
    options=WAITS,
    layouts=(
        _waits(4, 4, 4, 4),
        _waits(6, 5, 3, 2, schedule="gpipe"),
        _waits(5, 4, 4, 3, recompute="full"),
        _waits(8, 8, replicas=2),
        _waits(9, 7, replicas=2, micro_batch=2),
        _rounds(2, 2, 2, 2, 2, 2, 2, 2, stages_per_rank=2),
        _rounds(2, 1, 1, 2, 2, 1, 1, 1, 2, 1, 1, 1, stages_per_rank=3, recompute="full"),
        _rounds(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, stages_per_rank=4),
        _v(2, 2, 2, 2, 2, 2, 2, 2),
        _v(3, 2, 2, 1, 3, 2, 2, 1),
        _v(3, 2, 2, 1, 3, 2, 2, 1, recompute="full"),
        _v(4, 4, 4, 4, replicas=2),
    ),
)

EIGHT = Launch(
    title="8 processes on two nodes, a slow link between them, timed waits",
    ranks=8,
    model="waits",
    batch=8,
    rate_mbit=200.0,
    options=WAITS,
    layouts=(
        _waits(2, 2, 2, 2, 2, 2, 2, 2),
        _waits(2, 2, 2, 2, 2, 2, 2, 2, schedule="varuna", recompute="full"),
        _waits(4, 2, 2, 2, 2, 2, 1, 1, schedule="gpipe"),
        _waits(4, 4, 4, 4, replicas=2),
        _waits(4, 4, 4, 4, replicas=2, schedule="varuna", recompute="full"),
        _rounds(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, stages_per_rank=2),
        _rounds(2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1, stages_per_rank=3, replicas=2),
        _v(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1),
        _v(3, 2, 2, 2, 2, 2, 2, 1, replicas=2),
    ),
)

SIXTEEN = Launch(
    title="16 processes on two kinds of node, one half as fast, timed waits",
    ranks=16,
    model="waits",
    batch=8,
    slow_right=2.0,
    options=WAITS,
    layouts=(
        _waits(2, 2, 2, 2, 2, 2, 2, 2, replicas=2),
        _waits(3, 3, 3, 2, 2, 1, 1, 1, replicas=2),
        _waits(3, 3, 2, 2, 2, 2, 1, 1, replicas=2, schedule="varuna", recompute="full"),
        _waits(4, 3, 3, 2, 1, 1, 1, 1, replicas=2, schedule="gpipe", zero=1),
        _v(3, 3, 1, 1, 1, 1, 3, 3, replicas=4),
    ),
)

WIDE = {**GPT, "layers": 12, "hidden": 1024, "heads": 16, "sequence": 512, "vocab": 8192}
GPU_ALONE = Launch(
    title="one process on a GPU",
    ranks=1,
    model="gpt",
    batch=32,
    options=WIDE,
    layouts=(
        _gpt(counts=(14,), micro_batch=2),
        _gpt(counts=(14,)),
        _gpt(counts=(14,), micro_batch=8),
        _gpt(counts=(14,), micro_batch=16),
        _gpt(counts=(14,), schedule="gpipe", recompute="full"),
        _gpt(counts=(14,), schedule="gpipe", recompute="full", micro_batch=8),
    ),
)
GPU_PAIR = Launch(
    title="two processes, a GPU each",
    ranks=2,
    model="gpt",
    batch=32,
    options=WIDE,
    layouts=(
        _gpt(ranks=2, counts=(7, 7)),
        _gpt(ranks=2, counts=(7, 7), schedule="gpipe"),
        _gpt(ranks=2, counts=(9, 5)),
        _gpt(ranks=2, counts=(7, 7), schedule="varuna", recompute="full"),
        _gpt(replicas=2, counts=(14,)),
        _gpt(replicas=2, counts=(14,), micro_batch=8, zero=1),
    ),
)
"""Not on a shared GPU: a profile says nothing of how two processes take turns on it."""

LAUNCHES = (ALONE, PAIR, FOUR, EIGHT, SIXTEEN)


def rebuild(fields: dict[str, Any]) -> Launch:
    """From what `dataclasses.asdict` made, through JSON."""
    layouts = tuple(Layout(**{**one, "counts": tuple(one["counts"])}) for one in fields["layouts"])
    return Launch(**{**fields, "layouts": layouts})


QUICK = (replace(PAIR, layouts=PAIR.layouts[:2]), replace(FOUR, layouts=FOUR.layouts[:2]))
