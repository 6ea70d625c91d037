"""Snapshot prepared for the screen: one row a node, made in the thread that reads.

With thousands of nodes this is the work that grows; the screen's own thread then only sorts,
filters and writes out the rows that are seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from varuna_core.records.formatting import join_numbers
from vjob.jobs.monitor.model.snapshot import Gpu, Line, Node, Rank, Snapshot, Verdict

PROCESS_STATES = {"D": "waits for disk", "T": "stopped", "Z": "zombie"}


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """Row of the node table; None where nothing tells."""

    node: Node
    index: int
    """Its place in the snapshot: how rows are ordered at first."""
    is_culprit: bool
    ranks: str
    stages: str
    state: str
    is_bad: bool
    """`state` says that something is wrong."""
    beat_age_s: float | None
    log_age_s: float | None
    step: int | None
    step_s: float | None
    utilization: float | None
    """Mean of its GPUs."""
    cpu_percent: float | None
    """Of its processors, where it has no GPUs to tell of."""
    memory: float | None
    """Percent, of the GPU that has least left."""
    temperature: float | None
    error: str
    words: str
    """Text that the filter searches, in lower case."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A snapshot, its verdict and its rows."""

    snapshot: Snapshot
    verdict: Verdict
    rows: tuple[NodeRow, ...]

    @classmethod
    def make(cls, snapshot: Snapshot, verdict: Verdict) -> View:
        ranks: dict[str, list[Rank]] = {}
        for rank in snapshot.ranks:
            ranks.setdefault(rank.node, []).append(rank)
        errors: dict[str, Line] = {}
        for line in snapshot.errors:
            errors.setdefault(line.node, line)
        rows = tuple(
            _make_row(
                snapshot,
                verdict,
                index,
                ranks.get(node.name, []),
                errors.get(node.name),
            )
            for index, node in enumerate(snapshot.nodes)
        )
        return cls(snapshot=snapshot, verdict=verdict, rows=rows)

    def find_row(self, name: str | None) -> NodeRow | None:
        return next((row for row in self.rows if row.node.name == name), None)


def _make_row(
    snapshot: Snapshot, verdict: Verdict, index: int, ranks: list[Rank], error: Line | None
) -> NodeRow:
    node = snapshot.nodes[index]
    numbers = node.ranks or tuple(rank.rank for rank in ranks)
    is_culprit = node.name == verdict.node or (
        verdict.rank is not None and not verdict.node and verdict.rank in numbers
    )
    state, is_bad = _find_state(snapshot, node, ranks)
    stages = join_numbers(stage for rank in ranks for stage in rank.stages)
    gpus = [gpu for gpu in node.gpus if gpu.index != "cpu"]
    row = NodeRow(
        node=node,
        index=index,
        is_culprit=is_culprit,
        ranks=join_numbers(numbers),
        stages=stages,
        state=state,
        is_bad=is_bad,
        beat_age_s=_age(snapshot, node.beat_at),
        log_age_s=_age(snapshot, node.log_at),
        step=max((rank.step for rank in ranks if rank.step is not None), default=None),
        step_s=max((rank.step_s for rank in ranks if rank.step_s is not None), default=None),
        utilization=_mean(gpu.utilization for gpu in gpus),
        cpu_percent=None if gpus else node.cpu_percent,
        memory=_find_memory(gpus),
        temperature=max(
            (gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None
        ),
        error=error.text if error else "",
        words="",
    )
    devices = " ".join({gpu.name for gpu in gpus})
    words = (node.name, node.group, state, row.error, devices, "culprit" if is_culprit else "")
    return replace(row, words=" ".join(words).lower())


def _find_state(snapshot: Snapshot, node: Node, ranks: list[Rank]) -> tuple[str, bool]:
    """The worst that is known of a node, and whether it is bad."""
    lost = snapshot.scheduler.lost_nodes.get(node.name)
    if lost is not None:
        return lost.lower() or "lost", True
    exits = [rank.exit for rank in ranks if rank.exit is not None]
    failed = [item for item in exits if item.code != 0 and not item.stopped]
    if failed:
        first = min(failed, key=lambda item: item.ended)
        return f"rank {first.rank} {first.signal or f'exited {first.code}'}", True
    for letter, word in PROCESS_STATES.items():
        number = sum(rank.process_state == letter and rank.exit is None for rank in ranks)
        if number:
            return f"{number} {word}" if len(ranks) > 1 else word, True
    if exits and all(item.stopped for item in exits):
        return "ended by us", False
    return node.phase, False


def _find_memory(gpus: list[Gpu]) -> float | None:
    shares = [
        100 * gpu.memory_used_mb / gpu.memory_total_mb
        for gpu in gpus
        if gpu.memory_used_mb is not None and gpu.memory_total_mb
    ]
    return max(shares, default=None)


def _age(snapshot: Snapshot, at: float | None) -> float | None:
    return None if at is None else max(0.0, snapshot.now - at)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
