"""Choose the GPU of each rank, and refuse GPUs shared by ranks unless the user asked for sharing.

    device=        GPU                                                       may be shared
    -1, "cuda"     local_rank, else LOCAL_RANK, else the thread's current    as the conf says
    0, "cuda:0"    the one that is named                                     yes
    "cpu"          none

A conf allows sharing if a node has more `ranks` than `gpus`. A local rank is an index into the
visible GPUs; if a launcher makes only one GPU visible to each rank, every rank has index 0. So only
UUIDs show that two ranks use the same GPU, and ranks compare UUIDs through the store: four
operations per rank.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

GLOO = "gloo"
BOTH = "cpu:gloo,cuda:nccl"
Device = int | str | torch.device


def take_device(
    device: Device = -1, local_rank: int = -1, environ: Mapping[str, str] | None = None
) -> torch.device:
    """Return the rank's device, and make it the current one of this thread."""
    environ = os.environ if environ is None else environ
    is_there = torch.cuda.is_available()
    asked = local_rank if device == -1 else device
    if asked == -1 and not is_there:
        return torch.device("cpu")
    if isinstance(device, int):
        device = "cuda" if device < 0 else f"cuda:{device}"
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if not is_there:
        raise ValueError(f'device {asked}: this node has no GPU: set device="cpu"')
    if found.index is None:
        found = torch.device("cuda", _compute_index(local_rank, environ.get("LOCAL_RANK", "")))
    torch.cuda.set_device(found)
    return found


def may_share(device: Device, environ: Mapping[str, str] | None = None) -> bool:
    """Return True if the user asked for several ranks on one GPU."""
    environ = os.environ if environ is None else environ
    is_named = device >= 0 if isinstance(device, int) else torch.device(device).index is not None
    num_ranks = environ.get("LOCAL_WORLD_SIZE", "") if environ.get("VJOB_RUN") else ""
    return is_named or (num_ranks.isdecimal() and int(num_ranks) > torch.cuda.device_count() > 0)


def _compute_index(local_rank: int, environ_rank: str) -> int:
    if local_rank < 0 and environ_rank.isdecimal():
        local_rank = int(environ_rank)
    if local_rank < 0:
        return int(torch.cuda.current_device())
    return local_rank % torch.cuda.device_count()


# The agreement.


@dataclass(frozen=True, kw_only=True)
class RankGpu:
    """A rank's GPU, in the form sent to the other ranks."""

    uuid: str
    """Identifier of the GPU, equal on every rank; empty on a CPU."""

    name: str = ""
    """Name of the GPU on this host."""

    host: str = ""
    may_share: bool = False
    has_nccl: bool = True


def describe_gpu(device: torch.device, shared: bool) -> RankGpu:
    if device.type != "cuda":
        return RankGpu(uuid="")
    return RankGpu(
        uuid=str(torch.cuda.get_device_properties(device).uuid),
        name=str(device),
        host=os.environ.get("VJOB_NODE") or socket.gethostname(),
        may_share=shared,
        has_nccl=dist.is_nccl_available(),
    )


def choose_backend(
    store: Any, key: str, rank: int, world_size: int, gpu: RankGpu
) -> tuple[str, str]:
    """Return the backend and a description of which ranks share GPUs; both are equal on every rank.

    The backend is NCCL unless a rank has no GPU or two ranks share one, which NCCL does not
    support; CPU tensors always use gloo.
    Raise ValueError on all ranks if ranks share a GPU and the user did not ask for sharing.
    """
    if not gpu.uuid or not gpu.has_nccl:
        store.add(f"{key}/without", 1)
    if gpu.uuid:
        mine = f"{key}/{gpu.uuid}"
        turn = store.add(mine, 1)
        store.set(f"{mine}/{turn}", json.dumps([rank, gpu.host, gpu.name, gpu.may_share]))
        if turn == 2:
            store.set(f"{key}/shared/{store.add(f'{key}/shared', 1)}", gpu.uuid)
    if store.add(f"{key}/arrived", 1) == world_size:  # all that the others wrote is there
        store.set(f"{key}/answer", json.dumps(_decide(store, key)))
    backend, shared, refusal = json.loads(store.get(f"{key}/answer"))
    if refusal:
        raise ValueError(refusal)
    return backend, shared


def _decide(store: Any, key: str) -> tuple[str, str, str]:
    """Read all ranks' GPUs from the store; return backend, sharing ranks and an error text."""
    num_shared = store.add(f"{key}/shared", 0)
    shared, refused = [], []
    for number in range(1, num_shared + 1):
        gpu = f"{key}/{store.get(f'{key}/shared/{number}').decode()}"
        sharers = [json.loads(store.get(f"{gpu}/{turn + 1}")) for turn in range(store.add(gpu, 0))]
        _, host, name, _ = sharers[0]
        who = f"ranks {', '.join(str(rank) for rank, *_ in sorted(sharers))} of {host}"
        shared.append(f"{who} share {name}")
        if not all(sharer[3] for sharer in sharers):
            refused.append(f"{who} would all take {name}")
    is_alone = not num_shared and not store.add(f"{key}/without", 0)
    refusal = (
        ""
        if not refused
        else (
            f"{'; '.join(refused)}: start one rank a GPU, with its own LOCAL_RANK (vjob and "
            'torchrun set it) or local_rank=; to share a GPU name it, such as device="cuda:0", '
            "or give more ranks than gpus in cluster.nodes"
        )
    )
    return BOTH if is_alone else GLOO, "; ".join(shared), refusal


def wake_autograd(device: torch.device) -> None:
    """Run a small backward so that autograd's thread initializes its CUDA context: torch 2.11 warns
    if a matrix product is the thread's first work, as in a stage that ends with a linear layer."""
    if device.type == "cuda":
        (torch.zeros(1, device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]  # torch: untyped
