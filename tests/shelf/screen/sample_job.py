"""Sample jobs for the screen: snapshots of any size, log lines, recorded actions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from varuna_core.facts.finding import Finding
from vjob.jobs.monitor.model.snapshot import (
    Attempt,
    Gpu,
    Health,
    JobRow,
    Line,
    Node,
    Point,
    Progress,
    Rank,
    Scheduler,
    Snapshot,
    Verdict,
)

NOW = 1_760_000_000.0
HEALTHY = Verdict(
    health=Health.HEALTHY, reason="step 1280 was done 2 s ago", main=Finding("progress")
)
EMPTY = Snapshot(now=NOW, run="bare", folder="log2/10932251", scheduler=Scheduler(name=""))


def make_snapshot(num_nodes: int, *, gpus: int = 4, num_points: int = 120) -> Snapshot:
    """One node of A100s, the rest of A10s; a pipeline of eight stages or fewer."""
    draw = random.Random(num_nodes)
    stages = min(8, num_nodes)
    nodes, ranks = [], []
    for index in range(num_nodes):
        name = f"n{60 + index:03d}"
        held = tuple(range(index * gpus, (index + 1) * gpus))
        is_first = index == 0
        nodes.append(
            Node(
                name=name,
                index=index,
                group="master" if is_first else "slave",
                ranks=held,
                phase="running",
                beat_at=NOW - draw.randrange(8),
                log_at=NOW - draw.randrange(25),
                gpus=tuple(_make_gpu(number, is_first, draw) for number in range(gpus)),
                gpus_at=NOW - 3,
                cpu_percent=draw.uniform(20, 45),
                memory_used_mb=draw.uniform(80_000, 120_000),
                memory_total_mb=774_000,
            )
        )
        ranks += [
            Rank(
                rank=rank,
                node=name,
                stage=index * stages // num_nodes,
                stages=(index * stages // num_nodes,),
                replica=rank % gpus,
                process_state="R",
                step=1280,
                step_s=draw.uniform(2.25, 2.35),
                step_at=NOW - 2,
            )
            for rank in held
        ]
    return Snapshot(
        now=NOW,
        run="gpt2-xl-1121-183144",
        folder="log/gpt2-xl-1121-183144",
        record_state="submitted",
        submitted=NOW - 5000,
        walltime_s=43_200.0,
        scheduler=Scheduler(
            name="slurm",
            jobs=(
                JobRow(id="4711+0", group="master", state="RUNNING", nodes="n060"),
                JobRow(id="4711+1", group="slave", state="RUNNING", nodes="n[061-067]"),
            ),
        ),
        attempt=1,
        attempt_started=NOW - 3120,
        went_at=NOW - 3090,
        earlier=(Attempt(number=0, reason="n064 was lost", step=410),),
        world=num_nodes * gpus,
        num_nodes=num_nodes,
        nodes=tuple(nodes),
        ranks=tuple(ranks),
        progress=Progress(
            step=1280,
            num_steps=10_000,
            at=NOW - 2,
            points=tuple(_make_point(1281 - num_points + n, draw) for n in range(num_points)),
            source="n067.out",
        ),
        checkpoint_step=1000,
        checkpoint_at=NOW - 645,
    )


def _make_gpu(number: int, is_first: bool, draw: random.Random) -> Gpu:
    total = 40_960.0 if is_first else 23_028.0
    return Gpu(
        index=str(number),
        name="NVIDIA A100-SXM4-40GB" if is_first else "NVIDIA A10",
        utilization=draw.uniform(88, 99),
        memory_used_mb=total * draw.uniform(0.7, 0.9),
        memory_total_mb=total,
        temperature=draw.uniform(61, 74),
        power_w=draw.uniform(250, 330) if is_first else draw.uniform(120, 149),
        num_processes=1,
        history=tuple(draw.uniform(70, 100) for _ in range(30)),
    )


def _make_point(step: int, draw: random.Random) -> Point:
    return Point(
        step=step,
        step_s=draw.uniform(2.2, 2.4),
        loss=6.5 - step / 500 + draw.uniform(-0.1, 0.1),
        at=NOW - 2.3 * (1280 - step),
    )


def make_slow(num_nodes: int = 8) -> tuple[Snapshot, Verdict]:
    """A mixed job that one node with a hot GPU holds back."""
    snapshot = make_snapshot(num_nodes)
    hot = snapshot.nodes[num_nodes // 2]
    gpu = replace(
        hot.gpus[1],
        utilization=100.0,
        temperature=91.0,
        power_w=62.0,
        throttle="hw_thermal",
        history=(*hot.gpus[1].history[:14], *[100.0] * 16),
    )
    waiting = [_let_wait(item) for item in hot.gpus]
    gpus = (waiting[0], gpu, *waiting[2:])
    nodes = tuple(
        replace(node, gpus=gpus if node is hot else tuple(map(_let_wait, node.gpus)))
        for node in snapshot.nodes
    )
    rank = hot.ranks[1]
    ranks = tuple(
        replace(item, step_s=4.71, work_s=3.9 if item.rank == rank else 1.8)
        for item in snapshot.ranks
    )
    line = Line(
        text="step 1275: clock held at 885 MHz (hw_thermal_slowdown), 91 C",
        node=hot.name,
        rank=rank,
        file=f"{hot.name}.err",
        kind="gpu_thermal",
    )
    assert snapshot.progress is not None
    points = tuple(
        replace(point, step_s=(point.step_s or 0) * (2.05 if number > 101 else 1))
        for number, point in enumerate(snapshot.progress.points)
    )
    verdict = Verdict(
        health=Health.SLOW,
        reason=f"rank {rank} on {hot.name} works 3.9 s per step, its peers of stage "
        f"{num_nodes // 2} 1.8 s (score 0.46)",
        main=Finding("straggler"),
        evidence=(line,),
        facts=(f"{hot.name}: 91 degrees", f"{hot.name}: hw_thermal"),
        advice="look at that node (heat, other jobs, its disk); vjob report 4711; leave it out "
        "with cluster.exclude if it stays so",
        node=hot.name,
        rank=rank,
        remarks=(
            f"GPU 1 of {hot.name} is held down (hw_thermal) and steps take 4.61 s, before 2.31 s",
        ),
    )
    progress = replace(snapshot.progress, points=points)
    slow = replace(snapshot, nodes=nodes, ranks=ranks, errors=(line,), progress=progress)
    return slow, verdict


def _let_wait(gpu: Gpu) -> Gpu:
    """As it is while another one holds the job back."""
    history = (*gpu.history[:14], *((value or 0) - 50 for value in gpu.history[14:]))
    return replace(gpu, utilization=(gpu.utilization or 0) - 50, power_w=88.0, history=history)


class Player:
    """A source that tells what it was given, the last of it again and again.

    An exception is raised; a callable is called first, and may wait.
    """

    def __init__(self, *told: tuple[Snapshot, Verdict] | Exception | Callable[[], object]) -> None:
        self.told = list(told)
        self.num_reads = 0

    def read(self) -> tuple[Snapshot, Verdict]:
        self.num_reads += 1
        told = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        while not isinstance(told, (tuple, Exception)):
            told()
            told = self.told.pop(0)
        if isinstance(told, Exception):
            raise told
        return told


@dataclass
class SampleLines:
    """Lines by node; those of all nodes where it is None."""

    by_node: dict[str | None, list[Line]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: str | None = "nobody"
    given: int = 0

    def read_new(self, node: str | None) -> list[Line]:
        with self.lock:
            if node != self.last:
                self.last, self.given = node, 0
            lines = self.by_node.get(node, [])
            new = lines[self.given :]
            self.given = len(lines)
            return new


@dataclass
class RecordedActions:
    """Remembers what was asked for."""

    lines: SampleLines = field(default_factory=SampleLines)
    cancel_text: str = "Ranks checkpoint first where they can; then jobs 4711+0 and 4711+1 end."
    asked: list[str] = field(default_factory=list)
    stacks_text: str = "2 ranks: train.py:12\n1 rank: wait [recv]"

    def cancel(self) -> str:
        self.asked.append("cancel")
        return "gpt2-xl saved and left"

    def report(self) -> str:
        self.asked.append("report")
        return "log/gpt2-xl/report.html"

    def stacks(self) -> str:
        self.asked.append("stacks")
        return self.stacks_text


def with_log(node: str | None, lines: list[Line]) -> RecordedActions:
    """Actions whose log of a node, or of all, has these lines."""
    return RecordedActions(lines=SampleLines(by_node={node: lines}))


def make_log(node: str, num_lines: int = 400) -> list[Line]:
    """A node's lines as Megatron writes them."""
    rank = 4 * (int(node[1:]) - 60)
    lines = []
    for number in range(num_lines):
        step = 1280 - (num_lines - number) // 4
        text = (
            f" iteration {step:8d}/   10000 | consumed samples: {step * 64:12d} | elapsed time per "
            f"iteration (ms): {2301.4 + number % 17:.1f} | lm loss: {6.5 - step / 500:.6E} |"
        )
        lines.append(
            Line(text=text, node=node, rank=rank + number % 4, file=f"{node}.out", order=number)
        )
    return lines
