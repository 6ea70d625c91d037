"""Cost that the engine adds to an action: seeding, messages, threads, receive buffers.

Two processes, gpipe on a tiny model, so that forwards follow forwards and backwards backwards. A
rank whose part is the larger one never waits: the message it takes is there, the one it sends
finds room. The time of its actions, messages included, less that of the same stage's bare forward
and backward in the same round, is what the engine adds. The processor's time of all threads, which
a busy machine does not stretch, is told beside it.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline import jobs, models
from benchmarks.pipeline.ranks import gather, pin, run_ranks, serve
from benchmarks.pipeline.rounds import split_spelling
from benchmarks.pipeline.table import Bound, Part, Table

NUM_RANKS = 2
BOUND_US = 100.0
NUM_MICROBATCHES = 32
STEPS_A_ROUND = 4
LAYOUTS = {0: "4-2", 1: "2-4"}
"""Of 6 blocks, by the rank that has more."""
WORDS = {(0, "F"): "sends", (0, "B"): "takes", (1, "F"): "takes", (1, "B"): "sends"}
CPU = "processor"
NUM_SHOWN = 14
BUFFERS_OF = (8, 64)
"""Numbers of micro-batches between which the count of received tensors is not to grow."""


def make_model() -> models.Gpt:
    return models.Gpt(blocks=6, width=64, heads=2, vocab=64, length=16)


def build_job(rank: int, partition: str, schedule: str, num_microbatches: int) -> jobs.Job:
    model = make_model()
    batch = model.make_batch(num_microbatches)
    return jobs.build_ours(jobs.Ours(schedule=schedule), model, batch, 1, NUM_RANKS, partition)


def time_engine(job: jobs.Job) -> dict[str, list[float]]:
    """Microseconds of each action by kind, its messages included; and of processor, an action."""
    job.forget()
    job.clear()
    dist.barrier()
    job.time_step()
    cpu_us = job.engine_cpu[-1] / len(job.traces[-1]) * 1e6
    found: dict[str, list[float]] = {"F": [], "B": [], CPU: [cpu_us]}
    for spelled, begin, _, end in job.traces[-1]:
        found[split_spelling(spelled)[1]].append((end - begin) * 1e6)
    return found


def time_bare(job: jobs.Job) -> dict[str, list[float]]:
    """The same work as the model's author would write it."""
    stage, model = job.varuna.part.stages[0], make_model()
    batch = model.make_batch(1)
    width = model.head.norm.normalized_shape[0]
    shape = (1, model.length, width)
    job.clear()
    found: dict[str, list[float]] = {"F": [], "B": []}
    outputs = []
    received = [[torch.randn(shape)] for _ in range(NUM_MICROBATCHES)]
    gradient = None if stage.is_last else torch.randn(shape)
    dist.barrier()
    cpu = time.process_time()
    for each in received:
        begin = time.perf_counter()
        output = stage.forward(batch, None if stage.is_first else each)
        found["F"].append((time.perf_counter() - begin) * 1e6)
        outputs.append(output if stage.is_last else output.tensors[0])
    for output in outputs:
        begin = time.perf_counter()
        torch.autograd.backward(output, gradient)
        found["B"].append((time.perf_counter() - begin) * 1e6)
    found[CPU] = [(time.process_time() - cpu) / (2 * NUM_MICROBATCHES) * 1e6]
    return found


def profile_engine(job: jobs.Job) -> list[str]:
    """Rows of own time an action by function, the dearest first; the profiler slows calls."""
    profile = cProfile.Profile()
    run = job.varuna.engine.run

    def profiled(*args: Any, **kwargs: Any) -> Any:
        profile.enable()
        try:
            return run(*args, **kwargs)
        finally:
            profile.disable()

    job.varuna.engine.run = profiled
    for _ in range(STEPS_A_ROUND):
        job.clear()
        dist.barrier()
        job.run()
    job.varuna.engine.run = run
    actions = 2 * NUM_MICROBATCHES * STEPS_A_ROUND
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    dearest = sorted(stats.items(), key=lambda item: -item[1][2])[:NUM_SHOWN]
    return [
        f"| `{Path(file).name}:{name}` | {calls / actions:.2f} | {own / actions * 1e6:.1f} |"
        for (file, _, name), (_, calls, own, *_) in dearest
    ]


def count_received(job: jobs.Job) -> int:
    """The most tensors of a message's shape alive on this rank in one step, beyond those before."""
    shape = (1, make_model().length, make_model().head.norm.normalized_shape[0])
    counts: list[int] = []

    def count() -> None:
        storages = {
            each.untyped_storage().data_ptr()
            for each in gc.get_objects()
            if isinstance(each, Tensor) and each.shape == shape
        }
        counts.append(len(storages))

    job.clear()
    job.run()
    job.clear()
    count()
    dist.barrier()
    job.on_action = count
    job.run()
    job.on_action = None
    return max(counts) - counts[0]


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank."""
    torch.manual_seed(0)
    built = {
        large: build_job(rank, partition, "gpipe", NUM_MICROBATCHES)
        for large, partition in LAYOUTS.items()
    }
    holding = {m: build_job(rank, LAYOUTS[1], "1f1b", m) for m in BUFFERS_OF}
    for job in built.values():
        job.run()
    pin(rank)
    rounds: dict[str, list[tuple[float, float]]] = {}
    profiles = {}
    for large, job in built.items():
        for _ in range(options["rounds"]):
            taken: dict[str, list[float]] = {"F": [], "B": [], CPU: []}
            bare: dict[str, list[float]] = {"F": [], "B": [], CPU: []}
            for _ in range(STEPS_A_ROUND):
                for into, once in ((taken, time_engine(job)), (bare, time_bare(job))):
                    for kind, times in once.items():
                        into[kind] += times
            for kind in taken:
                pair = (statistics.median(taken[kind]), statistics.median(bare[kind]))
                rounds.setdefault(f"{large} {kind}", []).append(pair)
        profiles[str(large)] = gather(profile_engine(job), world)[large]
    received = {m: gather(count_received(job), world)[1] for m, job in holding.items()}
    everybodys = gather(rounds, world)
    return {
        "rounds": {key: everybodys[int(key[0])][key] for key in rounds},
        "profiles": profiles,
        "received": received,
    }


def run(options: dict[str, Any]) -> Part:
    """In the parent."""
    part = Part(title="What the engine adds to an action")
    result = run_ranks(__name__, NUM_RANKS, options)
    part.notes.append(
        f"Tiny GPT, gpipe, {NUM_MICROBATCHES} micro-batches, medians of {STEPS_A_ROUND} steps a "
        "round: the action with its messages, less the bare forward or backward."
    )
    table = Table(title="microseconds added", columns=("action", "bare"), digits=1)
    for key, pairs in result["rounds"].items():
        number, kind = key.split()
        word = WORDS.get((int(number), kind))
        name = f"{kind} that {word}" if word else f"{kind} time on rank {number}, all threads"
        more = (f"{statistics.median(column):.1f}" for column in zip(*pairs, strict=True))
        value = table.add(name, [engine - bare for engine, bare in pairs], *more)
        if word:
            part.bounds.append(Bound(what=f"{name}, us", value=value, limit=BOUND_US, digits=1))
    part.tables.append(table)
    few, many = BUFFERS_OF
    part.bounds.append(
        Bound(
            what=f"received tensors alive at once, {many} micro-batches; limit: as of {few}",
            value=result["received"][str(many)],
            limit=result["received"][str(few)],
            digits=0,
        )
    )
    for rank, rows in result["profiles"].items():
        head = f"| own time on rank {rank}, by cProfile | calls an action | us an action |"
        part.notes.append("\n".join([head, "|---|---|---|", *rows]))
    return part


if __name__ == "__main__":
    serve(work)
