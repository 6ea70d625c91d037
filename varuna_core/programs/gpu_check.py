"""The check of `vjob doctor --gpu` in each of two ranks: the GPU, NCCL, a message, a training step.

A script: each rank prints one line of JSON, which shelf/doctor/gpu.py judges. Errors are part of
it, so that the rest is shown too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab": 256, "dropout": 0.0}
BATCH, MICRO_BATCH = 8, 2
MESSAGE = 1 << 20
DRIVER = Path("/proc/driver/nvidia/version")
SEED = 1
MARK = "gpu-check "
"""Begins the line."""


def check_rank(kind: str = "cuda") -> dict[str, Any]:
    """Facts by name; `error` says what ended the check, and `nccl error` what NCCL said."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "built for": torch.version.cuda,
        "driver": DRIVER.read_text() if DRIVER.exists() else "",
        "gpus": torch.cuda.device_count() if kind == "cuda" else 0,
    }
    if kind == "cuda" and not facts["gpus"]:
        return facts
    from varuna_core.runtime.comm.devices import take_device

    device = take_device(kind)
    if kind == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        facts["device"] = torch.cuda.get_device_name(device)
    try:
        dist.init_process_group("gloo")
        if kind == "cuda":
            facts |= keep_error("nccl error", lambda: sum_by_nccl(device))
        facts |= time_message(device)
        facts |= train_step(device)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # of any library: the doctor shows it
        facts["error"] = f"{type(error).__name__}: {error}"
    return facts


def keep_error(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # shown beside the other facts
        return {name: f"{type(error).__name__}: {error}"}


def sum_by_nccl(device: torch.device) -> dict[str, Any]:
    """In a group of each rank alone: two ranks that share a GPU can be in no other."""
    for rank in range(dist.get_world_size()):
        group = dist.new_group([rank], backend="nccl")
        if rank == dist.get_rank():
            held = torch.ones(8, device=device)
            dist.all_reduce(held, group=group)
            torch.cuda.synchronize(device)
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]  # torch: untyped


def time_message(device: torch.device) -> dict[str, Any]:
    """Between the two ranks, by the runtime's own wire."""
    from varuna_core.profiling.links import measure_network
    from varuna_core.profiling.profiler import Profiler

    crew = Profiler(torch.nn.Identity(), device, kind="device").crew
    (link,) = measure_network(crew, sizes=(1 << 10, MESSAGE)).links.values()
    return {"message s": link.find_time(MESSAGE)}


def train_step(device: torch.device) -> dict[str, Any]:
    """Loss and norm of the gradients, of two stages on the device and of the plain model on CPU."""
    from varuna_core import Varuna
    from varuna_core.programs.gpt import Gpt

    torch.manual_seed(SEED)
    model = Gpt(**SIZES)  # type: ignore[arg-type]  # dropout is the only float
    tokens = torch.randint(int(SIZES["vocab"]), (BATCH, int(SIZES["sequence"]) + 1))
    plain = plain_step(model, tokens)
    dummy = {"tokens": tokens[:MICRO_BATCH]}
    varuna = Varuna(model, "0;1;", dummy, BATCH, MICRO_BATCH, device=device, partition="3-3")
    loss, _ = varuna.step({"tokens": tokens})
    norm = varuna.last_grad_norm
    assert norm is not None
    varuna.close()
    return {"step": (float(loss), float(norm)), "step on cpu": plain}


def plain_step(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    loss = model(tokens=tokens).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return float(loss.detach()), float(norm)


if __name__ == "__main__":
    # Run by its path: the package that it is of, installed or not, is the one to check with.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    print(MARK + json.dumps(check_rank(*sys.argv[1:])), flush=True)
