"""Start equal: replicas as the first one, copies of a shared weight as in the first stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.runtime.comm.links import Links


@torch.no_grad()
def share_values(
    values: Mapping[str, Tensor],
    buffers: Iterable[Tensor],
    shared: Mapping[tuple[int, ...], Sequence[str]],
    links: Links,
) -> None:
    """`values` are this rank's weights in full precision, `shared` names of several places."""
    ranks = links.stage_map.ranks
    if links.replicas is not None:
        for tensor in (*{id(value): value for value in values.values()}.values(), *buffers):
            _broadcast(tensor, ranks[links.place][0], links.replicas)
    for places, names in shared.items():
        for name in names if links.place in places else ():
            _broadcast(values[name], ranks[places[0]][links.replica], links.sharing[places])


def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    made = tensor.detach().to("cpu").contiguous()
    dist.broadcast(made, source, group=group)
    tensor.detach().copy_(made)
