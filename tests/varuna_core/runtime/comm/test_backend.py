"""NCCL only where each rank has a GPU of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from varuna_core.runtime.comm.wire import choose_backend, name_gpu


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b", "c"], "cpu:gloo,cuda:nccl"),
        (["a", "b", "a"], "gloo"),
        (["a", "", "c"], "gloo"),
        (["", "", ""], "gloo"),
    ],
)
def test_every_rank_chooses_the_same(gpus: list[str], backend: str) -> None:
    store = dist.HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"key/{rank}", gpu)
    chosen = {choose_backend(store, "key", r, len(gpus), gpu) for r, gpu in enumerate(gpus)}
    assert chosen == {backend}


def test_the_host_has_no_gpus_name() -> None:
    assert name_gpu(torch.device("cpu")) == ""
