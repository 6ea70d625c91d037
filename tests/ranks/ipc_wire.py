"""Transport through GPU memory (CUDA IPC) between ranks that share one GPU.

    sender's stream     tensor ─► slot, event                     slot free again ◄─┐
    gloo                            └─ which slot, how many bytes ─► receiver       │
    receiver's stream                                    event ─► slot ─► tensor ─► counter

Neither side's host waits for the GPU to send, so layouts of ranks on one GPU meet the stream order
of several GPUs: `install` gives this rank such wires, and all ranks must call it.

A slot is shared once, by a description sent before its first message; later messages send only the
slot's number. The receiver counts copied messages in memory that both processes map (a memfd of the
sender, so that no file remains if a process is killed).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.runtime.comm.transport import Transport
from varuna_core.runtime.comm.wire import (
    Look,
    Wire,
    lay_flat,
    make_room,
    poll,
    record_use,
    see_nothing,
)

HEADER_MARK = 0x0101010101010101
"""Marker at the end of each header. A byte sent in place of a tensor leaves zeros there, which
indicates that a head has arrived (channel.py)."""


@dataclass(kw_only=True)
class Slot:
    """GPU memory for one message at a time."""

    memory: Tensor
    """The bytes on the GPU."""

    event: Any
    """Event recorded once the sender's stream has filled the slot."""

    number: int = -1
    """Number of the last message that was in the slot."""


class IpcGpu:
    """A GPU shared by several processes through CUDA IPC."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: untyped

    def make(self, size: int) -> Slot:
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        return Slot(memory=memory, event=event)

    def share(self, slot: Slot) -> list[Any]:
        """Return a description that lets another process `open` the slot."""
        storage: Any = slot.memory.untyped_storage()
        return [
            slot.event.ipc_handle().hex(),
            slot.memory.numel(),
            *_to_text(storage._share_cuda_()),
        ]

    def open(self, shared: Sequence[Any]) -> Slot:
        handle, size, *storage = shared
        made: Any = torch.UntypedStorage._new_shared_cuda(*_from_text(storage))
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        memory.set_(made, 0, (size,), (1,))
        events: Any = torch.cuda.Event
        event = events.from_ipc_handle(self.device, bytes.fromhex(handle))
        return Slot(memory=memory, event=event)

    def fill(self, slot: Slot, flat: Tensor) -> None:
        slot.memory[: flat.numel()].copy_(flat, non_blocking=True)
        slot.event.record(torch.cuda.current_stream(self.device))

    def fetch(self, slot: Slot, flat: Tensor, look: Look) -> None:
        """Wait until the slot is filled, and copy its contents; the copy is complete on return."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(slot.event)
            flat.copy_(slot.memory[: flat.numel()], non_blocking=True)
            done = self.stream.record_event()
        poll(done.query, look)


def _to_text(values: Sequence[Any]) -> list[Any]:
    return [{"hex": v.hex()} if isinstance(v, bytes) else v for v in values]


def _from_text(values: Sequence[Any]) -> list[Any]:
    return [bytes.fromhex(v["hex"]) if isinstance(v, dict) else v for v in values]


class Counter:
    """Counter of copied messages, in memory shared by two processes."""

    def __init__(self, path: str = "") -> None:
        descriptor = os.open(path, os.O_RDWR) if path else os.memfd_create("copied")
        if not path:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self._held = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._descriptor = descriptor
        self.path = path or f"/proc/{os.getpid()}/fd/{descriptor}"

    def read(self) -> int:
        count: int = struct.unpack_from("q", self._held)[0]
        return count

    def write(self, count: int) -> None:
        struct.pack_into("q", self._held, 0, count)

    def close(self) -> None:
        if not self._held.closed:
            self._held.close()
            os.close(self._descriptor)

    def __del__(self) -> None:  # a sender's end has no moment of its own
        self.close()


class SeveralSends:
    """The pending sends of one tensor."""

    def __init__(self, posted: Sequence[tuple[Any, Tensor]]) -> None:
        self.posted = posted

    def wait(self, limit: timedelta | None = None) -> None:
        for work, _ in self.posted:
            work.wait() if limit is None else work.wait(limit)


class IpcWire(Wire):
    """Wire through GPU memory between ranks that share one GPU."""

    def __init__(self, group: Any, place: int, device: torch.device, gpu: Any = None) -> None:
        super().__init__(group, place)
        self.device = device
        self.gpu = gpu or IpcGpu(device)
        self.slots: list[Slot] = []
        self._counter: Counter | None = None
        self._number = 0

    # The sender's side.

    def send(self, tensor: Tensor) -> tuple[Any, Tensor]:
        flat = as_bytes(lay_flat(tensor.detach()))
        place, text = self._take_slot(flat.numel())
        self.gpu.fill(self.slots[place], flat)
        posted = [self.post(torch.tensor([place, flat.numel(), len(text), HEADER_MARK]))]
        if text:
            posted.append(self.post(torch.frombuffer(bytearray(text), dtype=torch.uint8)))
        return SeveralSends(posted), flat

    def _take_slot(self, size: int) -> tuple[int, bytes]:
        """Return a free slot; for a new slot, also return its description for the receiver."""
        if self._counter is None:
            self._counter = Counter()
        copied, number = self._counter.read(), self._number
        self._number += 1
        free = [place for place, slot in enumerate(self.slots) if slot.number < copied]
        for place in free:
            if self.slots[place].memory.numel() >= size:
                self.slots[place].number = number
                return place, b""
        slot = self.gpu.make(size)
        slot.number = number
        place = free[0] if free else len(self.slots)
        self.slots[place : place + 1] = [slot]
        return place, json.dumps([self._counter.path, *self.gpu.share(slot)]).encode()

    # The receiver's side.

    def enter_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def make(self, specs: Sequence[Any]) -> list[Any]:
        with torch.cuda.stream(getattr(self.gpu, "stream", None)):
            return [None if s is None else make_room(s, device=self.device) for s in specs]

    def receive(self, tensors: Sequence[Tensor], look: Look = see_nothing) -> None:
        for tensor in tensors:
            header = torch.zeros(4, dtype=torch.int64)
            self.group.recv([header], self.place, 0).wait()
            place, size, length, mark = header.tolist()
            if mark != HEADER_MARK:
                return
            if length:
                self._open_slot(place, length)
            flat = as_bytes(lay_flat(tensor))
            self.gpu.fetch(self.slots[place], flat[:size], look)
            self._number += 1
            assert self._counter is not None
            self._counter.write(self._number)

    def _open_slot(self, place: int, length: int) -> None:
        text = torch.empty(length, dtype=torch.uint8)
        self.receive_text(text)
        path, *shared = json.loads(bytes(text.tolist()))
        if self._counter is None:
            self._counter = Counter(path)
        self.slots[place : place + 1] = [self.gpu.open(shared)]

    def enter(self, tensors: Sequence[Any]) -> None:
        if self.device.type == "cuda":
            record_use(tensors, self.device)

    def release(self) -> None:
        super().release()
        self.slots.clear()
        if self._counter is not None:
            self._counter.close()
            self._counter = None


def as_bytes(flat: Tensor) -> Tensor:
    return flat.reshape(-1).view(torch.uint8)


def _make_wire(transport: Transport, group: Any, peer: int) -> Wire:
    return IpcWire(group, dist.get_group_rank(group, peer), transport.device)


def install() -> None:
    """Send this rank's messages through the memory of the GPU that all ranks share."""
    Transport.make_wire = _make_wire  # type: ignore[method-assign]
