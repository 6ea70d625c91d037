"""The most that is held while something runs, and the bytes of tensors.

On a GPU torch's allocator counts; on the CPU it tells torch's profiler each block that it gives and
takes, and these are added up.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def measure_peak(device: torch.device, run: Callable[[], None]) -> int:
    """Bytes held at most while `run` runs, beyond those held before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else two lines a run (torch 2.13)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    held = most = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def count_bytes(tensors: Iterable[Any]) -> int:
    """Of the values, as a message holds them."""
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, Tensor))


def list_storages(tensors: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage, by its address."""
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def find_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of the host: its allocator's error is a plain RuntimeError (torch 2.13)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def free_memory(device: torch.device) -> None:
    """What nobody holds any more goes back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
