"""Gradients of several parameters summed over ranks in one message, while other work goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.runtime.comm.backend import GLOO
from varuna_core.runtime.optim.zero import pack

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Parameters of one type whose gradients are summed in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter], owner: int | None = None) -> None:
        """`owner` is the rank that keeps the sum; None: all do."""
        self.parameters, self.owner = parameters, owner
        self.waiting: set[int] = set()
        """Those that may get another gradient."""

        self._had: list[bool] = []
        self._flat: Tensor | None = None
        self._work: Any = None

    @torch.no_grad()
    def start(self, group: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        self._had = [grad is not None for grad in grads]
        parts = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(self.parameters, grads, strict=True)
        ]
        flags = torch.tensor([float(had) for had in self._had]).to(parts[0])
        self._flat = torch.cat([part.reshape(-1) for part in parts] + [flags])
        for parameter in self.parameters:
            parameter.grad = None  # its memory; a gradient that comes yet is seen
        if self.owner is None or (self._flat.is_cuda and dist.get_backend(group) == GLOO):
            # gloo reduces CUDA tensors to all or not at all.
            self._work = dist.all_reduce(self._flat, group=group, async_op=True)
        else:
            self._work = dist.reduce(self._flat, self.owner, group=group, async_op=True)

    def finish(self) -> None:
        assert self._flat is not None and self._work is not None
        self._work.wait()
        if self.owner not in (None, dist.get_rank()):
            self.forget()
            return
        sizes = [p.numel() for p in self.parameters]
        *pieces, flags = torch.split(self._flat, [*sizes, len(sizes)])
        for place, (parameter, piece) in enumerate(zip(self.parameters, pieces, strict=True)):
            if self._had[place] or flags[place].item():
                summed = piece.view(parameter.shape)
                if not parameter.is_contiguous():  # fused optimizers want the strides alike
                    summed = torch.empty_like(parameter).copy_(summed)
                parameter.grad = summed
        self.forget()

    def forget(self) -> None:
        """Let go of what is under way."""
        self.waiting.clear()
        self._flat = self._work = None


def make_buckets(parameters: Sequence[nn.Parameter], owners: Mapping[int, int]) -> Iterator[Bucket]:
    """Parameters of one type and one owner, about BUCKET_BYTES of them among all owners; in the
    order in which they are full."""
    limit = BUCKET_BYTES / max(1, len(set(owners.values())))
    for owner, held in pack(parameters, owners, limit):
        yield Bucket(held, owner)


def sum_up(parameters: Sequence[nn.Parameter], group: Any) -> None:
    buckets = list(make_buckets(parameters, {}))
    for bucket in buckets:
        bucket.start(group)
    for bucket in buckets:
        bucket.finish()
