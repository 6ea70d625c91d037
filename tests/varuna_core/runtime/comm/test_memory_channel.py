"""Channels through memory: they deliver as the others do, and a peer that has gone is named."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks.start import start_ranks
from tests.varuna_core.runtime.comm.test_channel import (
    MESSAGES,
    Ends,
    expect_in_order,
    make_gloo_pairs,
)
from varuna_core.runtime.comm import memory_channel
from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, Receiver, Sender
from varuna_core.runtime.comm.devices import GLOO
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.memory_channel import (
    FIRST_SLOT,
    MOST_UNREAD,
    MemoryReceiver,
    MemorySender,
    meet,
)
from varuna_core.runtime.comm.transport import Transport
from varuna_core.runtime.comm.wire import Wire, make_dense

SHARED_MEMORY = Path("/dev/shm")


class MemoryEnds:
    """Both ends of two directions between two ranks of one process."""

    def __init__(self, patience_s: float | None = None) -> None:
        first, second = meet_both(patience_s)
        assert first is not None and second is not None
        self.forward, self.here = first
        self.backward, self.there = second

    def leave(self, word: int = BYE) -> None:
        self.forward.close(word)
        self.here.end()


Met = tuple[MemorySender, MemoryReceiver] | None


def meet_both(patience_s: float | None = None) -> list[Met]:
    """What `meet` gives to each of two ranks of one process."""
    groups = make_gloo_pairs("fb")
    found: list[Met] = [None, None]

    def run(rank: int) -> None:
        out, into = "fb" if rank == 0 else "bf"
        wires = Wire(groups[out, rank], 1 - rank), Wire(groups[into, rank], 1 - rank)
        found[rank] = meet(*wires, 1 - rank, rank == 0, Arrivals(patience_s))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@given(MESSAGES, st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_what_is_sent_comes_in_order(messages: Any, capacity: int) -> None:
    ends = MemoryEnds()
    expect_in_order(ends, messages, capacity)
    ends.leave()


def test_what_is_unread_is_not_overwritten() -> None:
    """Of messages of all sizes, taken later or sooner, a slot holds one at a time."""
    ends, generator = MemoryEnds(), torch.Generator().manual_seed(0)
    ends.forward.hold(8)
    sent, num_taken = [], 0
    for number in range(200):
        size = int(torch.randint(1, 3000, (), generator=generator))
        sent.append(torch.full((size,), float(number)))
        ends.forward.send([sent[-1]])
        sent[-1] = sent[-1].clone()
        while len(sent) - num_taken > int(torch.randint(0, 8, (), generator=generator)):
            assert torch.equal(ends.there.take().tensors[0], sent[num_taken])
            num_taken += 1
    ends.leave()


def test_what_was_sent_may_change_at_once() -> None:
    ends = MemoryEnds()
    tensor = torch.ones(5)
    ends.forward.send([tensor])
    tensor.zero_()
    assert torch.equal(ends.there.take().tensors[0], torch.ones(5))
    ends.leave()


def test_memory_is_used_again() -> None:
    """Each second message is longer by an element: there are as many slots as are unread, and the
    ones that were too small are of half the size and less."""
    ends = MemoryEnds()
    ends.forward.hold(2)
    for number in range(300):
        ends.forward.send([torch.full((1000 + 20 * (number // 2),), float(number))])
        if number % 2:
            ends.there.take()
            ends.there.take()
    slots = ends.forward._slots
    assert len(slots) <= 9, "three unread ones at most, of three sizes"
    assert os.fstat(ends.forward.lane.memory.descriptor).st_blocks * 512 < FIRST_SLOT + sum(
        slot.size for slot in slots
    )
    ends.leave()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.arange(12.0)[5:],
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
    ],
)
def test_a_tensor_comes_in_the_order_of_its_memory(tensor: torch.Tensor) -> None:
    ends = MemoryEnds()
    ends.forward.send([None, tensor, torch.zeros(0, 3)])
    nothing, came, empty = ends.there.take().tensors
    assert nothing is None and empty.shape == (0, 3)
    assert torch.equal(came, tensor)
    assert came.stride() == make_dense(tensor).stride()
    ends.leave()


@pytest.mark.parametrize(("word", "said"), [(BYE, "it has ended"), (POISON, "it has failed")])
def test_who_leaves_is_missed_when_all_was_taken(word: int, said: str) -> None:
    ends = MemoryEnds()
    ends.backward.hold(1)
    ends.forward.send([torch.ones(2)])
    ends.leave(word)
    assert ends.there.find_lost_peer() == f"rank 0: {said}"
    assert torch.equal(ends.there.take().tensors[0], torch.ones(2)), "sent before it left"
    assert ends.there.is_there()
    with pytest.raises(ChannelClosed, match=f"cannot receive from rank 0: {said}"):
        ends.there.take()
    ends.backward.send([torch.ones(2)])
    with pytest.raises(ChannelClosed, match=f"cannot send to rank 0: {said}"):
        ends.backward.send([torch.ones(2)])
    ends.there.discard()


def test_who_does_nothing_is_named() -> None:
    ends = MemoryEnds(patience_s=0.01)
    ends.forward.hold(1)
    ends.forward.send([torch.ones(2)])
    with pytest.raises(ChannelClosed, match="no message to or from rank 1"):
        ends.forward.send([torch.ones(2)])
    with pytest.raises(ChannelClosed, match="no message to or from rank 1"):
        ends.here.take()
    ends.leave()


def test_a_channel_that_has_ended_holds_no_descriptors() -> None:
    """Not even until a collection of cycles, which a large process makes rarely."""
    gc.collect()
    gc.disable()
    try:
        ends = MemoryEnds()
        held = [
            [*lane.list_descriptors(), line.descriptor]
            for lane, line in [
                (ends.forward.lane, ends.forward.line),
                (ends.backward.lane, ends.backward.line),
                (ends.here.lane, ends.here.line),
                (ends.there.lane, ends.there.line),
            ]
        ]
        assert len({one for some in held for one in some}) == 14
        ends.leave()
        ends.backward.close(BYE)
        ends.there.end()
        for some in held:
            for descriptor in some:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(descriptor)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("how", "said"), [("full", "cannot send to rank 1"), ("empty", "cannot receive from rank 1")]
)
def test_a_peer_that_is_killed_is_named(tmp_path: Path, how: str, said: str) -> None:
    before = set(SHARED_MEMORY.iterdir())
    with start_ranks("tests.ranks.channel_rank", 2, str(tmp_path), how) as (first, second):
        assert first.read_line() == f"{how}\n"
        assert second.read_line() == "waits\n"
        second.send_signal(signal.SIGKILL)
        assert first.read_line() == f"{said}: Connection closed by peer\n"
        assert first.wait() == 0
    assert set(SHARED_MEMORY.iterdir()) <= before


def test_ranks_that_are_all_killed_leave_nothing(tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.iterdir())
    with start_ranks("tests.ranks.channel_rank", 2, str(tmp_path), "full") as ranks:
        assert ranks[0].read_line() == "full\n"
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    assert set(SHARED_MEMORY.iterdir()) <= before


def test_a_schedule_that_needs_more_entries_is_refused() -> None:
    ends = MemoryEnds()
    ends.forward.hold(MOST_UNREAD)
    with pytest.raises(ValueError, match="use fewer micro-batches"):
        ends.forward.hold(MOST_UNREAD + 1)
    ends.leave()


def test_entries_are_used_in_turn() -> None:
    ends = MemoryEnds()
    ends.forward.hold(2)
    for number in range(MOST_UNREAD + 3):
        ends.forward.send([torch.tensor(number)])
        assert int(ends.there.take().tensors[0]) == number
    ends.leave()


def test_no_memory_is_an_error_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a signal that ends the process where it writes."""

    def refuse(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    ends = MemoryEnds()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match=r"a message of \d+ bytes to rank 1: .*No space left"):
        ends.forward.send([torch.ones(2)])
    ends.leave()


def test_what_is_written_has_memory_before() -> None:
    ends = MemoryEnds()
    ends.forward.send([torch.ones(10 * mmap.PAGESIZE)])
    held = os.fstat(ends.forward.lane.memory.descriptor).st_blocks * 512
    ends.forward.hold(2)
    ends.forward.send([torch.ones(10 * mmap.PAGESIZE)])
    grown = os.fstat(ends.forward.lane.memory.descriptor).st_blocks * 512 - held
    assert 40 * mmap.PAGESIZE <= grown < 64 * mmap.PAGESIZE, "the message's bytes, not the slot's"
    ends.leave()


# Where two ranks cannot meet so.


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_ranks_that_may_not_share_memory_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    memory_channel._warn.cache_clear()
    with limited_files(1 << 30):
        assert meet_both() == [None, None]
        assert meet_both() == [None, None]
    (said,) = caplog.messages
    assert said.endswith("are sent by gloo, not shared memory: [Errno 27] File too large")
    assert not any(met is None for met in meet_both()), "without the limit they do"


def test_a_python_without_memfd_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert meet_both() == [None, None]


def test_ranks_of_two_hosts_say_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spell = memory_channel._spell
    main = threading.main_thread()
    calls: list[str] = []

    def spell_once(name: bytes) -> str:
        assert threading.current_thread() is not main
        calls.append(spell(name))
        return calls[-1] + str(len(calls))

    monkeypatch.setattr(memory_channel, "_spell", spell_once)
    assert meet_both() == [None, None]
    assert len(calls) == 2 and not caplog.messages


def test_another_user_is_not_let_in(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory_channel._warn.cache_clear()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert meet_both() == [None, None]
    assert "another user" in caplog.text


def test_a_rank_that_cannot_map_what_it_is_given_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_channel._warn.cache_clear()

    def refuse(descriptors: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory_channel.Lane, "open", refuse)
    assert meet_both() == [None, None]


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_are_joined_by_memory_or_else_by_gloo(
    monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    if not shares:
        monkeypatch.setattr(memory_channel, "_listen", lambda name: None)
    groups = make_gloo_pairs("fb")
    transport = Transport(device=torch.device("cpu"), backend=GLOO)
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        out, into = "fb" if rank == 0 else "bf"
        wires = Wire(groups[out, rank], 1 - rank), Wire(groups[into, rank], 1 - rank)
        found[rank] = transport.join(*wires, 1 - rank, rank == 0, Arrivals())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (sender, here), (back, receiver) = found[0], found[1]
    assert type(sender) is (MemorySender if shares else Sender)
    assert type(receiver) is (MemoryReceiver if shares else Receiver)
    sender.send([torch.ones(3)])
    assert torch.equal(receiver.take().tensors[0], torch.ones(3))
    for end in (sender, back):
        end.close(BYE)
    for end in (here, receiver):
        end.end(10.0)


# A rank with neighbours of both kinds.


@pytest.mark.parametrize("comes", ["memory", "gloo"])
def test_a_rank_waits_for_neighbours_of_both_kinds(comes: str) -> None:
    near, far = MemoryEnds(), Ends()
    arrivals = far.there.arrivals
    has_come = threading.Event()

    def wait() -> None:
        arrivals.wait([near.there, far.there])
        has_come.set()

    thread = threading.Thread(target=wait)
    thread.start()
    sender = near.forward if comes == "memory" else far.forward
    sender.send([torch.ones(3)])
    thread.join()
    assert has_come.is_set()
    assert near.there.is_there() == (comes == "memory")
    assert far.there.is_there() == (comes == "gloo")
    near.leave()
    far.forward.close(BYE)
    for receiver in (far.there, far.here):
        receiver.end(10)


def test_neighbours_of_both_kinds_that_do_nothing_are_named() -> None:
    near, far = MemoryEnds(), Ends()
    far.there.arrivals.patience_s = 0.01
    with pytest.raises(ChannelClosed, match="to or from rank 0 for"):
        far.there.arrivals.wait([near.there, far.there])
    near.leave()
    far.forward.close(BYE)
    for receiver in (far.there, far.here):
        receiver.end(10)
