"""Determine a process's rank, device and stage map from the environment; join other ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from varuna_core.agent.gpu.accelerator import find_visible
from varuna_core.records.rank_map import build_stages, encode_stage_map
from varuna_core.runtime.comm.devices import take_device
from varuna_core.runtime.comm.links import join_ranks


class ProgramError(ValueError):
    """Raised if settings, data and environment of a built-in program do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank and device as set by torchrun or vjob's agent; without them, the only rank of a run."""

    rank: int
    world: int
    local_rank: int
    stage_map: str
    tensor: int = 1
    """The number of ranks for which each entry of the stage map stands."""

    device: torch.device

    @property
    def is_last(self) -> bool:
        """True for the rank that prints what is equal on all ranks, as in Megatron."""
        return self.rank == self.world - 1


def compute_place(pipeline: int, tensor: int = 1, environ: Mapping[str, str] = os.environ) -> Place:
    """Compute this rank's place; without a stage map (torchrun), a replica's ranks are adjacent."""
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    stage_map = environ.get("VJOB_STAGE_MAP")
    if stage_map is None:
        replicas, left = divmod(world, pipeline * tensor)
        if left or not replicas:
            shared = f" x tensor {tensor}" if tensor > 1 else ""
            raise ProgramError(
                f"{world} ranks cannot be divided into pipelines of {pipeline}{shared}: change one"
            )
        stage_map = encode_stage_map(build_stages(pipeline, replicas, "pipeline"))
    if not torch.cuda.is_available() and environ.get("VJOB_RUN"):
        refuse_missing_gpus(environ, torch.version.cuda or torch.version.hip)
    return Place(
        rank=rank,
        world=world,
        local_rank=local_rank,
        stage_map=stage_map,
        tensor=tensor,
        device=take_device(local_rank=local_rank if torch.cuda.is_available() else -1),
    )


def refuse_missing_gpus(environ: Mapping[str, str], built_for: str | None) -> None:
    """Refuse to train on CPUs in a job that has GPUs, since it would only seem slow.

    `built_for` is torch's version of CUDA or ROCm; None if torch is built for neither.
    """
    visible = find_visible(environ)
    if visible is None:
        return
    why = (
        "torch was built without CUDA and ROCm; install a build for these GPUs in the ranks' "
        "Python, or set container.image"
        if built_for is None
        else f"torch is built for {'ROCm' if torch.version.hip else 'CUDA'} {built_for}; are these "
        "GPUs of that vendor, and is the node's driver new enough?"
    )
    raise ProgramError(
        f"{visible[0]}={visible[1]}, but torch {torch.__version__} finds no GPU: {why} (to train "
        "on CPUs, set ranks instead of gpus in cluster.nodes)"
    )


def join(place: Place) -> None:
    """Create the default process group, if there are several ranks."""
    if place.world > 1:
        join_ranks()


def leave() -> None:
    """Wait for all ranks, then leave the process group: rank 0 may host its store."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
