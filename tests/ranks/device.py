"""The device that ranks of tests and benchmarks train on: the CPU, or a GPU where asked for.

`TESTS_DEVICE=cuda` asks for it; tests/gpu and benchmarks of GPUs set it for their ranks. Ranks
take the GPUs in turn: with one GPU all of them share it, and their messages go through gloo.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

VARIABLE = "TESTS_DEVICE"
GPU_MEMORY = "TESTS_GPU_MEMORY"
"""Set to 1, messages go through the memory of the one GPU that all ranks share."""
CPU = torch.device("cpu")


def find_kind(environ: Mapping[str, str] = os.environ) -> str | None:
    """`cuda` or `cpu`, as the variable says; unset, `cuda` where there is a GPU, else None."""
    return environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else None)


def choose_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this rank, made the current one; its fp32 products are not those of TF32.

    The index says that a GPU may be shared.
    """
    if environ.get(VARIABLE, "cpu") == "cpu":
        return CPU
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if environ.get(GPU_MEMORY) == "1":
        from tests.ranks import ipc_wire

        ipc_wire.install()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all that was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bring(values: Any, device: torch.device = CPU) -> Any:
    """The same with all tensors on the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
