"""A model of gpt2-xl's size in bf16 on one GPU: plain torch.compile, one stage, several stages.

The part `gpu` has one process, `gpu_stages` two and then four that share the GPU.
TESTS_DEVICE=cpu runs both in small on processors, to see that they run at all.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline import models
from benchmarks.pipeline.ranks import run_ranks, serve
from benchmarks.pipeline.table import Bound, Part, Table, ratios
from tests.ranks.device import CPU, VARIABLE, choose_device, find_kind, synchronize
from varuna_core import Options, Varuna

SIZES = {"blocks": 48, "width": 1600, "heads": 25, "vocab": 50257, "length": 1024}
SMALL = {"blocks": 4, "width": 32, "heads": 2, "vocab": 65, "length": 16}
NUM_MICROBATCHES, CHUNK_SIZE = 8, 2
ONE_STAGE_AT_LEAST = 0.98
MODES = {"compile": False, "compile and cuda_graphs": True}
PLAIN = "plain, torch.compile"
WARM_UPS = 3
"""Compiled in the first step, recorded in the second."""
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "A10": 125.0, "L40S": 362.0}
"""Dense bf16, of the vendor's data sheets; the longest name that fits is taken."""


def count_flops(tokens: int) -> float:
    """Count a step's floating-point operations: 6 a parameter that multiplies, and attention."""
    width, blocks, length = SIZES["width"], SIZES["blocks"], SIZES["length"]
    weights = blocks * 12 * width**2 + SIZES["vocab"] * width
    return tokens * (6.0 * weights + 6.0 * blocks * width * length)


def time_step(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    if dist.get_world_size() > 1:
        dist.barrier()
    begin = time.perf_counter()
    run()
    synchronize(device)
    if dist.get_world_size() > 1:
        dist.barrier()
    return time.perf_counter() - begin


def build_plain(
    model: models.Gpt, batch: dict[str, Tensor], device: torch.device
) -> Callable[[], Any]:
    model.cuts = nn.ModuleList(nn.Identity() for _ in model.cuts)
    compiled = torch.compile(model.to(device, torch.bfloat16), backend=choose_compiler(device))
    micro = [
        {name: value[i : i + CHUNK_SIZE].to(device) for name, value in batch.items()}
        for i in range(0, CHUNK_SIZE * NUM_MICROBATCHES, CHUNK_SIZE)
    ]

    def run() -> None:
        for each in micro:
            (compiled(**each) / NUM_MICROBATCHES).backward()
        model.zero_grad()

    return run


def choose_compiler(device: torch.device) -> str:
    return "aot_eager" if device == CPU else "inductor"


def build_ours(
    model: models.Gpt, batch: dict[str, Tensor], world: int, device: torch.device, graphs: bool
) -> Callable[[], Any]:
    dummies = {name: value[:CHUNK_SIZE] for name, value in batch.items()}
    stages = "".join(f"{rank};" for rank in range(world))
    size = CHUNK_SIZE * NUM_MICROBATCHES
    partition = models.even_partition(model, world)
    varuna = Varuna(
        model, stages, dummies, size, CHUNK_SIZE, device=device, precision="bf16",
        options=Options(
            partition=partition, compile=choose_compiler(device), cuda_graphs=graphs
        ),
    )  # fmt: skip
    return lambda: (varuna.step(batch), varuna.zero_grad())


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, list[float]]:
    """In a rank."""
    torch.manual_seed(0)
    device = choose_device()
    sizes = SMALL if device == CPU else SIZES
    model = models.Gpt(**sizes)
    batch = model.make_batch(CHUNK_SIZE * NUM_MICROBATCHES)
    built = {
        f"ours, {world} stage(s), {name}": build_ours(model, batch, world, device, graphs)
        for name, graphs in MODES.items()
        if graphs or world == 1
    }
    if world == 1:
        built[PLAIN] = build_plain(model, batch, device)
    for run in built.values():
        for _ in range(WARM_UPS):
            time_step(run, device)
    times: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(options["rounds"]):
        for name, run in built.items():
            times[name].append(time_step(run, device))
    return times


def run(options: dict[str, Any]) -> Part:
    """In the parent: one process."""
    part, times = measure("gpt2-xl's size in bf16 on one GPU", (1,), options)
    if times:
        for name, graphs in MODES.items():
            speeds = ratios(times[PLAIN], times[f"ours, 1 stage(s), {name}"])
            if graphs:
                part.bounds.append(
                    Bound(
                        what=f"one stage ({name}) as fast as plain torch.compile, times",
                        value=statistics.median(speeds),
                        limit=ONE_STAGE_AT_LEAST,
                        at_least=True,
                    )
                )
            else:
                part.notes.append(f"{name} over plain: {statistics.median(speeds):.3f}")
    return part


def run_stages(options: dict[str, Any]) -> Part:
    """In the parent: processes that share the GPU."""
    return measure("gpt2-xl's size in bf16, two and four stages on one GPU", (2, 4), options)[0]


def measure(
    title: str, worlds: tuple[int, ...], options: dict[str, Any]
) -> tuple[Part, dict[str, list[float]]]:
    """The table of all worlds, and the seconds of their steps; none without a GPU."""
    part = Part(title=title)
    kind = find_kind()
    if kind is None:
        part.notes.append("Not run: no GPU here.")
        return part, {}
    os.environ[VARIABLE] = kind
    sizes, peak = SIZES, None
    if kind == "cpu":
        part.notes.append("On processors and in small: it runs; no figure here says anything.")
        sizes = SMALL
    else:
        name = torch.cuda.get_device_name()
        peak = next((PEAK_TFLOPS[k] for k in sorted(PEAK_TFLOPS, key=len)[::-1] if k in name), None)
        part.notes.append(f"{name}, CUDA {torch.version.cuda}.")
    tokens = CHUNK_SIZE * NUM_MICROBATCHES * sizes["length"]
    part.notes.append(f"{tokens} tokens a step.")
    times: dict[str, list[float]] = {}
    for world in worlds:
        times |= run_ranks(__name__, world, options)
    table = Table(title="thousand tokens a second", columns=("MFU",), digits=2)
    for label, seconds in times.items():
        mfu = count_flops(tokens) / statistics.median(seconds) / 1e12 / (peak or float("nan"))
        table.add(label, [tokens / s / 1e3 for s in seconds], f"{mfu:.3f}" if peak else "")
    part.tables.append(table)
    return part, times


if __name__ == "__main__":
    serve(work)
