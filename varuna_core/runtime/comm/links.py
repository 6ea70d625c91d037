"""Create the process groups of a layout, and a rank's channels to its neighbours.

    place a ──activations──► place b      a group of two for each direction, replica, and pair of
    place a ◄──gradients──── place b      places that hold stages s and s + 1
    others: the ranks of a replica (agreement on a step), the replicas of a place (gradients), the
    places of a replica that hold copies of a weight

With tensor parallelism, all groups except the replica's are created for each tensor rank of the
stage map; the ranks that shard a place's layers have another group (`connect_sharing`).

With several stages per rank, two places may need both kinds of channel in both directions; the
engine passes values between two stages of the same rank without a channel.

With NCCL, all ranks also form a ring in which each rank is watched by the previous one: NCCL does
not report a lost rank, and replicas may have no channel between them. The first message of a group
creates its communicator, so `connect` sends a message through each group, in the order of
`plan_groups`, and waits for it. This cannot deadlock: the ranks of the first group whose message is
still pending have no earlier message to wait for, so all of them have reached this group.

Every rank calls `new_group` for all groups, as torch requires, since groups are named by counting
the calls. A rank outside a group does not access the store (torch 2.9 to 2.13;
TORCH_DIST_INIT_BARRIER=1 would make each call a barrier of all ranks). `use_local_synchronization`
would name a group by the rank's number of groups, which differs between neighbours.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.records.rank_map import StageMap
from varuna_core.runtime.comm.channel import (
    BYE,
    POISON,
    Arrivals,
    Receiver,
    ReceivingEnd,
    Sender,
    SendingEnd,
)
from varuna_core.runtime.comm.devices import GLOO
from varuna_core.runtime.comm.failure import (
    ChannelClosed,
    FailureBoard,
    abort_work,
    close_group,
    find_nccl,
)
from varuna_core.runtime.comm.transport import Transport, choose_transport
from varuna_core.runtime.comm.wire import Wire, poll

log = logging.getLogger(__name__)

# A standing receive may wait through the user's longest pause; what has failed closes its groups.
NO_TIMEOUT = timedelta(days=365)
JOIN_TIMEOUT_S = 2.0
BOARD_S = 1.0
"""Minimum seconds between two reads of the store while a rank waits for its GPU."""

_numbers = itertools.count()


@dataclass(kw_only=True)
class Links:
    """A rank's channels and groups; a group is None if no other rank would be in it."""

    stage_map: StageMap
    place: int
    """This rank's column of the stage map; equals its stage if the rank holds only one."""

    replica: int
    board: FailureBoard
    activations_in: dict[int, ReceivingEnd] = field(default_factory=dict)
    """Incoming activations, keyed by the place at the other end, as in the next three fields."""

    gradients_in: dict[int, ReceivingEnd] = field(default_factory=dict)
    activations_out: dict[int, SendingEnd] = field(default_factory=dict)
    gradients_out: dict[int, SendingEnd] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)
    pipeline: Any = None
    """Group of all ranks of the replica."""

    replicas: Any = None
    tensor: Any = None
    """Group of the ranks that shard this place's layers."""

    mesh: Any = None
    """Group of the same ranks as `replicas`, for torch modules that store it; sends no messages."""

    sharing: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Groups of the places that share weights, keyed by the tuple of places."""

    watching: list[ReceivingEnd] = field(default_factory=list)
    """With NCCL, channels from the ranks before and after this one, which watch each other. Their
    only message announces that the rank has left."""

    watchers: list[SendingEnd] = field(default_factory=list)
    """Channels to the ranks before and after this one."""

    on_gpu: list[Any] = field(default_factory=list)
    """NCCL backends of all groups."""

    others: list[Any] = field(default_factory=list)
    """Groups created by the program, closed together with these."""

    let_go: Callable[[], None] = lambda: None
    """Function that releases groups held elsewhere: a group closes once nothing refers to it."""

    closed: bool = False
    pid: int = field(default_factory=os.getpid)
    """The process that may close these links; a forked child may not."""

    @property
    def name(self) -> str:
        return self.stage_map.name(self.stage_map.ranks[self.place][self.replica])

    @property
    def senders(self) -> Iterator[SendingEnd]:
        channels = self.activations_out.values(), self.gradients_out.values()
        return itertools.chain(*channels, self.watchers)

    @property
    def receivers(self) -> Iterator[ReceivingEnd]:
        channels = self.activations_in.values(), self.gradients_in.values()
        return itertools.chain(*channels, self.watching)

    def find_lost_peer(self) -> str:
        """Return which neighbour is gone, and how; empty while no neighbour is known to be gone."""
        channels = self.activations_in.values(), self.gradients_in.values()
        return _find_lost(itertools.chain(*channels))

    def hold(self, capacity: int) -> None:
        """Set the maximum number of sent, not yet taken messages on each channel."""
        for sender in self.senders:
            sender.hold(capacity)
        for receiver in self.receivers:
            receiver.hold(capacity)

    def flush(self) -> None:
        for sender in self.senders:
            sender.flush()

    def keep_group(self, group: Any) -> None:
        """Close a group of the program together with these, and abort its work if a rank fails."""
        self.others.append(group)
        if (nccl := find_nccl(group)) is not None:
            self.on_gpu.append(nccl)

    def share_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on this place's replicas with the first one's; one message per type."""
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
        """Close the channels and gloo's groups in an orderly way; no step can follow.

        A gloo thread may still hold the tensors of the last all-reduce, and releasing them while
        Python exits aborts the process (torch 2.13). Closing the group ends that thread now.
        """
        if not self._send_last_word(BYE):
            return
        for receiver in self.receivers:
            receiver.end(JOIN_TIMEOUT_S)
        if not self.on_gpu:
            self._close_groups()

    def abort(self) -> None:
        """Close all channels and groups, so that ranks waiting for this one get an error."""
        if not self._send_last_word(POISON):
            return
        for receiver in self.receivers:
            receiver.discard()
        abort_work(self.on_gpu)
        self.on_gpu.clear()
        self._close_groups()

    def _close_groups(self) -> None:
        self.let_go()
        own = (self.pipeline, self.replicas, self.tensor, *self.sharing.values())
        for group in (*own, *self.others):
            if group is not None:
                close_group(group)
        self.pipeline = self.replicas = self.tensor = None
        self.sharing.clear()
        self.others.clear()

    def settle(self, device: torch.device) -> None:
        """Wait for this rank's GPU before the host reads its results.

        Raise ChannelClosed if a rank is gone, since collectives with this rank would never end.
        """
        if not self.on_gpu:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch: untyped
        event.record(torch.cuda.current_stream(device))
        read_s = 0.0

        def look(waited_s: float) -> None:
            nonlocal read_s
            self.look(waited_s, asks_board=waited_s - read_s >= BOARD_S)
            read_s = waited_s if waited_s - read_s >= BOARD_S else read_s

        poll(event.query, look)

    def look(self, waited_s: float, asks_board: bool) -> None:
        """Raise ChannelClosed if a rank is known to be gone, by the failure board too if
        `asks_board`, or if the GPU has been awaited (`waited_s`) for longer than the timeout."""
        lost, patience_s = _find_lost(self.receivers), self.arrivals.patience_s
        if not lost and asks_board:
            lost = self.board.read()
        if lost:
            raise ChannelClosed(lost)
        if patience_s is not None and waited_s > patience_s:
            raise ChannelClosed(
                f"this rank's GPU has not finished its work for {patience_s:g} s "
                "(hang_timeout_s): a rank in one of its collectives hangs, or one action takes "
                "longer"
            )

    def expect_open(self) -> None:
        """Raise RuntimeError after `close`, or after a failure of any rank."""
        if self.closed:
            raise RuntimeError("this Varuna was closed, or a rank has failed: restart the training")
        if not self._is_ours():
            raise RuntimeError(
                "a forked child process called Varuna: call it only in the rank's own process"
            )

    def _is_ours(self) -> bool:
        """Return True in the process that created these links, False in a forked child."""
        return os.getpid() == self.pid

    def _send_last_word(self, word: int) -> bool:
        if self.closed or not self._is_ours():
            return False
        self.closed = True
        for sender in self.senders:
            sender.close(word)
        return True


def _find_lost(receivers: Iterable[ReceivingEnd]) -> str:
    return next(filter(None, (receiver.find_lost_peer() for receiver in receivers)), "")


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """A group to create, or the two groups for the channels between two ranks."""

    kind: Literal["channels", "sharing", "pipeline", "replicas", "mesh", "watch"]
    ranks: tuple[int, ...]
    places: tuple[int, ...] = ()


def plan_groups(
    stage_map: StageMap,
    sharing: Sequence[tuple[int, ...]],
    has_mesh: bool = False,
    has_watch: bool = False,
) -> Iterator[PlannedGroup]:
    """Yield all groups of all ranks, in the order in which `connect` creates and tests them."""
    slices = [stage_map.slice(tensor_rank) for tensor_rank in range(stage_map.tensor)]
    for number in range(stage_map.num_replicas):
        everyone: list[int] = []
        for held in slices:
            ranks = [held.ranks[p][number] for p in range(held.depth)]
            everyone += ranks
            for pair in held.neighbours:
                yield _plan("channels", ranks, pair)
            for places in sharing:
                yield _plan("sharing", ranks, places)
        if len(everyone) > 1:
            yield PlannedGroup(kind="pipeline", ranks=tuple(everyone))
    if stage_map.num_replicas > 1:
        for held in slices:
            for ranks_of_place in held.ranks:
                yield PlannedGroup(kind="replicas", ranks=tuple(ranks_of_place))
                if has_mesh:
                    yield PlannedGroup(kind="mesh", ranks=tuple(ranks_of_place))
    if has_watch:
        world = stage_map.world_size
        for rank in range(world if world > 2 else 1):
            yield PlannedGroup(kind="watch", ranks=(rank, (rank + 1) % world))


def _plan(
    kind: Literal["channels", "sharing"], ranks: Sequence[int], places: tuple[int, ...]
) -> PlannedGroup:
    return PlannedGroup(kind=kind, ranks=tuple(ranks[p] for p in places), places=places)


def connect(
    stage_map: StageMap,
    rank: int,
    sharing: Sequence[tuple[int, ...]],
    device: torch.device,
    hang_timeout_s: float | None = None,
    has_mesh: bool = False,
    tensor: Any = None,
    let_go: Callable[[], None] = lambda: None,
    may_share: bool = False,
) -> Links:
    """Create the groups, in the same order on every rank, and return this rank's links.

    `tensor` is the group of the ranks that shard this place's layers, if any, and `let_go` releases
    groups that are held elsewhere. `may_share` is the result of devices.may_share for this rank.
    """
    place, replica = stage_map.find(rank)
    if stage_map.world_size == 1:
        return Links(stage_map=stage_map, place=0, replica=0, board=FailureBoard(None, ""))
    store = dist.distributed_c10d._get_default_store()
    key = f"varuna/{next(_numbers)}"
    board = FailureBoard(store, f"{key}/failure")
    transport = choose_transport(
        device, store, f"{key}/gpu", rank, dist.get_world_size(), may_share=may_share
    )
    if transport.shared and rank == 0:
        log.warning("%s: messages and sums go through host memory", transport.shared)
    links = Links(
        stage_map=stage_map,
        place=place,
        replica=replica,
        board=board,
        arrivals=Arrivals(hang_timeout_s),
        tensor=tensor,
        let_go=let_go,
    )
    if tensor is not None and (nccl := find_nccl(tensor)) is not None:
        links.on_gpu.append(nccl)
    wiring = Wiring(links, rank, transport)
    for planned in plan_groups(stage_map, sharing, has_mesh, transport.has_nccl):
        with our_groups(channels=planned.kind in ("channels", "watch")):
            wiring.make(planned)
    return links


class Wiring:
    """Creates one rank's groups and channels; all ranks must make the same calls in order."""

    def __init__(self, links: Links, rank: int, transport: Transport) -> None:
        self.links, self.rank, self.transport = links, rank, transport
        self.timeout = to_timeout(links.arrivals.patience_s)

    def make(self, planned: PlannedGroup) -> None:
        if planned.kind in ("channels", "watch"):
            self._connect(planned)
            return
        group = self._make_group(planned.ranks, self.transport.backend, self.timeout)
        if group is None:
            return
        self._warm(group)
        if planned.kind == "sharing":
            self.links.sharing[planned.places] = group
        else:
            setattr(self.links, planned.kind, group)

    def _make_group(self, ranks: Sequence[int], backend: str, timeout: timedelta) -> Any:
        """Return a group of these ranks; None if this rank is not among them."""
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if self.rank not in ranks:
            return None
        if (nccl := find_nccl(group)) is not None:
            self.links.on_gpu.append(nccl)
        return group

    def _connect(self, planned: PlannedGroup) -> None:
        """Create channels in both directions between two ranks."""
        is_watch = planned.kind == "watch"
        backend = GLOO if is_watch else self.transport.backend
        there, back = (self._make_group(planned.ranks, backend, NO_TIMEOUT) for _ in range(2))
        if self.rank not in planned.ranks:
            return
        is_first = self.rank == planned.ranks[0]
        peer = planned.ranks[is_first]
        if not is_first:
            there, back = back, there
        make = self.transport.make_text_wire if is_watch else self.transport.make_wire
        out, into = make(there, peer), make(back, peer)
        links = self.links
        if is_watch:
            watcher = Sender(out, peer, links.arrivals)
            links.watchers.append(watcher)
            links.watching.append(Receiver(into, peer, watcher, links.arrivals))
            return
        for wire, sends in ((out, True), (into, False))[:: 1 if is_first else -1]:
            self._try(wire, sends)
        sender, receiver = self.transport.join(out, into, peer, is_first, links.arrivals)
        if is_first:
            links.activations_out[planned.places[1]] = sender
            links.gradients_in[planned.places[1]] = receiver
        else:
            links.gradients_out[planned.places[0]] = sender
            links.activations_in[planned.places[0]] = receiver

    def _try(self, wire: Wire, sends: bool) -> None:
        """Send one number over this wire, so that NCCL's communicator exists before step 1."""
        if self.transport.has_nccl:
            number = torch.ones(1, device=self.transport.device)
            work = wire.group.send if sends else wire.group.recv
            work([number], wire.place, 0).wait()
            self.links.settle(self.transport.device)

    def _warm(self, group: Any) -> None:
        if self.transport.has_nccl:
            warm(group, self.transport.device)
            self.links.settle(self.transport.device)


def warm(group: Any, device: torch.device) -> None:
    """All-reduce a number over a group, so that the communicator exists before the first step."""
    dist.all_reduce(torch.ones(1, device=device), group=group)


class SharedGloo(dist.ProcessGroupGloo):
    """A gloo group that shares its socket thread with other groups. All channels share one thread
    and all other groups a second one, so that no activation waits for a large all-reduce.

    By default, each gloo group has such a thread, which wakes 100 times per second: with twenty
    groups, an idle rank uses 3.9 % of a processor, and 0.6 % with shared threads (torch 2.13).
    """

    _devices: ClassVar[dict[bool, list[Any]]] = {}
    """gloo devices, one thread each, keyed by use: True for channels, False for other groups."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        """Create the group as torch does; `more` are arguments that newer versions of torch pass
        (`enable_reconfigure=False` in 2.15)."""
        options: Any = self._Options()  # type: ignore[attr-defined]  # torch: without the line
        options._devices = self._find_devices(getattr(_current, "channels", False))
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)

    @classmethod
    def _find_devices(cls, channels: bool) -> list[Any]:
        """Return devices on the network interfaces that torch itself would select."""
        if channels not in cls._devices:
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            cls._devices[channels] = [cls.create_device(interface=name) for name in names] or [
                cls.create_default_device()
            ]
        return cls._devices[channels]


_current = threading.local()
"""Thread-local; its `channels` is True while this thread creates groups for channels."""
_entered: list[tuple[Any, Any, Any]] = []
"""Values to restore (the user's group, its GPU, torch's class), one equal entry for each open
`our_groups`: in tests, ranks are threads and open several at once."""
_entering = threading.Lock()


@contextmanager
def our_groups(channels: bool = False) -> Iterator[None]:
    """Let groups created in this context share the threads of `SharedGloo`, and keep torch from
    splitting them from the user's NCCL communicator, which would involve every rank in each group.
    """
    c10d: Any = dist.distributed_c10d
    world = c10d._get_default_group()
    with _entering:
        _entered.append(
            _entered[-1] if _entered else (world, world.bound_device_id, c10d.ProcessGroupGloo)
        )
        world.bound_device_id = None
        if hasattr(dist.ProcessGroupGloo, "_Options"):  # torch 2.9 to 2.15; no promise of theirs
            c10d.ProcessGroupGloo = SharedGloo
    before, _current.channels = getattr(_current, "channels", False), channels
    try:
        yield
    finally:
        _current.channels = before
        with _entering:
            world, bound, gloo = _entered.pop()
            if not _entered:
                world.bound_device_id, c10d.ProcessGroupGloo = bound, gloo


def to_timeout(patience_s: float | None) -> timedelta:
    """Return the timeout of each group's collectives; without `patience_s`, they have none."""
    return NO_TIMEOUT if patience_s is None else timedelta(seconds=patience_s)


def join_ranks() -> None:
    """Create the default group over gloo. torch's timeout of 30 minutes applies only to this call:
    later, a rank may wait longer, for instance for another rank's last save."""
    dist.init_process_group("gloo")
    set_timeout = getattr(dist, "set_timeout", None)  # from torch 2.14 on
    (set_timeout or dist.distributed_c10d._set_pg_timeout)(NO_TIMEOUT)


def connect_sharing(
    stage_map: StageMap,
    rank: int,
    device: torch.device,
    hang_timeout_s: float | None = None,
    may_share: bool = False,
) -> Any:
    """Return the group of the ranks that shard this rank's layers; every rank must call this."""
    store = dist.distributed_c10d._get_default_store()
    key = f"varuna/{next(_numbers)}"
    size = dist.get_world_size()
    transport = choose_transport(device, store, f"{key}/gpu", rank, size, may_share=may_share)
    timeout = to_timeout(hang_timeout_s)
    mine = None
    with our_groups():
        for place in range(stage_map.depth):
            for replica in range(stage_map.num_replicas):
                ranks = stage_map.sharing(place, replica)
                group = dist.new_group(ranks, backend=transport.backend, timeout=timeout)
                mine = group if rank in ranks else mine
    if transport.has_nccl:
        warm(mine, device)
    return mine
