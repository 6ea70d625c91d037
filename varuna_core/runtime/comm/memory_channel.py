"""One-way channel for CPU tensors between two ranks of one host, through shared memory.

    sender's main thread                        receiver's main thread
    send(): tensors ─► slot, entry, bell ─────► take(): entry ─► slot ─► tensors, bell ──┐
            slots of messages that were taken are free again ◄───────────────────────────┘

A message needs two copies and no thread. Entries and slots are stored in a memfd: it has no name,
is not limited by /dev/shm, uses memory only for written pages, and is freed when its processes end
in any way. The bells are eventfds, which count: the number of rings is the number of messages, so
each side reads only data that the other side wrote before a system call. A waiting rank sleeps
until the bell rings or the socket through which the two ranks met (`meet`) shows that the peer is
gone.

Slots are created on demand. So a send waits only until fewer than `capacity` messages are unread,
the same limit with which the schedule was verified: `walk` in varuna_core/schedule/order.py has no
other wait.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import struct
import sys
import time
import uuid
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from varuna_core.runtime.comm.bells import Bell, sleep_until
from varuna_core.runtime.comm.channel import (
    LEFT,
    Arrivals,
    MessageLayout,
    describe_hanging,
    describe_layout,
    describe_message,
    read_layout,
)
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.values import Crossing, Structure
from varuna_core.runtime.comm.wire import Wire, make_dense, make_room

log = logging.getLogger(__name__)

ENTRY = struct.Struct("qqqd")
"""A message's entry: offset and size of its slot, size of its description, time of sending."""
MOST_UNREAD = 4096
"""Number of entries of a channel, which are reused in turn."""
FIRST_SLOT = MOST_UNREAD * ENTRY.size
ALIGNMENT = 64
"""Alignment of tensors in bytes, as in torch's own allocator."""
FILE_SIZE = 1 << 40
"""Size of the sparse file in bytes, reserved at creation so that a process limit shows at once;
only written pages use memory."""
CLOSED = "Connection closed by peer"
YES, NO = b"\1", b"\0"
NAME_SIZE = 16
PEER = struct.Struct("3i")
"""Layout of SO_PEERCRED: process id, user id and group id of a socket's peer."""


class SharedFile:
    """Memory shared by two processes, mapped in parts at their first use."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._parts: dict[int, tuple[int, mmap.mmap]] = {}
        os.ftruncate(descriptor, FILE_SIZE)
        self.entries = mmap.mmap(descriptor, FIRST_SLOT)

    def fill(self, offset: int, size: int) -> None:
        """Allocate memory for these bytes now; a shortage later would kill the process (SIGBUS)."""
        os.posix_fallocate(self.descriptor, offset, size)

    def find(self, offset: int, size: int) -> int:
        """Return the address of a part, which must be requested with the same size each time."""
        if offset not in self._parts:
            part = mmap.mmap(self.descriptor, size, offset=offset)
            # The view goes at once, or the part could not be closed; the address holds until then.
            self._parts[offset] = ctypes.addressof(ctypes.c_char.from_buffer(part)), part
        return self._parts[offset][0]

    def close(self) -> None:
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        for _, part in self._parts.values():
            part.close()
        self._parts.clear()

    def __del__(self) -> None:
        self.close()


class Lane:
    """Memory that the two ends of a channel share."""

    def __init__(self, sent: Bell, taken: Bell, memory: SharedFile) -> None:
        self.sent, self.taken, self.memory = sent, taken, memory

    @staticmethod
    def make() -> Lane:
        return Lane(Bell.make(), Bell.make(), SharedFile(os.memfd_create("varuna")))

    @staticmethod
    def open(descriptors: Sequence[int]) -> Lane:
        sent, taken, memory = descriptors
        return Lane(Bell(sent), Bell(taken), SharedFile(memory))

    def list_descriptors(self) -> list[int]:
        return [self.sent.descriptor, self.taken.descriptor, self.memory.descriptor]

    def close(self) -> None:
        self.memory.close()
        self.sent.close()
        self.taken.close()


class Line:
    """Socket between two ranks of a host, by which each notices that the other has gone."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._gone = ""

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def connect(self, address: str) -> None:
        self._socket.connect(address)

    def read_user(self) -> int:
        """Return the user id of the peer's process."""
        held = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        user: int = PEER.unpack(held)[1]
        return user

    def give(self, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._socket, [YES], descriptors)

    def take(self, count: int) -> list[int]:
        """Receive file descriptors from the peer; raise OSError if they do not arrive."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, len(YES), count)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) < count:
            raise OSError("the other rank cannot use shared memory")
        return descriptors

    def say(self, word: str) -> None:
        try:
            self._socket.send(word.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("not said, %s: %s", word, error)

    def look(self) -> str:
        """Return why the peer can neither send nor receive any more; empty while it still can."""
        if not self._gone:
            try:
                word = self._socket.recv(256, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return ""
            except OSError:
                word = b""
            self._gone = word.decode() or CLOSED
        return self._gone

    def close(self) -> None:
        self._gone = self._gone or "this rank has closed the channel"
        self._socket.close()

    def __del__(self) -> None:
        self._socket.close()


@dataclass(kw_only=True)
class Slot:
    """Memory for one message."""

    offset: int
    size: int
    filled: int = 0
    """Number of the slot's bytes that have memory allocated."""

    number: int = 0
    """Number of the last message that was in the slot."""


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _place(layout: MessageLayout) -> tuple[list[tuple[int, int, int]], int]:
    """Return the index, offset and size of each nonempty tensor, and the total size."""
    places, end = [], 0
    for index, spec in enumerate(layout.specs):
        if spec is not None and (size := spec[0].numel() * spec[1].itemsize):
            places.append((index, end, size))
            end = _align(end + size)
    return places, end


class MemorySender:
    """Sending end of a channel in shared memory."""

    def __init__(self, line: Line, lane: Lane, peer: int, arrivals: Arrivals) -> None:
        self.line, self.lane, self.peer, self.arrivals = line, lane, peer, arrivals
        self.capacity = 1
        self._num_sent = self._num_taken = 0
        self._layout: MessageLayout | None = None
        self._places: list[tuple[int, int, int]] = []
        self._size = 0
        self._slots: list[Slot] = []
        """Slots, sorted by size."""

        self._end = FIRST_SLOT

    def hold(self, capacity: int) -> None:
        if capacity > MOST_UNREAD:
            raise ValueError(
                f"the schedule leaves up to {capacity} messages unread between two ranks of a "
                f"host, but at most {MOST_UNREAD} are supported: use fewer micro-batches"
            )
        self.capacity = capacity

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        """Copy the tensors; the caller may change them afterwards."""
        if self._num_sent - self._num_taken >= self.capacity:
            self._wait_for_room()
        began = time.perf_counter()
        tensors = [t if t is None else make_dense(t) for t in tensors]
        layout, described = describe_message(tensors, structure, self.arrivals.batch), b""
        if layout != self._layout:
            described = describe_layout(layout)
            self._layout = layout
            self._places, self._size = _place(layout)
        start = _align(len(described))
        slot = self._take_slot(start + self._size)
        if start + self._size > slot.filled:
            self._fill(slot, start + self._size)
        address = self.lane.memory.find(slot.offset, slot.size)
        if described:
            ctypes.memmove(address, described, len(described))
        for index, place, size in self._places:
            tensor = tensors[index]
            assert tensor is not None
            ctypes.memmove(address + start + place, tensor.data_ptr(), size)
        entry = slot.offset, slot.size, len(described), began
        at = self._num_sent % MOST_UNREAD * ENTRY.size
        ENTRY.pack_into(self.lane.memory.entries, at, *entry)
        self._num_sent += 1
        self.lane.sent.ring()
        self._num_taken += self.lane.taken.hear()  # for the next one, when this one is on its way

    def _wait_for_room(self) -> None:
        patience_s = self.arrivals.patience_s
        bells = self.lane.taken.descriptor, self.line.descriptor
        if not sleep_until(self._has_room, bells, patience_s):
            raise describe_hanging([self.peer], patience_s)

    def _has_room(self) -> bool:
        self._num_taken += self.lane.taken.hear()
        if self._num_sent - self._num_taken < self.capacity:
            return True
        if gone := self.line.look():
            raise ChannelClosed(f"cannot send to rank {self.peer}: {gone}")
        return False

    def _take_slot(self, size: int) -> Slot:
        """Return the smallest free slot that is large enough, or a new one."""
        for slot in self._slots:
            if slot.size >= size and slot.number < self._num_taken:
                break
        else:
            size = max(mmap.ALLOCATIONGRANULARITY, 1 << (size - 1).bit_length())
            slot = Slot(offset=self._end, size=size)
            self._end += size
            insort(self._slots, slot, key=lambda one: one.size)
        slot.number = self._num_sent
        return slot

    def _fill(self, slot: Slot, size: int) -> None:
        try:
            self.lane.memory.fill(slot.offset, size)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate shared memory for a message of {size} bytes to rank {self.peer}: "
                f"{error}"
            ) from error
        slot.filled = size

    def flush(self) -> None:
        """Return at once, since sent tensors have been copied."""

    def close(self, word: int) -> None:
        """Send a final message; messages sent before can still be taken."""
        self.line.say(LEFT[word])
        self.lane.close()


class MemoryReceiver:
    """Receiving end of a channel in shared memory."""

    def __init__(self, line: Line, lane: Lane, peer: int, arrivals: Arrivals) -> None:
        self.line, self.lane, self.peer, self.arrivals = line, lane, peer, arrivals
        self.batch = ""
        self.came_s = 0.0
        """Time of sending of the last message by the sender's clock plus the time to copy it out,
        so that neither rank's own work is counted as transit."""

        self._num_there = self._num_taken = 0
        self._layout = MessageLayout(specs=[], structure=None)
        self._places: list[tuple[int, int, int]] = []

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.lane.sent.descriptor, self.line.descriptor

    def is_there(self) -> bool:
        """Return True if `take` would not block."""
        if self._hear():
            return True
        is_gone = bool(self.line.look())
        if is_gone:
            self._hear()  # what it had sent before
        return is_gone

    def _hear(self) -> bool:
        if not self._num_there and self.lane.sent.descriptor >= 0:
            self._num_there = self.lane.sent.hear()
        return self._num_there > 0

    def take(self) -> Crossing:
        """Wait for the next message and return it; a tensor is None if the sender passed None."""
        tensors: list[Any] | None = None
        if not self._hear():
            tensors = self._make_room()  # while there is time
            patience_s = self.arrivals.patience_s
            if not sleep_until(self.is_there, self.descriptors, patience_s):
                raise describe_hanging([self.peer], patience_s)
        if not self._num_there:
            raise ChannelClosed(f"cannot receive from rank {self.peer}: {self.line.look()}")
        began, memory = time.perf_counter(), self.lane.memory
        at = self._num_taken % MOST_UNREAD * ENTRY.size
        offset, size, num_described, sent_s = ENTRY.unpack_from(memory.entries, at)
        address = memory.find(offset, size)
        if num_described:
            self._layout = read_layout(ctypes.string_at(address, num_described))
            self._places, _ = _place(self._layout)
            address += _align(num_described)
        if tensors is None or num_described:
            tensors = self._make_room()
        for index, place, count in self._places:
            ctypes.memmove(tensors[index].data_ptr(), address + place, count)
        self._num_there -= 1
        self._num_taken += 1
        self.lane.taken.ring()
        self.came_s = sent_s + time.perf_counter() - began
        self.batch = self._layout.batch
        return Crossing(tuple(tensors), self._layout.structure)

    def _make_room(self) -> list[Any]:
        """Allocate tensors with the layout of the last message."""
        return [None if spec is None else make_room(spec) for spec in self._layout.specs]

    def find_lost_peer(self) -> str:
        """Return the reason why the peer can send nothing more; empty while it still can."""
        gone = self.line.look()
        return gone and f"rank {self.peer}: {gone}"

    def hold(self, capacity: int) -> None:
        """Do nothing: the sender counts unread messages."""

    def discard(self) -> None:
        """Close the channel, so that the sender notices and does not block on a failed rank."""
        self.end()

    def end(self, limit_s: float = 0.0) -> None:
        """Free the memory of this channel and of the channel in the opposite direction."""
        self.line.close()
        self.lane.close()


# How two ranks meet: they have a wire each way, and both call `meet`.

Shared = tuple[Line, Lane, Lane]
"""A socket and the memory of both channels; the second channel leads to the first rank."""


def meet(
    out: Wire, into: Wire, peer: int, is_first: bool, arrivals: Arrivals
) -> tuple[MemorySender, MemoryReceiver] | None:
    """Return channels to and from a rank of the same host; None on both ranks if impossible.

        first                           second
        listens: a socket's name ─────► connects
                        ◄────────────── confirms the connection
        memory, by the socket ────────► maps it
                        ◄────────────── confirms the mapping

    An abstract socket belongs to a network namespace: other hosts, and containers with their own
    network, cannot see it. Any local user can see its name, so other users' connections are closed.
    """
    shared = _offer(out, into) if is_first else _answer(out, into)
    if shared is None:
        return None
    line, there, back = shared
    if not is_first:
        there, back = back, there
    return MemorySender(line, there, peer, arrivals), MemoryReceiver(line, back, peer, arrivals)


def _offer(out: Wire, into: Wire) -> Shared | None:
    name, line = uuid.uuid4().bytes, None
    offered = _listen(name)
    _say(out, name if offered is not None else bytes(NAME_SIZE))
    has_dialled = _hear(into, 1) == YES
    if offered is None:
        return None
    listening, lanes = offered
    with listening:
        if has_dialled:
            line = _let_in(listening, lanes)
    is_shared = has_dialled and _hear(into, 1) == YES
    return (line, *lanes) if line is not None and is_shared else None


def _listen(name: bytes) -> tuple[socket.socket, tuple[Lane, Lane]] | None:
    """Listen on a socket and create the shared memory; None if this is not possible here."""
    if sys.platform != "linux":
        return None
    listening = None
    try:
        lanes = Lane.make(), Lane.make()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(_spell(name))
        listening.listen(1)
        listening.setblocking(False)  # who says that it has connected has
    except (OSError, AttributeError) as error:
        _warn(str(error))
        if listening is not None:
            listening.close()
        return None
    return listening, lanes


def _let_in(listening: socket.socket, lanes: Sequence[Lane]) -> Line | None:
    """Accept the peer and pass it the shared memory; close connections of other users."""
    try:
        line = Line(listening.accept()[0])
        if line.read_user() != os.getuid():
            raise OSError("a process of another user connected")
        line.give([one for lane in lanes for one in lane.list_descriptors()])
    except OSError as error:
        _warn(str(error))
        return None
    return line


def _answer(out: Wire, into: Wire) -> Shared | None:
    name = _hear(into, NAME_SIZE)
    line = _dial(name) if any(name) else None
    _say(out, NO if line is None else YES)
    if line is None:
        return None
    shared: Shared | None = None
    try:
        given = line.take(6)
        shared = line, Lane.open(given[:3]), Lane.open(given[3:])
    except OSError as error:
        _warn(str(error))
    _say(out, NO if shared is None else YES)
    return shared


def _dial(name: bytes) -> Line | None:
    """Connect to a socket on this host; None if there is no socket with this name."""
    try:
        line = Line(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        line.connect(_spell(name))
    except OSError as error:
        log.debug("not on this host: %s", error)
        return None
    return line


def _spell(name: bytes) -> str:
    return f"\0varuna-{name.hex()}"


def _say(wire: Wire, words: bytes) -> None:
    work, _ = wire.post(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    work.wait()


def _hear(wire: Wire, size: int) -> bytes:
    words = torch.empty(size, dtype=torch.uint8)
    wire.receive_text(words)
    return bytes(words.tolist())


@cache
def _warn(reason: str) -> None:
    log.warning(
        "messages between ranks of this host are sent by gloo, not shared memory: %s", reason
    )
