"""Which library carries messages and sums gradients: gloo, or for tensors on GPUs NCCL."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

GLOO = "gloo"
BOTH = "cpu:gloo,cuda:nccl"


def name_gpu(device: torch.device) -> str:
    """The same name for the same GPU on every rank; empty where NCCL cannot be used."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_backend(store: Any, key: str, rank: int, world_size: int, gpu: str) -> str:
    """The same on every rank: NCCL, but where a rank has no GPU or two share one, which it refuses.

    Tensors of the host go through gloo in either case.
    """
    store.set(f"{key}/{rank}", gpu)
    gpus = [bytes(store.get(f"{key}/{r}")) for r in range(world_size)]
    return BOTH if all(gpus) and len(set(gpus)) == world_size else GLOO
