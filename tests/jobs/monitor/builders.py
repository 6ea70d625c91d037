"""Snapshots for tests: of a healthy job, and of logs as tools print them. No reader is used.

A test takes `healthy()` and changes what is sick; or `from_log(name)`, a file of data/ with lines
such as `n061 3 err | text` (node, rank or -, stream), at most one line a row, in the order of time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests import ROOT
from varuna_core.records.exits import Outcome, RankExit
from varuna_core.records.logs.training_log import parse_iteration
from vjob.jobs.monitor.log_lines.errors import classify_line
from vjob.jobs.monitor.model.snapshot import (
    Gpu,
    JobRow,
    Line,
    Node,
    Phase,
    Point,
    Progress,
    Rank,
    Scheduler,
    Snapshot,
)
from vjob.jobs.monitor.rules.base import Rule

DATA = ROOT / "tests/jobs/monitor/data"
NOW = 1_700_000_000.0
STEP_S = 1.4
_ROW = re.compile(r"(\S+) (\d+|-) (out|err) \| ?(.*)")


def name_rule(rule: Rule) -> str:
    """The name of a rule: `no gpu process` for the function `no_gpu_process`."""
    return rule.__name__.replace("_", " ")


def make_points(
    times: Sequence[float], *, first: int = 1, every: int = 1, end: float = NOW, **facts: Any
) -> tuple[Point, ...]:
    """A point each `every` steps; the last at `end`. `times` are seconds a step."""
    left = 0.0
    points: list[Point] = []
    for number in range(len(times) - 1, -1, -1):
        told = {"loss": 5.0 - 0.001 * number, "grad_norm": 2.0, "loss_scale": 65536.0, **facts}
        step = first + number * every
        points.insert(0, Point(step=step, step_s=times[number], at=end - left, **told))
        left += times[number] * every
    return tuple(points)


def make_progress(points: tuple[Point, ...], *, num_steps: int = 5000, **facts: Any) -> Progress:
    return Progress(
        step=points[-1].step,
        num_steps=num_steps,
        at=facts.pop("at", points[-1].at),
        points=points,
        source=facts.pop("source", "n003.out"),
        first_step=points[0].step,
        **facts,
    )


def make_nodes(names: Sequence[str], ranks: int = 4, **facts: Any) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=name,
            index=index,
            ranks=tuple(range(index * ranks, (index + 1) * ranks)),
            phase="running",
            beat_at=NOW - 2,
            log_at=NOW - 1,
            gpus=tuple(
                Gpu(
                    index=str(number),
                    name="NVIDIA A10",
                    utilization=91.0,
                    memory_used_mb=15000,
                    memory_total_mb=22731,
                    temperature=61,
                    power_w=140,
                    num_processes=1,
                    num_foreign=0,
                    ecc_errors=0,
                    history=(88.0, 97.0, 90.0, 91.0),
                )
                for number in range(ranks)
            ),
            gpus_at=NOW - 5,
            memory_used_mb=100_000,
            memory_total_mb=750_000,
        )
        for index, name in enumerate(names)
    )


def make_ranks(nodes: Sequence[Node], *, step: int = 200, stages: int = 4) -> tuple[Rank, ...]:
    world = sum(len(node.ranks) for node in nodes)
    return tuple(
        Rank(
            rank=rank,
            node=node.name,
            stage=rank * stages // world,
            stages=(rank * stages // world,),
            replica=rank % max(world // stages, 1),
            pid=1000 + rank,
            process_state="R",
            cpu_percent=95.0,
            step=step,
            step_s=STEP_S,
            work_s=1.0,
            step_at=NOW - 1,
            device="NVIDIA A10",
        )
        for node in nodes
        for rank in node.ranks
    )


def healthy(num_nodes: int = 4, **facts: Any) -> Snapshot:
    """A job of Slurm's in its 200th step, on nodes n000, n001, ... with 4 GPUs each."""
    nodes = make_nodes([f"n{number:03d}" for number in range(num_nodes)])
    points = make_points([STEP_S] * 200)
    snapshot = Snapshot(
        now=NOW,
        run="gpt2-xl-20240501-100000",
        folder="log/gpt2-xl-20240501-100000",
        record_state="submitted",
        layout="job",
        submitted=NOW - 4000,
        scheduler=Scheduler(
            name="slurm", jobs=(JobRow(id="4711", state="RUNNING", nodes=f"n[000-{num_nodes}]"),)
        ),
        attempt=0,
        attempt_started=NOW - 3000,
        went_at=NOW - 2000,
        world=4 * num_nodes,
        num_nodes=num_nodes,
        num_gpus=4 * num_nodes,
        nodes=nodes,
        ranks=make_ranks(nodes),
        progress=make_progress(points),
    )
    return replace(snapshot, **facts)


def silent(snapshot: Snapshot, seconds: float) -> Snapshot:
    """The same after that time without a step; nodes go on beating."""
    now = snapshot.now + seconds
    return replace(
        snapshot,
        now=now,
        nodes=tuple(
            replace(node, beat_at=now - 2 if node.beat_at else None, gpus_at=now - 5)
            for node in snapshot.nodes
        ),
    )


def change_rank(snapshot: Snapshot, rank: int, **facts: Any) -> Snapshot:
    ranks = [replace(x, **facts) if x.rank == rank else x for x in snapshot.ranks]
    return replace(snapshot, ranks=tuple(ranks))


def change_node(snapshot: Snapshot, name: str, **facts: Any) -> Snapshot:
    nodes = [replace(x, **facts) if x.name == name else x for x in snapshot.nodes]
    return replace(snapshot, nodes=tuple(nodes))


def change_gpus(snapshot: Snapshot, name: str | None, **facts: Any) -> Snapshot:
    """Of one node, or of all."""
    nodes = [
        replace(node, gpus=tuple(replace(gpu, **facts) for gpu in node.gpus))
        if name in (None, node.name)
        else node
        for node in snapshot.nodes
    ]
    return replace(snapshot, nodes=tuple(nodes))


def with_state(snapshot: Snapshot, state: str, **facts: Any) -> Snapshot:
    jobs = tuple(replace(row, state=state, word=state, **facts) for row in snapshot.scheduler.jobs)
    return replace(snapshot, scheduler=replace(snapshot.scheduler, jobs=jobs))


def with_points(snapshot: Snapshot, points: tuple[Point, ...], **facts: Any) -> Snapshot:
    return replace(snapshot, progress=make_progress(points, **facts))


def make_line(text: str, **facts: Any) -> Line:
    return Line(text=text, kind=classify_line(text) or "", **facts)


def make_exit(rank: int, node: str, code: int, signal: str | None = None, **facts: Any) -> RankExit:
    given = {"stopped": False, "started": NOW - 900, "ended": NOW, "last_error": "", **facts}
    return RankExit(rank, node, code, signal, **given)


def make_outcome(
    code: int, reason: str, rank: int | None = None, node: str | None = None, **facts: Any
) -> Outcome:
    given = {"culprit_signal": None, "missing_ranks": [], "ended": NOW, **facts}
    return Outcome(code=code, reason=reason, culprit_rank=rank, culprit_node=node, **given)


def read_log(name: str) -> list[Line]:
    """All lines of a data file, classified."""
    lines = []
    for order, row in enumerate((DATA / f"{name}.log").read_text().splitlines()):
        match = _ROW.fullmatch(row)
        assert match is not None, f"{name}: {row}"
        node, rank, stream, text = match.groups()
        lines.append(
            make_line(
                text,
                node="" if node == "-" else node,
                rank=None if rank == "-" else int(rank),
                file=f"{node}.{stream}",
                order=order,
            )
        )
    return lines


def from_log(name: str, *, code: int | None = None, **facts: Any) -> Snapshot:
    """The job whose logs these are: running, or with a code, ended with it."""
    lines = read_log(name)
    names = list(dict.fromkeys(line.node for line in lines if line.node))
    steps = [found for line in lines if (found := parse_iteration(line.text)) is not None]
    points = tuple(
        Point(
            step=step.step,
            step_s=(step.time_ms or 0) / 1000,
            loss=step.loss,
            grad_norm=step.grad_norm,
            loss_scale=step.loss_scale,
            skipped=step.skipped or 0,
            nan=step.nan or 0,
        )
        for step in steps
    )
    snapshot = healthy(
        errors=tuple(line for line in lines if line.kind),
        nodes=tuple(
            replace(
                node,
                out=tuple(
                    x.text for x in lines if (x.node, x.file) == (node.name, f"{node.name}.out")
                ),
                err=tuple(
                    x.text for x in lines if (x.node, x.file) == (node.name, f"{node.name}.err")
                ),
            )
            for node in make_nodes(names)
        ),
        ranks=(),
        progress=None,
    )
    if points:
        progress = make_progress(points, num_steps=steps[-1].num_steps or 0, at=NOW - 1)
        snapshot = replace(snapshot, progress=progress)
    if code is not None:
        word = "COMPLETED" if code == 0 else "FAILED"
        snapshot = with_state(snapshot, word, exit_code=f"{code}:0")
    return replace(snapshot, **facts)


OOM = make_line("[rank6]: torch.OutOfMemoryError: CUDA out of memory.", node="n001", rank=6)
"""An error that ends a rank."""


def over(snapshot: Snapshot, state: str = "FAILED", **facts: Any) -> Snapshot:
    """The same, ended."""
    return replace(with_state(snapshot, state), **facts)


def starting(**facts: Any) -> Snapshot:
    """The same before its first step: the nodes meet."""
    begun = healthy(progress=None, ranks=(), went_at=None, attempt_started=NOW - 30)
    nodes = tuple(replace(node, phase="ready", gpus=()) for node in begun.nodes)
    return replace(begun, **{"nodes": nodes, **facts})


def in_phase(name: str, age: float, **facts: Any) -> Snapshot:
    """The same, so many seconds in a checkpoint or an evaluation."""
    line = make_line(f"{name} begins")
    snapshot = replace(healthy(), phase=Phase(name=name, since=NOW, line=line), **facts)
    return silent(snapshot, age)
