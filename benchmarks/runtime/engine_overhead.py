"""Cost that the engine adds to an action beyond the model's own work.

    torchrun --nproc-per-node 2 -m benchmarks.runtime.engine_overhead [--write]

Two stages, two processes, a core each. In a traced step the stage's forward and the backward are
timed inside their actions; the rest of an action, from the moment it had its message, is the
engine's: random streams, messages out, bookkeeping. After each step the same forward and backward
run alone, to show what they take without threads beside them. By wall clock, or on a busy machine
(`--cpu`) by the CPU time of the thread that runs the actions.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import RESULTS
from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.runtime.engine import engine
from varuna_core.runtime.split.stage import Stage

RESULT = RESULTS / "engine_overhead.md"
BOUND_US = 100
NUM_MICROBATCHES, SIZE, WARMUP = 16, 4, 3

Times = dict[str, list[float]]


class Timed:
    """A function whose calls are timed."""

    def __init__(self, real: Callable[..., Any], clock: Callable[[], float]) -> None:
        self.real, self.clock = real, clock
        self.times_us: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self.clock()
        try:
            return self.real(*args, **kwargs)
        finally:
            self.times_us.append((self.clock() - begin) * 1e6)


def run_alone(stage: Stage, inputs: Any) -> None:
    spec: Any = None if stage.is_first else stage.record.cuts[stage.segments.start - 1].specs[0]
    for _ in range(NUM_MICROBATCHES):
        out = stage.forward(inputs, spec and [torch.randn(SIZE, *spec.shape[1:])])
        tensors = [out] if stage.is_last else list(out.tensors)
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def show(figures: list[float]) -> str:
    cut = statistics.quantiles(figures, n=10)
    return f"{cut[0]:.0f} | {statistics.median(figures):.0f} | {cut[-1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    clock = time.thread_time if options.cpu else time.perf_counter
    engine.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment,attr-defined]  # its own clock
    torch.manual_seed(0)
    actions: Times = {"F": [], "B": []}

    def trace(action: str, begin: float, ready: float, end: float) -> None:
        actions["F" if "F" in action else "B"].append((end - ready) * 1e6)

    batch = make_inputs(SIZE * NUM_MICROBATCHES)
    varuna = Varuna(
        Gpt(options.blocks),
        "0;1;",
        make_inputs(SIZE),
        SIZE * NUM_MICROBATCHES,
        SIZE,
        device="cpu",
        schedule="1f1b",
        trace=trace,
    )
    (stage,) = varuna.part.stages
    own = {"F": Timed(stage.forward, clock), "B": Timed(torch.autograd.backward, clock)}
    stage.forward = own["F"]
    torch.autograd.backward = own["B"]
    extra: Times = {"F": [], "B": []}
    alone: Times = {"F": [], "B": []}
    for number in range(options.rounds + WARMUP):
        for figures in (*actions.values(), own["F"].times_us, own["B"].times_us):
            figures.clear()
        varuna.step(batch)
        within = {kind: list(own[kind].times_us) for kind in "FB"}
        run_alone(stage, make_inputs(SIZE))
        varuna.zero_grad()
        dist.barrier()
        if number >= WARMUP:
            for kind in "FB":
                pairs = zip(actions[kind], within[kind], strict=True)
                extra[kind] += [whole - part for whole, part in pairs]
                alone[kind] += own[kind].times_us[NUM_MICROBATCHES:]
    rows = [
        f"| stage {rank} | {kind} | {statistics.median(alone[kind]):.0f} | {BOUND_US} "
        f"| {show(extra[kind])} |"
        for kind in "FB"
    ]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rows)
    text = f"""# The engine: what it adds to an action

Made by `python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runtime.engine_overhead
--rounds {options.rounds}{" --cpu" * options.cpu} --write`. torch {torch.__version__}, Python
{platform.python_version()}, {platform.machine()}, one thread a process, {NUM_MICROBATCHES}
micro-batches a round, two stages of {options.blocks // 2} small blocks each; microseconds
{"of CPU time, " * options.cpu}with {os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores:

| | action | its own work, alone | bound of the rest | first decile | median | last decile |
|---|---|---|---|---|---|---|
""" + "\n".join(row for rows in gathered for row in rows)
    if rank == 0:
        print(text)
        if options.write:
            RESULT.write_text(text + "\n")
    varuna.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
