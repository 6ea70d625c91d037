"""Prepare a snapshot for the live views: a row for each node, built in the thread that reads.

With thousands of nodes this is the work that grows; a screen's own thread then only sorts, filters
and renders the visible rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from varuna_core.records.formatting import join_numbers
from vjob.jobs.monitor.model.snapshot import Gpu, Line, Node, Rank, Snapshot, Verdict
from vjob.shelf.view.formats import format_age, format_memory, format_seconds
from vjob.shelf.view.table import REST, Cell, Column, Tone

PROCESS_STATES = {"D": "waits for disk", "T": "stopped", "Z": "zombie"}


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """Row of the node table; None marks what is not known."""

    node: Node
    index: int
    """Position in the snapshot, the initial order of rows."""
    is_culprit: bool
    ranks: str
    stages: str
    state: str
    is_bad: bool
    """True if `state` is a problem."""
    beat_age_s: float | None
    log_age_s: float | None
    step: int | None
    is_since_resume: bool
    """True if `step` counts from where this attempt resumed, not from the start of the training."""
    step_s: float | None
    utilization: float | None
    """Mean utilization of the node's GPUs."""
    cpu_percent: float | None
    """Utilization of the node's processors, if it has no GPU data."""
    memory: float | None
    """Percentage used, on the GPU with the least free memory."""
    temperature: float | None
    error: str
    words: str
    """Text that the filter searches, in lower case."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A snapshot with its verdict and rows."""

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
    state, is_bad = _judge_node(snapshot, node, ranks)
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
        beat_age_s=_find_age(snapshot, node.beat_at),
        log_age_s=_find_age(snapshot, node.log_at),
        step=max((rank.step for rank in ranks if rank.step is not None), default=None),
        is_since_resume=any(rank.is_counted for rank in ranks) and _is_resumed(snapshot),
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


def _is_resumed(snapshot: Snapshot) -> bool:
    progress = snapshot.progress
    return progress is not None and not progress.is_counted and (progress.first_step or 0) > 1


def _judge_node(snapshot: Snapshot, node: Node, ranks: list[Rank]) -> tuple[str, bool]:
    """Return the worst known fact about a node, and True if it is a problem."""
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
    is_over = snapshot.record_state == "ended"
    return "" if is_over and node.phase != "done" else node.phase, False


def _find_memory(gpus: list[Gpu]) -> float | None:
    shares = [
        100 * gpu.memory_used_mb / gpu.memory_total_mb
        for gpu in gpus
        if gpu.memory_used_mb is not None and gpu.memory_total_mb
    ]
    return max(shares, default=None)


def _find_age(snapshot: Snapshot, at: float | None) -> float | None:
    return None if at is None else max(0.0, snapshot.now - at)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


# Columns.

LATE_S = 120.0
"""Seconds after which a sign of life is highlighted; the verdict decides if it is wrong."""
HOT = 85.0
FULL = 97.0
IDLE = 5.0


def _age(age_s: float | None) -> Cell:
    is_late = age_s is not None and age_s > LATE_S
    return Cell(format_age(age_s), Tone.BAD if is_late else Tone.PLAIN)


def _busy(percent: float | None) -> Cell:
    if percent is None:
        return Cell()
    return Cell(f"{percent:.0f}%", Tone.BAD if percent < IDLE else Tone.GOOD, percent)


def _number(value: float | None, unit: str = "", *, most: float = math.inf) -> Cell:
    if value is None:
        return Cell()
    return Cell(f"{value:.0f}{unit}", Tone.BAD if value > most else Tone.PLAIN)


NODE_COLUMNS = (
    Column[NodeRow](
        title="node", width=12, place=0,
        show=lambda row: Cell(row.node.name, Tone.STRONG if row.is_culprit else Tone.PLAIN),
        key=lambda row: row.index,
    ),
    Column[NodeRow](
        title="group", width=8, place=11,
        show=lambda row: Cell(row.node.group),
        key=lambda row: row.node.group or None,
    ),
    Column[NodeRow](
        title="ranks", width=9, place=9,
        show=lambda row: Cell(row.ranks),
        key=lambda row: min(row.node.ranks, default=None),
    ),
    Column[NodeRow](
        title="stage", width=5, place=8,
        show=lambda row: Cell(row.stages), key=lambda row: row.stages or None,
    ),
    Column[NodeRow](
        title="state", width=16, place=1,
        show=lambda row: Cell(row.state, Tone.BAD if row.is_bad else Tone.PLAIN),
        key=lambda row: f"{not row.is_bad}{row.state}" if row.state else None,
    ),
    Column[NodeRow](
        title="beat", width=5, place=4, is_number=True, first_down=True,
        show=lambda row: _age(row.beat_age_s), key=lambda row: row.beat_age_s,
    ),
    Column[NodeRow](
        title="log", width=4, place=6, is_number=True, first_down=True,
        show=lambda row: _age(row.log_age_s), key=lambda row: row.log_age_s,
    ),
    Column[NodeRow](
        title="step", width=7, place=2, is_number=True,
        show=lambda row: Cell(
            "" if row.step is None else f"{'+' * row.is_since_resume}{row.step}"
        ),
        key=lambda row: row.step,
    ),
    Column[NodeRow](
        title="s/step", width=7, place=7, is_number=True, first_down=True,
        show=lambda row: Cell(format_seconds(row.step_s)),
        key=lambda row: row.step_s,
    ),
    Column[NodeRow](
        title="GPU", width=10, place=3, is_fixed=True,
        show=lambda row: _busy(row.utilization), key=lambda row: row.utilization,
    ),
    Column[NodeRow](
        title="CPU", width=10, place=3, is_fixed=True,
        show=lambda row: _busy(row.cpu_percent), key=lambda row: row.cpu_percent,
    ),
    Column[NodeRow](
        title="mem", width=4, place=10, is_number=True, first_down=True,
        show=lambda row: _number(row.memory, "%", most=FULL), key=lambda row: row.memory,
    ),
    Column[NodeRow](
        title="temp", width=5, place=12, is_number=True, first_down=True,
        show=lambda row: _number(row.temperature, "C", most=HOT),
        key=lambda row: row.temperature,
    ),
    Column[NodeRow](
        title="error", width=REST, place=5,
        show=lambda row: Cell(row.error, Tone.BAD), key=lambda row: row.error or None,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class GpuRow:
    node: str
    gpu: Gpu


def list_gpus(rows: Iterable[NodeRow]) -> list[GpuRow]:
    return [
        GpuRow(row.node.name, gpu) for row in rows for gpu in row.node.gpus if gpu.index != "cpu"
    ]


def list_troubles(gpu: Gpu) -> list[str]:
    """Return the problems of a GPU as phrases."""
    return [
        *([f"held down: {gpu.held_down}"] if gpu.held_down else []),
        *([f"{gpu.ecc_errors} ECC errors"] if gpu.ecc_errors else []),
        *([f"{gpu.num_foreign} foreign processes"] if gpu.num_foreign else []),
        *(["no process"] if gpu.num_processes == 0 else []),
    ]


GPU_COLUMNS = (
    Column[GpuRow](
        title="node", width=12, place=0,
        show=lambda row: Cell(row.node), key=lambda row: row.node,
    ),
    Column[GpuRow](
        title="GPU", width=4, place=0,
        show=lambda row: Cell(row.gpu.index), key=lambda row: row.gpu.index,
    ),
    Column[GpuRow](
        title="kind", width=20, place=1,
        show=lambda row: Cell(row.gpu.name), key=lambda row: row.gpu.name or None,
    ),
    Column[GpuRow](
        title="busy", width=10, place=1,
        show=lambda row: _busy(row.gpu.utilization), key=lambda row: row.gpu.utilization,
    ),
    Column[GpuRow](
        title="memory", width=14, place=1,
        show=lambda row: Cell(format_memory(row.gpu.memory_used_mb, row.gpu.memory_total_mb)),
        key=lambda row: row.gpu.memory_used_mb,
    ),
    Column[GpuRow](
        title="temp", width=5, place=1, is_number=True,
        show=lambda row: _number(row.gpu.temperature, "C", most=HOT),
        key=lambda row: row.gpu.temperature,
    ),
    Column[GpuRow](
        title="power", width=6, place=1, is_number=True,
        show=lambda row: _number(row.gpu.power_w, " W"), key=lambda row: row.gpu.power_w,
    ),
    Column[GpuRow](
        title="trouble", width=REST, place=1,
        show=lambda row: Cell("; ".join(list_troubles(row.gpu)), Tone.BAD),
        key=lambda row: "; ".join(list_troubles(row.gpu)) or None,
    ),
)  # fmt: skip
