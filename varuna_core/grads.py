"""What follows the last backward: gradients summed over replicas and over copies of a shared
weight, one norm of all stages, clipping by it. Nothing is read by the host.

A parameter that no replica used keeps `grad = None`, as in the plain model: each bucket carries a
flag a parameter, looked at only by a rank that has no gradient of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.links import Links
from varuna_core.split_names import Tie

BUCKET_BYTES = 25 * 2**20


def list_shared(ties: Sequence[Tie]) -> dict[tuple[int, ...], list[str]]:
    """The weights that several stages hold, by those stages; each under its first name."""
    shared: dict[tuple[int, ...], list[str]] = {}
    for tie in ties:
        if len(tie.stages) > 1:
            shared.setdefault(tie.stages, []).append(tie.names[0])
    return shared


class Gradients:
    """The gradients of one rank's parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: Mapping[tuple[int, ...], Sequence[str]],
        links: Links,
        device: torch.device,
    ) -> None:
        self.links, self.device = links, device
        unique = {id(p): p for p in parameters.values() if p.requires_grad}
        self.parameters = list(unique.values())
        self.shared = {
            stages: [parameters[name] for name in names if parameters[name].requires_grad]
            for stages, names in shared.items()
            if links.stage in stages
        }
        elsewhere = {
            id(parameter)
            for stages, copies in self.shared.items()
            for parameter in copies
            if links.stage != stages[0]
        }
        self.counted = [p for p in self.parameters if id(p) not in elsewhere]
        """Those whose norm this rank answers for: one stage for each shared weight."""

    def share_values(self, tensors: Sequence[Tensor]) -> None:
        """Start equal: replicas as the first one, copies of a weight as in the first stage."""
        stage_map = self.links.stage_map
        with torch.no_grad():
            if self.links.replicas is not None:
                for tensor in tensors:
                    _broadcast(tensor, stage_map.ranks[self.links.stage][0], self.links.replicas)
            for stages, copies in self.shared.items():
                source = stage_map.ranks[stages[0]][self.links.replica]
                for parameter in copies:
                    _broadcast(parameter, source, self.links.sharing[stages])

    def reduce(self) -> None:
        """Sum over the replicas, then over the stages that hold copies."""
        if self.links.replicas is not None:
            _sum(self.parameters, self.links.replicas)
        for stages, copies in self.shared.items():
            _sum(copies, self.links.sharing[stages])

    def square_norm(self) -> Tensor:
        """Of this stage's gradients, in double precision."""
        grads = [p.grad for p in self.counted if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if grads:
            norms = torch._foreach_norm(grads)
            total += torch.stack([norm.double() for norm in norms]).square().sum()
        return total

    def scale(self, factor: Tensor) -> None:
        for grads in _by_type([p.grad for p in self.parameters if p.grad is not None]):
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    made = tensor.detach().to("cpu").contiguous()
    dist.broadcast(made, source, group=group)
    tensor.detach().copy_(made)


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one type, about BUCKET_BYTES of them."""
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for same in by_type.values():
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in same:
            bucket.append(parameter)
            size += parameter.numel() * parameter.itemsize
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _sum(parameters: Sequence[nn.Parameter], group: Any) -> None:
    under_way = []
    for bucket in _buckets(parameters):
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flags = torch.tensor([float(p.grad is not None) for p in bucket]).to(parts[0])
        flat = torch.cat([part.detach().reshape(-1) for part in parts] + [flags])
        work = dist.all_reduce(flat, group=group, async_op=True)
        under_way.append((bucket, flat, work))
    for bucket, flat, work in under_way:
        assert work is not None
        work.wait()
        pieces = torch.split(flat, [p.numel() for p in bucket] + [len(bucket)])
        for number, (parameter, piece) in enumerate(zip(bucket, pieces, strict=False)):
            if parameter.grad is not None:
                parameter.grad.copy_(piece.view_as(parameter))
            elif pieces[-1][number].item():
                parameter.grad = piece.view_as(parameter).clone()
