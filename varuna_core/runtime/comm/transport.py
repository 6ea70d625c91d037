"""Choose the transport between ranks, once and together on all ranks of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.runtime.comm.channel import Arrivals, Receiver, ReceivingEnd, Sender, SendingEnd
from varuna_core.runtime.comm.devices import BOTH, GLOO, choose_backend, describe_gpu
from varuna_core.runtime.comm.memory_channel import meet
from varuna_core.runtime.comm.wire import NcclWire, PinnedWire, Wire


@dataclass(frozen=True, kw_only=True)
class Transport:
    """The device and backend that all ranks use."""

    device: torch.device
    backend: str
    """Backend of the torch.distributed groups."""

    shared: str = ""
    """Description of which ranks share GPUs."""

    @property
    def has_nccl(self) -> bool:
        return self.backend != GLOO

    def make_text_wire(self, group: Any, peer: int) -> Wire:
        """Return a wire to `peer` for text messages, which are always sent from CPU memory."""
        return Wire(group, dist.get_group_rank(group, peer))

    def make_wire(self, group: Any, peer: int) -> Wire:
        place = dist.get_group_rank(group, peer)
        if self.device.type != "cuda":
            return Wire(group, place)
        make = NcclWire if self.has_nccl else PinnedWire
        return make(group, place, self.device)

    def join(
        self, out: Wire, into: Wire, peer: int, is_first: bool, arrivals: Arrivals
    ) -> tuple[SendingEnd, ReceivingEnd]:
        """Return channels to and from a rank, over these wires or through shared memory. Both ranks
        call this, one of them with `is_first`."""
        if self.device.type == "cpu" and not self.has_nccl:
            shared = meet(out, into, peer, is_first, arrivals)
            if shared is not None:
                return shared
        sender = Sender(out, peer, arrivals)
        return sender, Receiver(into, peer, sender, arrivals)


def choose_transport(
    device: torch.device, store: Any, key: str, rank: int, size: int, *, may_share: bool = False
) -> Transport:
    """Choose the transport together on all ranks; for `may_share` see devices.may_share."""
    gpu = describe_gpu(device, may_share)
    backend, shared = choose_backend(store, key, rank, size, gpu)
    if backend == BOTH:  # torch's own way with a lost rank is to kill this one, without a word
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return Transport(device=device, backend=backend, shared=shared)
