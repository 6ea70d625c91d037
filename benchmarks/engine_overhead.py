"""What the engine adds to an action beyond the model's own work.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.engine_overhead [--write]

Two stages, two processes, a core each. In each round a step is traced and then each stage's own
forward and backward are called alone, on the same inputs; the difference of the medians is the
engine's: random streams, messages out, bookkeeping. The wait for a message is left out, so actions
are timed from the moment they had theirs. By wall clock, or on a busy machine (`--cpu`) by the CPU
time of the thread that runs the actions.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.varuna_core.models import Gpt, make_inputs
from varuna_core import Varuna, engine
from varuna_core.stage import Stage

RESULT = Path(__file__).parent / "results" / "engine_overhead.md"
BOUND_US = 100
NUM_MICROBATCHES, SIZE = 16, 4

Times = dict[str, list[float]]


def time_alone(stage: Stage, inputs: Any, clock: Callable[[], float]) -> Times:
    """Forward and backward of one stage without an engine, in microseconds."""
    spec = None if stage.is_first else stage.record.cuts[stage.segments.start - 1].specs[0]
    times: Times = {"F": [], "B": []}
    for _ in range(NUM_MICROBATCHES):
        received = None if spec is None else [torch.randn(SIZE, *spec.shape[1:])]
        begin = clock()
        out = stage.forward(inputs, received)
        middle = clock()
        tensors = [out] if stage.is_last else list(out.tensors)
        gradients = [torch.ones_like(tensor) for tensor in tensors]
        again = clock()
        torch.autograd.backward(tensors, gradients)
        times["F"].append((middle - begin) * 1e6)
        times["B"].append((clock() - again) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})  # type: ignore[operator]
    clock = time.thread_time if options.cpu else time.perf_counter
    engine.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]  # its own clock
    torch.manual_seed(0)
    traced: Times = {"F": [], "B": []}

    def trace(action: str, begin: float, ready: float, end: float) -> None:
        kind = "F" if "F" in action else "B"
        traced[kind].append((end - ready) * 1e6)

    model = Gpt(options.blocks, options.dropout)
    batch = make_inputs(SIZE * NUM_MICROBATCHES)
    varuna = Varuna(
        model,
        "0;1;",
        make_inputs(SIZE),
        SIZE * NUM_MICROBATCHES,
        SIZE,
        device="cpu",
        schedule="1f1b",
        trace=trace,
    )
    extra: dict[str, list[float]] = {"F": [], "B": []}
    alone = {"F": 0.0, "B": 0.0}
    for number in range(options.rounds + 3):
        for times in traced.values():
            times.clear()
        varuna.step(batch)
        varuna.zero_grad()
        bare = time_alone(varuna.part.stages[0], make_inputs(SIZE), clock)
        varuna.zero_grad()
        dist.barrier()
        if number < 3:
            continue
        for kind in "FB":
            alone[kind] = statistics.median(bare[kind])
            extra[kind].append(statistics.median(traced[kind]) - alone[kind])
    rows = []
    for kind in "FB":
        figures = sorted(extra[kind])
        shown = " | ".join(
            f"{f:.0f}" for f in (figures[0], statistics.median(figures), figures[-1])
        )
        rows.append(f"| stage {rank} | {kind} | {alone[kind]:.0f} | {BOUND_US} | {shown} |")
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rows)
    text = f"""# The engine: what it adds to an action

Made by `python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.engine_overhead
--rounds {options.rounds}{" --cpu" * options.cpu} --write`. torch {torch.__version__}, Python
{platform.python_version()}, {platform.machine()}, one thread a process, {NUM_MICROBATCHES}
micro-batches a round, two stages of {options.blocks // 2} small blocks each,
microseconds{" of CPU time" * options.cpu}:

| | action | alone | bound of the rest | smallest | median | largest |
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
