"""Organize the ranks of a profile: their GPUs, who measures what, and how results are gathered.

    ranks   0  1 | 2  3 | 4  5      degree 2: three entries
    kind    A100 | A100 | A10       the entries of a kind divide its segments among them

Results are gathered over a separate gloo group. A rank that fails sends its error, and all ranks
raise it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.planner.profile.gpus import find_gpu
from varuna_core.runtime.comm.failure import RankFailed
from varuna_core.runtime.comm.links import NO_TIMEOUT
from varuna_core.runtime.comm.words import gather


@dataclass(frozen=True, kw_only=True)
class ProfiledRank:
    """The GPU and node of one rank."""

    rank: int
    kind: str
    node: str
    memory_bytes: int


def name_kind(device: torch.device) -> str:
    """Return the GPU's name in the planner's table, else its own; "cpu" without a GPU."""
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device)
    memory_gb = read_memory(device) / 2**30
    for words in (name, f"{name} {round(memory_gb)}GB"):
        try:
            return find_gpu(words).name
        except PlanningError:
            continue
    return name


class Crew:
    """All ranks that measure a profile, and exchanges of values between them; a single rank needs
    no process group."""

    def __init__(
        self, device: torch.device, kind: str | None = None, may_share: bool = False
    ) -> None:
        """`may_share` is the argument of the same name for this rank's GPU (comm/devices.py)."""
        is_joined = dist.is_initialized()
        self.rank = dist.get_rank() if is_joined else 0
        self.world_size = dist.get_world_size() if is_joined else 1
        self.device, self.may_share = device, may_share
        alone = self.world_size == 1
        self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self.places: list[ProfiledRank] = self.gather(
            ProfiledRank(
                rank=self.rank,
                kind=kind or name_kind(device),
                node=os.environ.get("VJOB_NODE") or socket.gethostname(),
                memory_bytes=read_memory(device),
            )
        )

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(place.kind for place in self.places))

    def gather(self, mine: Any) -> list[Any]:
        """Collect each rank's object on all ranks."""
        if self._group is None:
            return [mine]
        return gather(mine, self._group)

    def agree(self, error: BaseException | None) -> None:
        """Exchange errors between all ranks; if any rank has one, raise it on all ranks."""
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, words in enumerate(told):
            if words is not None:
                raise RankFailed(f"rank {rank}: {words}")

    def meet(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def list_entries(self, tensor: int) -> dict[str, list[list[int]]]:
        """Return groups of `tensor` neighbouring ranks on a node with one kind of GPU, by kind."""
        entries: dict[str, list[list[int]]] = {}
        for first in range(0, self.world_size - tensor + 1, tensor):
            held = self.places[first : first + tensor]
            if len({(place.kind, place.node) for place in held}) == 1:
                entries.setdefault(held[0].kind, []).append([place.rank for place in held])
        return entries


def deal(
    entries: Mapping[str, Sequence[Sequence[int]]], samples: Sequence[int], rank: int
) -> tuple[int, ...]:
    """Return the segments that this rank measures: the samples are dealt out by kind of GPU."""
    for groups in entries.values():
        for number, ranks in enumerate(groups):
            if rank in ranks:
                return tuple(samples[number :: len(groups)])
    return ()


def read_memory(device: torch.device) -> int:
    """Return the bytes of the GPU's memory or, without a GPU, of this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
