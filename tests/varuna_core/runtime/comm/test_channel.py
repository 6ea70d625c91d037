"""A channel delivers what was sent, in order, whatever follows what."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, Receiver, Sender
from varuna_core.runtime.comm.failure import ChannelClosed
from varuna_core.runtime.comm.values import take_apart
from varuna_core.runtime.comm.wire import Wire

TENSORS = [
    torch.zeros(0),
    torch.zeros(3),
    torch.zeros(2, 3),
    torch.zeros(2, 3, dtype=torch.long),
    torch.zeros(5000, dtype=torch.bfloat16),
    torch.tensor(1.0),
]
VALUES = st.lists(
    st.one_of(st.sampled_from(TENSORS), st.sampled_from([1, True, 1.0, "a"])), max_size=3
)


def make_gloo_pairs(names: str) -> dict[tuple[str, int], Any]:
    """Groups of two ranks of one process, by name and rank."""
    store = dist.HashStore()
    groups: dict[tuple[str, int], Any] = {}

    def make(name: str, rank: int) -> None:
        own = dist.PrefixStore(name, store)
        groups[name, rank] = dist.ProcessGroupGloo(own, rank, 2, timedelta(days=1))

    threads = [
        threading.Thread(target=make, args=(name, rank)) for name in names for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


class Ends:
    """Both ends of two directions between two ranks of one process."""

    def __init__(self) -> None:
        groups = make_gloo_pairs("fb")
        self.forward = Sender(Wire(groups["f", 0], 1), 1, Arrivals())
        self.backward = Sender(Wire(groups["b", 1], 0), 0, Arrivals())
        self.here = Receiver(Wire(groups["b", 0], 1), 1, self.forward, Arrivals())
        self.there = Receiver(Wire(groups["f", 1], 0), 0, self.backward, Arrivals())


MESSAGES = st.lists(VALUES, max_size=12)


@given(MESSAGES, st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_what_is_sent_comes_in_order(messages: Any, capacity: int) -> None:
    ends = Ends()
    expect_in_order(ends, messages, capacity)
    ends.forward.close(BYE)
    for receiver in (ends.there, ends.here):
        receiver.end(10)
        assert not receiver.thread.is_alive()


def expect_in_order(ends: Any, messages: Any, capacity: int) -> None:
    """Each of these comes as it was sent, from ends of either kind."""
    ends.forward.hold(capacity)
    ends.there.hold(capacity)
    sent = []
    for number, values in enumerate(messages):
        filled = [v + number if isinstance(v, torch.Tensor) else v for v in values]
        sent.append(take_apart(tuple(filled)))

    def send() -> None:
        for crossing in sent:
            ends.forward.send(crossing.tensors, crossing.structure)
        ends.forward.flush()

    thread = threading.Thread(target=send)
    thread.start()
    for crossing in sent:
        came = ends.there.take()
        assert len(came.tensors) == len(crossing.tensors)
        for ours, theirs in zip(came.tensors, crossing.tensors, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        assert came.structure is not None and crossing.structure is not None
        ours_joined = came.structure.join(came.tensors)
        theirs_joined = crossing.structure.join(crossing.tensors)
        assert [type(value) for value in ours_joined] == [type(value) for value in theirs_joined]
    thread.join()
    assert not ends.there.is_there()


def test_a_channel_that_has_ended_holds_no_sockets() -> None:
    """Not even until a collection of cycles, which a large process makes rarely."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    def end(ends: Ends) -> str:
        ends.forward.close(BYE)
        for receiver in (ends.there, ends.here):
            receiver.thread.join(10)
        return ends.there.find_lost_peer()

    gc.collect()
    gc.disable()
    try:
        before = count()
        assert "has ended" in end(Ends())
        deadline = time.monotonic() + 10
        while count() > before and time.monotonic() < deadline:  # gloo's threads end
            time.sleep(0.01)
        assert count() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize(("word", "said"), [(BYE, "has ended"), (POISON, "has failed")])
@pytest.mark.parametrize("tensors", [[], [None], [torch.ones(2)], [torch.ones(2)] * 2])
def test_who_leaves_is_missed(word: int, said: str, tensors: Any) -> None:
    ends = Ends()
    for _ in range(2):
        ends.forward.send(tensors)
        ends.there.take()
    ends.forward.close(word)
    with pytest.raises(ChannelClosed, match=said):
        ends.there.take()
    ends.here.thread.join(10)  # told in turn
    assert not ends.here.thread.is_alive()
