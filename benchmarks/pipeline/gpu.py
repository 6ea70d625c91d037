"""A model of gpt2-xl's size in bf16 on one GPU: plain torch.compile, one stage, two stages."""

from __future__ import annotations

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
from varuna_core import Varuna

SIZES = {"blocks": 48, "width": 1600, "heads": 25, "vocab": 50257, "length": 1024}
NUM_MICROBATCHES, CHUNK_SIZE = 8, 2
ONE_STAGE_AT_LEAST = 0.98
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "A10": 125.0, "L40S": 362.0}
"""Dense bf16, of the vendor's data sheets; the longest name that fits is taken."""


def count_flops(tokens: int) -> float:
    """Count a step's floating-point operations: 6 a parameter that multiplies, and attention."""
    width, blocks, length = SIZES["width"], SIZES["blocks"], SIZES["length"]
    weights = blocks * 12 * width**2 + SIZES["vocab"] * width
    return tokens * (6.0 * weights + 6.0 * blocks * width * length)


def time_step(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()
    return time.perf_counter() - begin


def build_plain(model: models.Gpt, batch: dict[str, Tensor]) -> Callable[[], Any]:
    model.cuts = nn.ModuleList(nn.Identity() for _ in model.cuts)
    compiled = torch.compile(model.to("cuda", torch.bfloat16))
    micro = [
        {name: value[i : i + CHUNK_SIZE].cuda() for name, value in batch.items()}
        for i in range(0, CHUNK_SIZE * NUM_MICROBATCHES, CHUNK_SIZE)
    ]

    def run() -> None:
        for each in micro:
            (compiled(**each) / NUM_MICROBATCHES).backward()
        model.zero_grad()

    return run


def build_ours(model: models.Gpt, batch: dict[str, Tensor], world: int) -> Callable[[], Any]:
    dummies = {name: value[:CHUNK_SIZE] for name, value in batch.items()}
    stages = "".join(f"{rank};" for rank in range(world))
    size = CHUNK_SIZE * NUM_MICROBATCHES
    partition = models.even_partition(model, world)
    varuna = Varuna(
        model, stages, dummies, size, CHUNK_SIZE, device=0, partition=partition, precision="bf16"
    )
    blocks: Any = varuna.part.stages[0].module.blocks
    for block in blocks:
        block.compile()
    return lambda: (varuna.step(batch), varuna.zero_grad())


def work(options: dict[str, Any], rank: int, world: int) -> dict[str, list[float]]:
    """In a rank."""
    torch.manual_seed(0)
    model = models.Gpt(**SIZES)
    batch = model.make_batch(CHUNK_SIZE * NUM_MICROBATCHES)
    built = {f"ours, {world} stage(s)": build_ours(model, batch, world)}
    if world == 1:
        built["plain, torch.compile"] = build_plain(models.Gpt(**SIZES), batch)
    for run in built.values():
        for _ in range(2):
            time_step(run)
    times: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(options["rounds"]):
        for name, run in built.items():
            times[name].append(time_step(run))
    return times


def run(options: dict[str, Any]) -> Part:
    """In the parent."""
    part = Part(title="gpt2-xl's size in bf16 on one GPU")
    if not torch.cuda.is_available():
        part.notes.append("Not run: no GPU here.")
        return part
    name = torch.cuda.get_device_name()
    peak = next((PEAK_TFLOPS[k] for k in sorted(PEAK_TFLOPS, key=len)[::-1] if k in name), None)
    tokens = CHUNK_SIZE * NUM_MICROBATCHES * SIZES["length"]
    part.notes.append(f"{name}, torch.version.cuda {torch.version.cuda}, {tokens} tokens a step.")
    times = {**run_ranks(__name__, 1, options), **run_ranks(__name__, 2, options)}
    table = Table(title="thousand tokens a second", columns=("MFU",), digits=2)
    for label, seconds in times.items():
        mfu = count_flops(tokens) / statistics.median(seconds) / 1e12 / (peak or float("nan"))
        table.add(label, [tokens / s / 1e3 for s in seconds], f"{mfu:.3f}" if peak else "")
    part.tables.append(table)
    speeds = ratios(times["plain, torch.compile"], times["ours, 1 stage(s)"])
    part.bounds.append(
        Bound(
            what="one stage as fast as plain torch.compile, times",
            value=statistics.median(speeds),
            limit=ONE_STAGE_AT_LEAST,
            at_least=True,
        )
    )
    return part


if __name__ == "__main__":
    serve(work)
