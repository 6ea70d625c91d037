"""Keep weights equal on all replicas: at the start, and with ZeRO 1 and 2 after each step.

With ZeRO, one replica of a stage, the owner, holds the master and optimizer state of a parameter:

    backward   gradients of all replicas ─► reduced to the owner, and kept only there
    optimizer  built from the owned parameters: any optimizer, unmodified
    next step  the owners' weights ─► all replicas

Whole parameters are assigned to owners, by size, so that an optimizer that uses a tensor's norm
(LAMB) or rows (Adafactor) gets the same results as without ZeRO. See docs/zero.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna_core.runtime.comm.links import Links

MESSAGE_BYTES = 25 * 2**20
NUM_UNDER_WAY = 4
"""Maximum number of pending messages; each needs a copy of its weights."""


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The owning replica of each parameter of this rank's place."""

    links: Links
    replica_of: Mapping[str, int]
    at_once: bool
    """True for ZeRO 2: gradients are reduced after each backward, not only after the last."""
    alike: bool
    """True for ZeRO 3: the replicas of a place must run the same list of actions."""

    def rank_of(self, name: str) -> int:
        return self.links.stage_map.ranks[self.links.place][self.replica_of[name]]

    def list_own(self) -> set[str]:
        return {n for n, replica in self.replica_of.items() if replica == self.links.replica}

    def compute_most(self, number: int) -> int:
        """Return the maximum of this number over the replicas."""
        most = torch.tensor(number)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.links.replicas)
        return int(most.item())

    def expect_alike(self, num_microbatches: int) -> None:
        """Raise an error on all replicas if their numbers of micro-batches differ."""
        if self.alike and self.compute_most(num_microbatches) != -self.compute_most(
            -num_microbatches
        ):
            raise ValueError(
                f"this batch gives {num_microbatches} micro-batches here and another number on "
                "another replica: with zero=3 all replicas must have the same number"
            )


def make_owners(
    zero: int,
    links: Links,
    parameters: Mapping[str, nn.Parameter],
    shared: Mapping[tuple[int, ...], Sequence[str]],
    model: nn.Module,
) -> Owners | None:
    """Assign the parameters to owners; None without ZeRO or with a single replica. `model` is the
    whole model."""
    if not zero or links.replicas is None:
        return None
    everywhere = {name for held in shared.values() for name in held}
    # Of whole weights, which ranks that share layers see alike.
    sizes = {name: model.get_parameter(name).numel() for name in everywhere | parameters.keys()}
    dealt = deal_owners(
        parameters, sizes, {name: sizes[name] for name in everywhere}, links.stage_map.num_replicas
    )
    return Owners(links=links, replica_of=dealt, at_once=zero >= 2, alike=zero == 3)


def deal_owners(
    parameters: Mapping[str, nn.Parameter],
    weights: Mapping[str, int],
    shared: Mapping[str, int],
    num_replicas: int,
) -> dict[str, int]:
    """Return each parameter's owning replica; assign the largest first, to the least loaded.

    `weights` holds the parameters' sizes, `shared` the sizes of all weights that several places
    hold (here or elsewhere): their copies are summed within one replica, which must own all of
    them.
    """
    of_shared = _deal(shared, [0] * num_replicas)
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name)
    loads = [0] * num_replicas
    owners: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for first, *more in names.values():
        parameter = parameters[first]
        size = weights[first] if parameter.requires_grad else 0
        known = next((of_shared[name] for name in (first, *more) if name in of_shared), None)
        if known is None:
            sizes[first] = size
        else:
            owners[first] = known
            loads[known] += size
    owners |= _deal(sizes, loads)
    return {name: owners[held[0]] for held in names.values() for name in held}


def _deal(sizes: Mapping[str, int], loads: list[int]) -> dict[str, int]:
    dealt = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        dealt[name] = loads.index(min(loads))
        loads[dealt[name]] += sizes[name]
    return dealt


def pack(
    parameters: Sequence[nn.Parameter], owners: Mapping[int, int], limit: float
) -> Iterator[tuple[int | None, list[nn.Parameter]]]:
    """Yield (owner, parameters of one dtype) for each message of about `limit` bytes, in the order
    in which messages fill."""
    filling: dict[tuple[torch.dtype, int | None], list[nn.Parameter]] = {}
    sizes: dict[tuple[torch.dtype, int | None], int] = {}
    for parameter in parameters:
        key = parameter.dtype, owners.get(id(parameter))
        filling.setdefault(key, []).append(parameter)
        sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.itemsize
        if sizes[key] >= limit:
            del sizes[key]
            yield key[1], filling.pop(key)
    for (_, owner), held in filling.items():
        yield owner, held


class WeightExchange:
    """Sends the weights of a place from their owners to all of its replicas."""

    def __init__(self, owners: Owners, weights: Mapping[str, nn.Parameter]) -> None:
        self.owners, self.links = owners, owners.links
        trained = {id(w): (n, w) for n, w in weights.items() if w.requires_grad}
        ranks = {key: owners.rank_of(name) for key, (name, _) in trained.items()}
        packed = pack([w for _, w in trained.values()], ranks, MESSAGE_BYTES)
        self.messages = [(owner, held) for owner, held in packed if owner is not None]
        self._under_way: deque[tuple[Any, Tensor, Sequence[nn.Parameter]]] = deque()

    @torch.no_grad()
    def run(self, num_microbatches: int) -> None:
        """Send the weights, at the start of a step or evaluation of `num_microbatches`."""
        self.owners.expect_alike(num_microbatches)
        for owner, weights in self.messages:
            if len(self._under_way) == NUM_UNDER_WAY:
                self._finish()
            flat = _take_flat(weights)
            work = dist.broadcast(flat, owner, group=self.links.replicas, async_op=True)
            self._under_way.append((work, flat, weights if owner != dist.get_rank() else ()))
        while self._under_way:
            self._finish()

    def _finish(self) -> None:
        work, flat, weights = self._under_way.popleft()
        work.wait()
        sizes = [weight.numel() for weight in weights]
        for weight, piece in zip(weights, torch.split(flat, sizes) if sizes else (), strict=True):
            if weight.data_ptr() != piece.data_ptr():
                weight.copy_(piece.view(weight.shape))

    def forget(self) -> None:
        """Drop pending work after a failure, since it would keep its group open."""
        self._under_way.clear()


def _take_flat(weights: Sequence[nn.Parameter]) -> Tensor:
    """Return the values as one flat tensor; for a single weight, return a view."""
    if len(weights) == 1 and weights[0].is_contiguous():
        return weights[0].detach().view(-1)
    return torch.cat([weight.detach().reshape(-1) for weight in weights])


# Equal values at the start.


@torch.no_grad()
def share_values(
    values: Mapping[str, Tensor],
    buffers: Iterable[Tensor],
    shared: Mapping[tuple[int, ...], Sequence[str]],
    links: Links,
) -> None:
    """Copy the first replica's weights to the others, and a shared weight from its first stage.

    `values` holds this rank's weights in fp32; `shared` the names of weights, keyed by places.
    """
    ranks = links.stage_map.ranks
    if links.replicas is not None:
        for tensor in (*{id(value): value for value in values.values()}.values(), *buffers):
            _broadcast(tensor, ranks[links.place][0], links.replicas)
    for places, names in shared.items():
        for name in names if links.place in places else ():
            _broadcast(values[name], ranks[places[0]][links.replica], links.sharing[places])


def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    is_sparse = tensor.layout != torch.strided  # a buffer, which gloo does not send
    made = (tensor.to_dense() if is_sparse else tensor.detach()).to("cpu").contiguous()
    dist.broadcast(made, source, group=group)
    tensor.copy_(made.to_sparse(layout=tensor.layout) if is_sparse else made)
