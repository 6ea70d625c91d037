"""The process groups of a layout, and a rank's channels to its neighbours.

place a ──activations──► place b      a group of two each way, a replica, for each two places that
place a ◄──gradients──── place b      hold a stage s and a stage s + 1
the ranks of a replica (verdicts), the replicas of a place (gradients), the places of a replica
that hold copies of a weight

With tensor parallelism all but the verdicts' group are made for each slice of the stage map; the
ranks that share a place's layers have one more (`connect_sharing`).

With several stages a rank two places may have both kinds of channel in both directions; what
crosses between two stages of one rank is the engine's matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.records.layout import StageMap
from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, Receiver, Sender
from varuna_core.runtime.comm.failure import FailureBoard, close_group
from varuna_core.runtime.comm.wire import Transport, choose_transport

# A standing receive may wait through the user's longest pause; what has failed closes its groups.
NO_TIMEOUT = timedelta(days=365)
JOIN_TIMEOUT_S = 2.0

_numbers = itertools.count()


@dataclass(kw_only=True)
class Links:
    """A rank's channels and groups; None where there is no other rank."""

    stage_map: StageMap
    place: int
    """This rank's field of the stage map: its stage, where it holds one alone."""

    replica: int
    board: FailureBoard
    activations_in: dict[int, Receiver] = field(default_factory=dict)
    """By the place at the other end; so are the next three."""

    gradients_in: dict[int, Receiver] = field(default_factory=dict)
    activations_out: dict[int, Sender] = field(default_factory=dict)
    gradients_out: dict[int, Sender] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)
    pipeline: Any = None
    """All ranks of the replica."""

    replicas: Any = None
    tensor: Any = None
    """Those that share the layers of this place."""

    mesh: Any = None
    """As `replicas`, for torch's modules that keep it; no message goes through it."""

    sharing: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """By the places that share weights."""

    on_abort: Callable[[], None] = lambda: None
    """Lets go of groups that are held elsewhere: a group closes when nobody holds it."""

    closed: bool = False

    @property
    def name(self) -> str:
        return self.stage_map.name(self.stage_map.ranks[self.place][self.replica])

    @property
    def senders(self) -> Iterator[Sender]:
        return itertools.chain(self.activations_out.values(), self.gradients_out.values())

    @property
    def receivers(self) -> Iterator[Receiver]:
        return itertools.chain(self.activations_in.values(), self.gradients_in.values())

    def find_lost_peer(self) -> str:
        """The first neighbour that has gone, and how; empty while all are there."""
        return next(filter(None, (receiver.find_lost_peer() for receiver in self.receivers)), "")

    def hold(self, capacity: int) -> None:
        """Let so many messages a channel be sent and not yet taken."""
        for sender in self.senders:
            sender.capacity = capacity
        for receiver in self.receivers:
            receiver.hold(capacity)

    def flush(self) -> None:
        for sender in self.senders:
            sender.flush()

    def share_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these on all replicas of this place by the first one's, a message a type."""
        if self.replicas is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor.detach())
        for of_type in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in of_type]).cpu()
            dist.broadcast(flat, self.stage_map.ranks[self.place][0], group=self.replicas)
            parts = torch.split(flat, [tensor.numel() for tensor in of_type])
            for tensor, part in zip(of_type, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def close(self) -> None:
        """Close the channels to the neighbours in order; no step can follow."""
        if self._send_last_word(BYE):
            for receiver in self.receivers:
                receiver.thread.join(JOIN_TIMEOUT_S)

    def abort(self) -> None:
        """Close all channels and groups, so that every wait for this rank ends with an error."""
        if not self._send_last_word(POISON):
            return
        for receiver in self.receivers:
            receiver.discard()
        self.on_abort()
        for group in (self.pipeline, self.replicas, self.tensor, *self.sharing.values()):
            if group is not None:
                close_group(group)
        self.pipeline = self.replicas = self.tensor = None
        self.sharing.clear()

    def expect_open(self) -> None:
        """RuntimeError after `close`, or after a failure of any rank."""
        if self.closed:
            raise RuntimeError("this Varuna is closed, or a rank has failed: restart the training")

    def _send_last_word(self, word: int) -> bool:
        if self.closed:
            return False
        self.closed = True
        for sender in self.senders:
            sender.close(word)
        return True


def connect(
    stage_map: StageMap,
    rank: int,
    sharing: Sequence[tuple[int, ...]],
    device: torch.device,
    hang_timeout_s: float | None = None,
    has_mesh: bool = False,
    tensor: Any = None,
    on_abort: Callable[[], None] = lambda: None,
) -> Links:
    """Make the groups, the same on every rank and in the same order, and this rank's channels.

    `tensor` is the group of the ranks that share this place's layers, if there is one, and
    `on_abort` lets go of groups that are held elsewhere.
    """
    place, replica = stage_map.find(rank)
    if stage_map.world_size == 1:
        return Links(stage_map=stage_map, place=0, replica=0, board=FailureBoard(None, ""))
    store = dist.distributed_c10d._get_default_store()
    key = f"varuna/{next(_numbers)}"
    board = FailureBoard(store, f"{key}/failure")
    transport = choose_transport(device, store, f"{key}/gpu", rank, dist.get_world_size())
    links = Links(
        stage_map=stage_map,
        place=place,
        replica=replica,
        board=board,
        arrivals=Arrivals(hang_timeout_s),
        tensor=tensor,
        on_abort=on_abort,
    )
    wiring = _Wiring(links, rank, transport)
    slices = [stage_map.slice(tensor_rank) for tensor_rank in range(stage_map.tensor)]
    for number in range(stage_map.num_replicas):
        everyone: list[int] = []
        for held in slices:
            ranks = [held.ranks[p][number] for p in range(held.depth)]
            everyone += ranks
            wiring.connect_neighbours(ranks, held.neighbours)
            wiring.join_sharing(ranks, sharing)
        if len(everyone) > 1:
            links.pipeline = wiring.make_group(everyone) or links.pipeline
    if stage_map.num_replicas > 1:
        for held in slices:
            for ranks_of_place in held.ranks:
                links.replicas = wiring.make_group(ranks_of_place) or links.replicas
                if has_mesh:
                    links.mesh = wiring.make_group(ranks_of_place) or links.mesh
    return links


class _Wiring:
    """Makes groups and channels of one rank. Every rank makes the same calls, in the same order."""

    def __init__(self, links: Links, rank: int, transport: Transport) -> None:
        self.links, self.rank, self.transport = links, rank, transport
        self.timeout = to_timeout(links.arrivals.patience_s)

    def make_group(self, ranks: Sequence[int]) -> Any:
        """A group of these ranks; None where this one is not among them."""
        return self._make_group(ranks, self.timeout)

    def _make_group(self, ranks: Sequence[int], timeout: timedelta) -> Any:
        group = dist.new_group(list(ranks), backend=self.transport.backend, timeout=timeout)
        return group if self.rank in ranks else None

    def connect_neighbours(
        self, ranks: Sequence[int], neighbours: Iterable[tuple[int, int]]
    ) -> None:
        """Channels both ways for each two places, of those that `ranks` hold in one replica."""
        links = self.links
        for a, b in neighbours:
            first, second = ranks[a], ranks[b]
            forward, backward = (self._make_group((first, second), NO_TIMEOUT) for _ in range(2))
            if self.rank == first:
                links.activations_out[b] = sender = self._send_to(forward, second)
                links.gradients_in[b] = self._receive_from(backward, second, sender)
            if self.rank == second:
                links.gradients_out[a] = sender = self._send_to(backward, first)
                links.activations_in[a] = self._receive_from(forward, first, sender)

    def join_sharing(self, ranks: Sequence[int], sharing: Sequence[tuple[int, ...]]) -> None:
        """A group for each set of places that hold copies of a weight."""
        for places in sharing:
            group = self.make_group([ranks[p] for p in places])
            if group is not None:
                self.links.sharing[places] = group

    def _send_to(self, group: Any, peer: int) -> Sender:
        return Sender(self.transport.make_wire(group, peer), peer, self.links.arrivals)

    def _receive_from(self, group: Any, peer: int, back: Sender) -> Receiver:
        return Receiver(self.transport.make_wire(group, peer), peer, back, self.links.arrivals)


def to_timeout(patience_s: float | None) -> timedelta:
    """The limit of each group's collectives; torch's own would be half an hour."""
    return NO_TIMEOUT if patience_s is None else timedelta(seconds=patience_s)


def join_ranks() -> None:
    """Meet the other ranks over gloo. torch's half hour is for that alone, not for what follows:
    at the end, say, a rank waits for another one's last save."""
    dist.init_process_group("gloo")
    dist.distributed_c10d._set_pg_timeout(NO_TIMEOUT)


def connect_sharing(
    stage_map: StageMap, rank: int, device: torch.device, hang_timeout_s: float | None = None
) -> Any:
    """The group of the ranks that share this rank's layers; every rank calls it."""
    store = dist.distributed_c10d._get_default_store()
    key = f"varuna/{next(_numbers)}"
    transport = choose_transport(device, store, f"{key}/gpu", rank, dist.get_world_size())
    timeout = to_timeout(hang_timeout_s)
    mine = None
    for place in range(stage_map.depth):
        for replica in range(stage_map.num_replicas):
            ranks = stage_map.sharing(place, replica)
            group = dist.new_group(ranks, backend=transport.backend, timeout=timeout)
            mine = group if rank in ranks else mine
    return mine
