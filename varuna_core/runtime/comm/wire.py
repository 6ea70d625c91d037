"""Wires carry tensors between two ranks; only they distinguish gloo from NCCL and CPU from GPU.

    device      ranks on      tensors go by                      `in_order`
    cpu         one host      memory that both map               no wire (memory_channel.py)
    cpu         several       gloo                               yes
    cuda        shared GPUs   gloo, pinned memory                yes
    cuda        a GPU each    NCCL                               no: heads are not in its stream

Heads and descriptions are always sent by gloo; with NCCL, a group has both backends. On a GPU, the
receiver's thread uses its own stream and waits until each message has arrived completely: it polls
a CUDA event and checks meanwhile that the sender is alive, because CUDA's own waits end only with
the GPU's work, and a receive from a lost rank never ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

HEAD_TAG = 1


# Memory order. Dropout draws in it, so that a tensor must come as it went (channels_last too).


def make_dense(tensor: Tensor) -> Tensor:
    """Return the same values in dense memory; usually this is the tensor itself."""
    if tensor.is_contiguous():
        return tensor
    return tensor if _lay_flat(tensor).is_contiguous() else tensor.detach().clone()


def lay_flat(tensor: Tensor) -> Tensor:
    """Return a contiguous view of a dense tensor, with its dimensions in memory order."""
    return tensor if tensor.is_contiguous() else _lay_flat(tensor).contiguous()


def _lay_flat(tensor: Tensor) -> Tensor:
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def find_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor; None if the tensor is contiguous."""
    return None if tensor.is_contiguous() else tensor.stride()


def make_room(spec: Any, **options: Any) -> Tensor:
    """Allocate a tensor with this shape, type and strides."""
    shape, dtype, strides = spec
    if strides is None:
        return torch.empty(shape, dtype=dtype, **options)
    return torch.empty_strided(shape, strides, dtype=dtype, **options)


Look = Callable[[float], None]
"""Function called with the seconds waited so far; it raises an error if the wait cannot end."""


def see_nothing(waited_s: float) -> None:
    """Do nothing; for gloo, whose waits raise an error by themselves."""


class Wire:
    """Wire for one direction between two ranks, through CPU memory."""

    in_order = True

    def __init__(self, group: Any, place: int) -> None:
        self.group = group
        self.place = place
        """Rank of the other side within the group."""

    # The sender's side.

    def post(self, tensor: Tensor, tag: int = 0) -> tuple[Any, Tensor]:
        """Start to send a CPU tensor, which must stay alive as long as the returned work."""
        return self.group.send([tensor], self.place, tag), tensor

    def send(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Start to send a tensor of a stage."""
        return self.post(lay_flat(tensor.detach()))

    # The receiver's side, in its thread.

    def enter_thread(self) -> None:
        """Prepare a receiver's thread, since CUDA's current device is thread-local."""

    def await_head(self, head: Tensor) -> Any:
        return self.group.recv([head], self.place, HEAD_TAG)

    def receive_text(self, text: Tensor) -> None:
        self.group.recv([text], self.place, 0).wait()

    def make(self, specs: Sequence[Any]) -> list[Any]:
        """Allocate tensors for a message; None in place of a missing tensor."""
        return [None if s is None else make_room(s) for s in specs]

    def receive(self, tensors: Sequence[Tensor], look: Look = see_nothing) -> None:
        """Wait until the next message's tensors are filled."""
        works = [self.group.recv([lay_flat(tensor)], self.place, 0) for tensor in tensors]
        for work in works:
            work.wait()

    def bring(self, tensors: list[Any]) -> list[Any]:
        """Move received tensors to the stage's device."""
        return tensors

    def release(self) -> None:
        """Release the group, so that an ended thread does not keep the group open."""
        self.group = None

    # The receiver's side, in the main thread.

    def enter(self, tensors: Sequence[Any]) -> None:
        """Prepare received tensors for use by the stage."""


class GpuWire(Wire):
    """Wire from GPU to GPU."""

    def __init__(self, group: Any, place: int, device: torch.device) -> None:
        super().__init__(group, place)
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch: untyped

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)

    def enter(self, tensors: Sequence[Any]) -> None:
        record_use(tensors, self.device)


class PinnedWire(GpuWire):
    """Wire from GPU to GPU through pinned host memory."""

    def send(self, tensor: Tensor) -> tuple[Any, Tensor]:
        flat = lay_flat(tensor.detach())
        staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        staged.copy_(flat, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return self.post(staged)

    def make(self, specs: Sequence[Any]) -> list[Any]:
        return [None if s is None else make_room(s, pin_memory=True) for s in specs]

    def bring(self, tensors: list[Any]) -> list[Any]:
        with torch.cuda.stream(self.stream):
            brought = [t if t is None else t.to(self.device, non_blocking=True) for t in tensors]
        self.stream.synchronize()
        return brought


class NcclWire(GpuWire):
    """Wire from GPU to GPU by NCCL, on a group that also has gloo for CPU memory."""

    in_order = False

    def send(self, tensor: Tensor) -> tuple[Any, Tensor]:
        work, flat = super().send(tensor)
        return StreamWork(work), flat

    def make(self, specs: Sequence[Any]) -> list[Any]:
        with torch.cuda.stream(self.stream):
            return [None if s is None else make_room(s, device=self.device) for s in specs]

    def receive(self, tensors: Sequence[Tensor], look: Look = see_nothing) -> None:
        with torch.cuda.stream(self.stream):
            super().receive(tensors)  # the stream waits, not the thread
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch: untyped
            event.record(self.stream)
        poll(event.query, look)


class StreamWork:
    """A pending NCCL send. `wait` makes the current stream wait, not the host, which would wait
    only if given a timeout (torch 2.13); `Links.settle` has that timeout instead."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self, limit: timedelta | None = None) -> None:
        self.work.wait()


LEAST_PAUSE_S, MOST_PAUSE_S = 2e-5, 1e-3
LOOK_S = 0.1


def poll(
    is_done: Callable[[], bool],
    look: Look,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Poll until done, at first in short intervals; call `look`, which may raise, every 0.1 s."""
    began = looked = clock()
    while not is_done():
        now = clock()
        if now - looked >= LOOK_S:
            look(now - began)
            looked = now
        pause(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, (now - began) / 8)))


def record_use(tensors: Sequence[Any], device: torch.device) -> None:
    """Keep memory allocated on another stream until the current stream has finished using it."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(torch.cuda.current_stream(device))
