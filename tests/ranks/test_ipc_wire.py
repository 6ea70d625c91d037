"""The wire through a GPU's memory; its GPU here copies late, and tests/gpu has the real one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ranks import ipc_wire
from tests.ranks.device import GPU_MEMORY, VARIABLE, choose_device
from tests.ranks.ipc_wire import Counter, IpcWire, Slot
from tests.varuna_core.runtime.comm.test_channel import make_gloo_pairs
from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, Receiver, Sender
from varuna_core.runtime.comm.devices import GLOO
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.transport import Transport
from varuna_core.runtime.comm.wire import Look

CPU = torch.device("cpu")


class LateGpu:
    """Memory that both ends have; a slot is filled some time after the host said so."""

    held: dict[int, Slot] = {}  # noqa: RUF012

    def __init__(self, late_s: float = 0.0) -> None:
        self.late_s, self.num_made, self.num_shared = late_s, 0, 0

    def make(self, size: int) -> Slot:
        self.num_made += 1
        return Slot(memory=torch.empty(size, dtype=torch.uint8), event=threading.Event())

    def share(self, slot: Slot) -> list[Any]:
        self.num_shared += 1
        self.held[id(slot)] = slot
        return [id(slot)]

    def open(self, shared: Sequence[Any]) -> Slot:
        return self.held[shared[0]]

    def fill(self, slot: Slot, flat: Tensor) -> None:
        slot.event.clear()
        value = flat.clone()

        def run() -> None:
            time.sleep(self.late_s)
            slot.memory[: value.numel()].copy_(value)
            slot.event.set()

        threading.Thread(target=run).start() if self.late_s else run()

    def fetch(self, slot: Slot, flat: Tensor, look: Look) -> None:
        slot.event.wait()
        flat.copy_(slot.memory[: flat.numel()])


class Ends:
    """Both ends of two directions between two ranks of one process."""

    def __init__(self, late_s: float = 0.0) -> None:
        groups = make_gloo_pairs("fb")
        self.gpu = LateGpu(late_s)

        def wire(name: str, rank: int) -> IpcWire:
            return IpcWire(groups[name, rank], 1 - rank, CPU, self.gpu)

        self.forward = Sender(wire("f", 0), 1, Arrivals())
        self.backward = Sender(wire("b", 1), 0, Arrivals())
        self.here = Receiver(wire("b", 0), 1, self.forward, Arrivals())
        self.there = Receiver(wire("f", 1), 0, self.backward, Arrivals())

    def leave(self, word: int = BYE) -> None:
        self.forward.close(word)
        for receiver in (self.there, self.here):
            receiver.thread.join(10)
            assert not receiver.thread.is_alive()


SIZES = st.lists(st.lists(st.sampled_from([0, 1, 5, 700]), max_size=3), max_size=12)


@given(SIZES, st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.003]))
@settings(deadline=None, max_examples=60)
def test_what_is_sent_comes_in_order(sizes: list[list[int]], capacity: int, late_s: float) -> None:
    ends = Ends(late_s)
    ends.forward.capacity = capacity
    ends.there.hold(capacity)
    sent = [
        [torch.full((size,), number + place / 8) for place, size in enumerate(one)]
        for number, one in enumerate(sizes)
    ]

    def send() -> None:
        for tensors in sent:
            ends.forward.send(tensors)
        ends.forward.flush()

    thread = threading.Thread(target=send)
    thread.start()
    for tensors in sent:
        came = ends.there.take().tensors
        assert len(came) == len(tensors)
        assert all(torch.equal(a, b) for a, b in zip(came, tensors, strict=True))
    thread.join()
    ends.leave()


def test_slots_are_used_again_and_shared_once() -> None:
    ends = Ends()
    for number in range(20):
        ends.forward.send([torch.full((100,), float(number))])
        ends.forward.flush()
        assert float(ends.there.take().tensors[0][0]) == number
    assert ends.gpu.num_made == ends.gpu.num_shared <= 3
    ends.leave()


def test_a_slot_is_not_filled_before_it_was_copied() -> None:
    """The receiver takes nothing: what is sent meanwhile has slots of its own."""
    ends = Ends()
    ends.forward.capacity = 8
    for number in range(8):
        ends.forward.send([torch.full((100,), float(number))])
    assert ends.gpu.num_made >= 6
    for number in range(8):
        assert float(ends.there.take().tensors[0][0]) == number
    ends.forward.flush()
    ends.leave()


@pytest.mark.parametrize("word", [BYE, POISON])
def test_who_leaves_is_heard_while_a_message_is_awaited(word: int) -> None:
    ends = Ends()
    for _ in range(2):
        ends.forward.send([torch.ones(3)])
        ends.there.take()
    ends.leave(word)
    with pytest.raises(ChannelClosed, match="cannot receive from rank 0"):
        ends.there.take()


def test_another_process_reads_the_counter() -> None:
    counter = Counter()
    child = os.fork()
    if child == 0:
        Counter(counter.path).write(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert counter.read() == 7
    counter.close()


def test_ranks_that_ask_get_such_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Transport.make_wire
    monkeypatch.setattr(Transport, "make_wire", made)  # as it was, after the test
    for word in ("device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, word, lambda *_: 1)
    monkeypatch.setattr(ipc_wire, "IpcGpu", lambda device: LateGpu())
    monkeypatch.setattr(torch.distributed, "get_group_rank", lambda group, peer: peer)
    device = choose_device({VARIABLE: "cuda", GPU_MEMORY: "1"})
    wire = Transport(device=device, backend=GLOO).make_wire(None, 1)
    assert isinstance(wire, IpcWire) and wire.place == 1
