"""The process groups of a layout, and a rank's channels to its neighbours.

place a ──activations──► place b      a group of two each way, a replica, for each two places that
place a ◄──gradients──── place b      hold a stage s and a stage s + 1
the ranks of a replica (verdicts), the replicas of a place (gradients), the places of a replica
that hold copies of a weight

With tensor parallelism all but the verdicts' group are made for each slice of the stage map; the
ranks that share a place's layers have one more (`connect_sharing`).

With several stages a rank two places may have both kinds of channel in both directions; what
crosses between two stages of one rank is the engine's matter.

With NCCL all ranks stand in a ring too, each watched by the one before it: NCCL does not tell of a
rank that is gone, and replicas need have no channel. Communicators are made by the first message,
so `connect` sends one through each group, in the order of `plan_groups`. A rank goes on when its
message has come. That cannot lock up: of all messages yet to come, the first in that order has none
before it, so both its ranks, or all of its group's, are at it.

Every rank calls `new_group` for all groups, as torch asks of it, for a group's name is their count.
Who is not of a group asks the store nothing (torch 2.9 to 2.13; TORCH_DIST_INIT_BARRIER=1 would
make each a barrier of all). `use_local_synchronization` names a group by the number of those that
this rank has, which two neighbours in a pipeline do not have in common.
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
"""While a rank waits for its GPU, the store is read at most once in this many seconds."""

_numbers = itertools.count()


@dataclass(kw_only=True)
class Links:
    """A rank's channels and groups; None if there is no other rank."""

    stage_map: StageMap
    place: int
    """This rank's column of the stage map: its stage, if it holds only one."""

    replica: int
    board: FailureBoard
    activations_in: dict[int, ReceivingEnd] = field(default_factory=dict)
    """Incoming activations by the place at the other end, as for the next three fields."""

    gradients_in: dict[int, ReceivingEnd] = field(default_factory=dict)
    activations_out: dict[int, SendingEnd] = field(default_factory=dict)
    gradients_out: dict[int, SendingEnd] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)
    pipeline: Any = None
    """Group of all ranks of the replica."""

    replicas: Any = None
    tensor: Any = None
    """Group of the ranks that share this place's layers."""

    mesh: Any = None
    """Same ranks as `replicas`, for torch's modules that keep it; carries no messages."""

    sharing: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Groups by the places that share weights."""

    watching: list[ReceivingEnd] = field(default_factory=list)
    """With NCCL, channels from the ranks before and after this one, which watch each other. The
    only message is that a rank has gone."""

    watchers: list[SendingEnd] = field(default_factory=list)
    """Channels to these two ranks."""

    on_gpu: list[Any] = field(default_factory=list)
    """NCCL's parts of all groups."""

    others: list[Any] = field(default_factory=list)
    """Groups of the program's own, which are closed with these."""

    let_go: Callable[[], None] = lambda: None
    """Releases groups held elsewhere: a group closes when nobody holds it."""

    closed: bool = False
    pid: int = field(default_factory=os.getpid)
    """The process that may close these links, unlike a forked child."""

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
        """Return the first neighbour that has gone, and how; empty while all are there."""
        channels = self.activations_in.values(), self.gradients_in.values()
        return _find_lost(itertools.chain(*channels))

    def hold(self, capacity: int) -> None:
        """Allow this many sent and not yet taken messages on each channel."""
        for sender in self.senders:
            sender.hold(capacity)
        for receiver in self.receivers:
            receiver.hold(capacity)

    def flush(self) -> None:
        for sender in self.senders:
            sender.flush()

    def keep_group(self, group: Any) -> None:
        """Close a group of the program's own with these, and abort its work if a rank fails."""
        self.others.append(group)
        if (nccl := find_nccl(group)) is not None:
            self.on_gpu.append(nccl)

    def share_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors on this place's replicas with the first one's, a message for each
        type."""
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

        A thread of gloo may still hold the tensors of the last sum, and releasing them while Python
        ends aborts the process (torch 2.13). Closing the group ends that thread here.
        """
        if not self._send_last_word(BYE):
            return
        for receiver in self.receivers:
            receiver.end(JOIN_TIMEOUT_S)
        if not self.on_gpu:
            self._close_groups()

    def abort(self) -> None:
        """Close all channels and groups, so that every wait for this rank ends with an error."""
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

        Sums with other ranks never end if a rank is gone: then raise ChannelClosed.
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
        """Raise ChannelClosed if a rank is known to be gone, or the wait was long enough."""
        lost, patience_s = _find_lost(self.receivers), self.arrivals.patience_s
        if not lost and asks_board:
            lost = self.board.read()
        if lost:
            raise ChannelClosed(lost)
        if patience_s is not None and waited_s > patience_s:
            raise ChannelClosed(
                f"what this rank's GPU has to do has not ended for {patience_s:g} s "
                "(hang_timeout_s): a rank that it sums with hangs, or one action takes longer"
            )

    def expect_open(self) -> None:
        """Raise RuntimeError after `close`, or after a failure of any rank."""
        if self.closed:
            raise RuntimeError("this Varuna is closed, or a rank has failed: restart the training")
        if not self._is_ours():
            raise RuntimeError("this process was forked by a rank, which alone may take a step")

    def _is_ours(self) -> bool:
        """Return True in the process that made these links, False in a forked child."""
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
    """A group to make, or the two groups of the channels between two ranks."""

    kind: Literal["channels", "sharing", "pipeline", "replicas", "mesh", "watch"]
    ranks: tuple[int, ...]
    places: tuple[int, ...] = ()


def plan_groups(
    stage_map: StageMap,
    sharing: Sequence[tuple[int, ...]],
    has_mesh: bool = False,
    has_watch: bool = False,
) -> Iterator[PlannedGroup]:
    """Yield all groups of all ranks, in the order in which they are made and tried."""
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
    """Make the groups, in the same order on every rank, and return this rank's links.

    `tensor` is the group of the ranks that share this place's layers, if any, and `let_go` releases
    groups that are held elsewhere. `may_share` is devices.may_share for this rank's GPU.
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
        what = "sums go" if transport.has_ipc else "messages and sums go"
        log.warning("%s: %s through host memory", transport.shared, what)
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
    """Makes one rank's groups and channels; all ranks must make the same calls in order."""

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
        """Return a group of these ranks; None if this rank is not one of them."""
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if self.rank not in ranks:
            return None
        if (nccl := find_nccl(group)) is not None:
            self.links.on_gpu.append(nccl)
        return group

    def _connect(self, planned: PlannedGroup) -> None:
        """Make channels in both directions between two ranks."""
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
        """Send a number as a stage's tensors are sent, so that step 1 finds its communicator."""
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
    """Sum a number over a group, so that the first step has its communicator."""
    dist.all_reduce(torch.ones(1, device=device), group=group)


class SharedGloo(dist.ProcessGroupGloo):
    """A gloo group that shares the thread for its sockets with other groups. Channels share one,
    all other groups a second one: no activation waits behind a large sum.

    torch gives each group such a thread, which wakes a hundred times a second: with twenty groups
    an idle rank takes 3.9 % of a processor, and 0.6 % where they share (torch 2.13).
    """

    _devices: ClassVar[dict[bool, list[Any]]] = {}
    """gloo's devices, each with a thread, by use: True for channels, False for other groups."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        """Make the group as torch does; `more` are arguments that newer versions of torch add
        (`enable_reconfigure=False` in 2.15)."""
        options: Any = self._Options()  # type: ignore[attr-defined]  # torch: without the line
        options._devices = self._find_devices(getattr(_current, "channels", False))
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)

    @classmethod
    def _find_devices(cls, channels: bool) -> list[Any]:
        """Return devices on the network interfaces that torch itself would choose."""
        if channels not in cls._devices:
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            cls._devices[channels] = [cls.create_device(interface=name) for name in names] or [
                cls.create_default_device()
            ]
        return cls._devices[channels]


_current = threading.local()
"""`channels` is True if this thread is making groups for channels."""
_entered: list[tuple[Any, Any, Any]] = []
"""Values to restore (the user's group, its GPU, torch's class), one entry for each open
`our_groups`, all equal. Ranks that are threads of a test open several at once."""
_entering = threading.Lock()


@contextmanager
def our_groups(channels: bool = False) -> Iterator[None]:
    """Let groups made within share the threads of `SharedGloo`. It also keeps torch from splitting
    them from the user's NCCL communicator, which would require all ranks of the world at each
    group."""
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
    """Return the timeout of each group's collectives; torch's default is half an hour."""
    return NO_TIMEOUT if patience_s is None else timedelta(seconds=patience_s)


def join_ranks() -> None:
    """Join the other ranks over gloo. torch's half hour limits only this call: later, a rank may
    wait longer, such as for another's last save."""
    dist.init_process_group("gloo")
    dist.distributed_c10d._set_pg_timeout(NO_TIMEOUT)


def connect_sharing(
    stage_map: StageMap,
    rank: int,
    device: torch.device,
    hang_timeout_s: float | None = None,
    may_share: bool = False,
) -> Any:
    """Return the group of the ranks that share this rank's layers; every rank must call it."""
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
