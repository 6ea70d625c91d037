"""Links and layouts of several GPUs, with a rank on each: two parts of `make gpu8`.

    python -m benchmarks.runtime.several_gpus links|layouts [--ranks 8] [--rounds 5]

`links` sums and sends by torch.distributed alone, and names a neighbour's link that is slower than
others. `layouts` trains a GPT of gpt2-xl's size in bf16, in pipelines, replicas and tensor groups,
beside torch's own DistributedDataParallel with torch.compile on the same batches. TESTS_DEVICE=cpu
runs both in small over gloo: that shows that they run, and no figure of it says anything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pipeline import models
from benchmarks.pipeline.gpu import SIZES, SMALL, WARM_UPS, choose_compiler, time_step
from benchmarks.pipeline.ranks import gather, run_ranks, serve
from benchmarks.pipeline.table import Bound, Part, Table, ratios
from tests.ranks.device import CPU, VARIABLE, choose_device, find_kind, synchronize
from varuna_core import Options, Varuna

MESSAGES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
"""Bytes."""
SMALL_MESSAGES = MESSAGES[:3]
REPEATS = 10
MODULE = "benchmarks.runtime.several_gpus"
SLOW = 0.7
"""A link with less than this part of the median rate is named."""
NUM_MICROBATCHES, CHUNK_SIZE = 8, 2
"""Of a replica where there is one for each GPU; fewer replicas take more micro-batches each."""
TENSOR_PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
DDP = "torch's DDP, torch.compile"
AT_LEAST = 0.95
"""Of DDP's speed, for our replicas alone."""


def list_layouts(world: int) -> list[tuple[int, int, str]]:
    """Stages, ranks of a tensor group, and schedule."""
    found = [(1, 1, "1f1b")]
    found += [(stages, 1, "1f1b") for stages in (2, 4, 8) if world % stages == 0]
    found += [(world, 1, "zbv"), (world // 2, 2, "1f1b")] if world > 1 else []
    return [one for at, one in enumerate(found) if one not in found[:at]]


def name_layout(world: int, layout: tuple[int, int, str]) -> str:
    stages, tensor, schedule = layout
    name = f"ours, {stages} stage(s) x {world // (stages * tensor)} replica(s)"
    return f"{name}{f' x {tensor} by tensor' if tensor > 1 else ''}, {schedule}"


def measure_links(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    group = dist.new_group(backend="gloo" if device == CPU else "nccl")

    def take(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS + 2):
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            run()
            synchronize(device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])

    sizes = SMALL_MESSAGES if device == CPU else MESSAGES
    sums = {}
    for size in sizes:
        message = torch.ones(size // 4, device=device)
        seconds = take(lambda message=message: dist.all_reduce(message, group=group))
        sums[size] = max(gather(seconds, world))
    message, sends = torch.ones(sizes[-1] // 4, device=device), {}
    for first in range(world):
        pair = first, (first + 1) % world

        def send(pair: tuple[int, int] = pair) -> None:
            if rank == pair[0]:
                dist.send(message, pair[1], group=group)
            elif rank == pair[1]:
                dist.recv(message, pair[0], group=group)

        sends[f"{pair[0]} to {pair[1]}"] = sizes[-1] / gather(take(send), world)[pair[1]] / 1e9
    rates = {f"{size >> 10} KiB": [took, 2 * (world - 1) / world * size / took / 1e9]
             for size, took in sums.items()}  # fmt: skip
    return {"sums": rates, "sends": sends}


def build_layout(
    model: models.Gpt, layout: tuple[int, int, str], rank: int, world: int, device: torch.device
) -> Callable[[], Any]:
    stages, tensor, schedule = layout
    replicas = world // (stages * tensor)
    size = NUM_MICROBATCHES * CHUNK_SIZE * world
    batch = {name: value[: size // replicas] for name, value in model.make_batch(size).items()}
    places = [",".join(map(str, range(at * replicas, (at + 1) * replicas))) for at in range(stages)]
    num_parts = 2 * stages if schedule == "zbv" else stages
    varuna = Varuna(
        model, ";".join(places), {name: value[:CHUNK_SIZE] for name, value in batch.items()}, size,
        CHUNK_SIZE, device=device, precision="bf16",
        options=Options(
            partition=models.even_partition(model, num_parts), compile=choose_compiler(device),
            tensor=tensor, tensor_plan=TENSOR_PLAN if tensor > 1 else None, schedule=schedule,
        ),
    )  # fmt: skip
    return lambda: (varuna.step(batch), varuna.zero_grad())


def build_ddp(model: models.Gpt, world: int, device: torch.device) -> Callable[[], Any]:
    model.cuts = torch.nn.ModuleList(torch.nn.Identity() for _ in model.cuts)
    group = dist.new_group(backend="gloo" if device == CPU else "nccl")
    whole = DistributedDataParallel(model.to(device, torch.bfloat16), process_group=group)
    compiled = torch.compile(whole, backend=choose_compiler(device))
    batch = model.make_batch(NUM_MICROBATCHES * CHUNK_SIZE)
    places = range(0, NUM_MICROBATCHES * CHUNK_SIZE, CHUNK_SIZE)
    micro = [
        {name: value[at : at + CHUNK_SIZE].to(device) for name, value in batch.items()}
        for at in places
    ]

    def run() -> None:
        with whole.no_sync():
            for each in micro[:-1]:
                (compiled(**each) / NUM_MICROBATCHES).backward()
        (compiled(**micro[-1]) / NUM_MICROBATCHES).backward()
        whole.zero_grad()

    return run


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """In a rank."""
    torch.manual_seed(0)
    device = choose_device()
    if options["what"] == "links":
        return measure_links(rank, world, device)
    model = models.Gpt(**({**SMALL, "blocks": 8} if device == CPU else SIZES))
    layout = options["layout"]
    if layout is None:
        run = build_ddp(model, world, device)
    else:
        run = build_layout(model, tuple(layout), rank, world, device)
    for _ in range(WARM_UPS):
        time_step(run, device)
    return {"times": [time_step(run, device) for _ in range(options["rounds"])]}


def show_links(found: dict[str, Any], part: Part) -> None:
    sums = Table(title="sum of all ranks", columns=("GB/s of each link, in a ring",))
    for size, (took, rate) in found["sums"].items():
        sums.add(f"{size}, ms", [took * 1e3], f"{rate:.2f}")
    sends, middle = Table(title="GB/s", digits=2), statistics.median(found["sends"].values())
    for link, rate in found["sends"].items():
        sends.add(link, [rate])
        if rate < SLOW * middle:
            part.notes.append(
                f"**Slow: {link}**, {rate:.2f} GB/s where the median has {middle:.2f}."
            )
    part.tables += [sums, sends]


def measure_layouts(given: dict[str, Any], world: int, length: int, part: Part) -> None:
    """Each layout in processes of its own: one that fails costs no other."""
    table = Table(title="thousand tokens a second", digits=2)
    tokens = NUM_MICROBATCHES * CHUNK_SIZE * world * length
    times = {}
    for layout in (None, *list_layouts(world)):
        name = DDP if layout is None else name_layout(world, layout)
        try:
            times[name] = run_ranks(MODULE, world, {**given, "layout": layout})["times"]
        except RuntimeError as error:
            part.notes.append(f"{name}: {error}")
            continue
        table.add(name, [tokens / took / 1e3 for took in times[name]])
    part.tables.append(table)
    ours = name_layout(world, list_layouts(world)[0])
    if DDP in times and ours in times:
        value = statistics.median(ratios(times[DDP], times[ours]))
        what = "our replicas alone as fast as torch's DDP, times"
        part.bounds.append(Bound(what=what, value=value, limit=AT_LEAST, at_least=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("links", "layouts"))
    parser.add_argument("--ranks", type=int, help="at most one on each GPU; default: all of them")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    kind = find_kind()
    count = torch.cuda.device_count() if kind == "cuda" else 4
    world = options.ranks or count
    if kind is None or world < 2 or (kind == "cuda" and world > count):
        sys.exit(f"Not run: it needs a GPU for each of at least two ranks, and here are {count}.")
    os.environ[VARIABLE] = kind
    part = Part(title=f"{options.what} of {world} ranks")
    if kind == "cpu":
        part.notes.append("On processors and in small: it runs; no figure here says anything.")
    given = {"what": options.what, "rounds": options.rounds, "layout": None}
    if options.what == "links":
        show_links(run_ranks(MODULE, world, given), part)
    else:
        length = (SMALL if kind == "cpu" else SIZES)["length"]
        measure_layouts(given, world, length, part)
    print(part.render())


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        serve(work)
    else:
        main()
