"""The NCCL wire against a GPU that is out of step with the host, and senders that die."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.varuna_core.runtime.comm.fake_nccl import Comm, FakeGroup, FakeNccl, Gpu
from tests.varuna_core.runtime.comm.test_channel import make_gloo_pairs
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.comm import failure
from varuna_core.runtime.comm.channel import BYE, POISON, Arrivals, Heads, Receiver, Sender
from varuna_core.runtime.comm.failure import ChannelClosed, FailureBoard, abort_work, find_nccl
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.comm.values import take_apart
from varuna_core.runtime.comm.wire import NcclWire, poll

CPU = torch.device("cpu")


class Ends:
    """One direction with NCCL between two ranks of one process, and the way back."""

    def __init__(self, gpu: Gpu, patience_s: float | None = None) -> None:
        gloo = make_gloo_pairs("fb")
        comms = {name: Comm() for name in "fb"}
        self.groups = {
            (name, rank): FakeGroup(gloo[name, rank], FakeNccl(comms[name]))
            for name in "fb"
            for rank in (0, 1)
        }
        self.gpu, groups = gpu, self.groups
        self.forward = Sender(NcclWire(groups["f", 0], 1, CPU), 1, Arrivals(3600.0))
        self.backward = Sender(NcclWire(groups["b", 1], 0, CPU), 0, Arrivals())
        self.here = Receiver(NcclWire(groups["b", 0], 1, CPU), 1, self.forward, Arrivals())
        arrivals = Arrivals(patience_s)
        self.there = Receiver(NcclWire(groups["f", 1], 0, CPU), 0, self.backward, arrivals)

    def send_late(self, values: torch.Tensor) -> threading.Event:
        """Send what the GPU computes only once the event is set."""
        may_run = threading.Event()
        tensor = torch.full_like(values, torch.nan)
        self.gpu.launch(lambda: may_run.is_set() and tensor.copy_(values) is not None)
        self.forward.send([tensor])
        return may_run

    def wake(self, event: threading.Event) -> None:
        event.set()
        with self.gpu.changed:
            self.gpu.changed.notify_all()

    def die(self) -> None:
        """What is left of a sender that was killed: its connections close."""
        group = self.groups.pop(("f", 0))
        self.forward._under_way.clear()
        group.gloo = self.forward.wire.group = None

    def leave(self) -> None:
        self.forward.close(BYE)
        for receiver in (self.there, self.here):
            receiver.thread.join(60)
            assert not receiver.thread.is_alive()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    made.install(monkeypatch)
    yield made
    made.stop()


MESSAGES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([(), (3,), (2, 3), (0,)]), max_size=3),
        st.integers(0, 4),  # turns that the GPU takes over what is sent
        st.booleans(),  # the sender waits, and uses the memory again
    ),
    max_size=6,
)


@given(MESSAGES, st.integers(1, 3), st.integers(0, 2**16))
@settings(deadline=None, max_examples=25)
def test_what_the_gpu_sends_comes_in_order_and_whole(
    messages: Any, capacity: int, seed: int
) -> None:
    """As soon as `take` returns the host may read it, whatever the GPU does meanwhile."""
    gpu = Gpu(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu.install(monkeypatch)
        ends = Ends(gpu)
        ends.forward.capacity = capacity
        ends.there.hold(capacity)

        def fill(tensors: list[torch.Tensor], value: float) -> None:
            for tensor in tensors:
                tensor.fill_(value)

        def send() -> None:
            for number, (shapes, turns, uses_again) in enumerate(messages):
                tensors = [torch.full(shape, torch.nan) for shape in shapes]
                gpu.launch(lambda held=tensors, to=number: fill(held, to), turns)
                crossing = take_apart((*tensors, number))
                ends.forward.send(crossing.tensors, crossing.structure)
                if uses_again:
                    ends.forward.flush()
                    gpu.launch(lambda held=tensors: fill(held, -1.0))
            ends.forward.flush()

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        for number, (shapes, _, _) in enumerate(messages):
            came = ends.there.take()
            assert came.structure is not None and came.structure.join(came.tensors)[-1] == number
            for tensor, shape in zip(came.tensors, shapes, strict=False):
                assert tensor.shape == shape and bool((tensor == number).all())
            used = [tensor for tensor in came.tensors if tensor is not None]
            assert all(any(tensor is one for one in gpu.used) for tensor in used)
        thread.join(60)
        assert not ends.there.is_there()
        assert {ends.there.thread.name, ends.here.thread.name} <= gpu.threads
        ends.leave()
        gpu.stop()


def test_a_sender_that_dies_while_its_message_is_received_is_missed(gpu: Gpu) -> None:
    ends = Ends(gpu)
    ends.send_late(torch.ones(2))
    ends.die()
    with pytest.raises(ChannelClosed, match=r"cannot receive from rank 0: .*[Cc]onnection"):
        ends.there.take()
    assert "rank 0: " in ends.there.find_lost_peer()


def test_a_sender_that_fails_while_its_message_is_received_is_missed(gpu: Gpu) -> None:
    ends = Ends(gpu)
    ends.send_late(torch.ones(2))
    ends.forward.close(POISON)
    with pytest.raises(ChannelClosed, match="it has failed"):
        ends.there.take()


def test_a_message_comes_though_its_sender_has_left(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last word goes by gloo, and overtakes what the GPU has yet to send."""
    ends, has_looked, look = Ends(gpu), threading.Event(), Heads.look

    def look_and_tell(heads: Heads, waited_s: float) -> None:
        has_ended = heads._error is not None
        try:
            look(heads, waited_s)
        finally:
            if has_ended:
                has_looked.set()

    monkeypatch.setattr(Heads, "look", look_and_tell)
    may_run = ends.send_late(torch.ones(2))
    ends.forward.close(BYE)
    assert has_looked.wait(60)
    assert not ends.there.is_there()
    ends.wake(may_run)
    assert ends.there.take().tensors[0].tolist() == [1.0, 1.0]
    with pytest.raises(ChannelClosed, match="it has ended"):
        ends.there.take()


def test_a_sender_whose_gpu_hangs_is_named_in_time(gpu: Gpu) -> None:
    ends = Ends(gpu, patience_s=0.2)
    ends.send_late(torch.ones(2))
    with pytest.raises(ChannelClosed, match=r"no message to or from rank 0 for 0\.2 s"):
        ends.there.take()
    ends.here.discard()
    ends.die()
    ends.there.thread.join(60)
    assert not ends.there.thread.is_alive(), "the thread's wait has a limit too"


def test_an_abort_ends_what_the_gpu_waits_for(gpu: Gpu) -> None:
    """A rank that failed: its receive would keep the GPU busy for ever."""
    ends = Ends(gpu)
    ends.send_late(torch.ones(2))
    ends.there.discard()
    with pytest.raises(ChannelClosed, match="this rank has failed"):
        ends.there.take()
    receiving = ends.groups["f", 1].nccl
    assert gpu.ask(lambda: bool(receiving.stream.operations)), "the receive is still posted"
    others = [group.nccl for group in ends.groups.values() if group.nccl is not receiving]
    backends = [find_nccl(group) for group in ends.groups.values()]
    abort_work(backends)
    assert backends[0].calls[0] == "start" and backends[0].calls[-1] == "end"
    assert all("abort" in one.calls for one in (receiving, *others))
    done = torch.cuda.Event()
    done.record(receiving.stream)  # type: ignore[arg-type]  # a fake
    poll(done.query, lambda waited_s: None)


def test_an_abort_that_hangs_holds_up_nobody(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = threading.Event()
    backend = FakeNccl(Comm())
    monkeypatch.setattr(backend, "abort", stuck.wait)
    monkeypatch.setattr(failure, "ABORT_S", 0.05)
    abort_work([backend])
    assert "NCCL did not finish aborting its work" in caplog.text
    stuck.set()


def test_poll_asks_often_at_first_and_looks_ten_times_a_second() -> None:
    now, pauses, looks = 0.0, [], []

    def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    poll(lambda: now > 1.05, looks.append, lambda: now, pause)
    assert pauses[0] == 2e-5 and max(pauses) == 1e-3
    assert len(looks) == 10 and looks == sorted(looks)


# What the GPU sums with other ranks.


def make_links(patience_s: float | None = None) -> Links:
    board = FailureBoard(dist.HashStore(), "failure")
    layout = parse_stage_map("0,1;", 2, 1)
    links = Links(stage_map=layout, place=0, replica=0, board=board, arrivals=Arrivals(patience_s))
    links.on_gpu.append(FakeNccl(Comm()))
    return links


def launch_sum(gpu: Gpu, links: Links) -> None:
    """Of two ranks, of which the other one does not come."""
    links.on_gpu[0].recv(torch.zeros(1)).wait()


def test_a_sum_without_a_rank_that_hangs_has_a_limit(gpu: Gpu) -> None:
    links = make_links(patience_s=0.2)
    links.settle(CPU)  # nothing is under way
    launch_sum(gpu, links)
    with pytest.raises(ChannelClosed, match=r"has not finished its work for 0.2 s \(hang_tim"):
        links.settle(CPU)


def test_a_sum_ends_where_a_rank_wrote_that_it_failed(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = make_links()
    launch_sum(gpu, links)
    links.board.write("rank 7: KeyError")
    monkeypatch.setattr("varuna_core.runtime.comm.links.BOARD_S", 0.0)
    with pytest.raises(ChannelClosed, match="rank 7: KeyError"):
        links.settle(CPU)


def test_a_sum_ends_where_a_rank_that_is_watched_dies(gpu: Gpu) -> None:
    links, ends = make_links(), Ends(gpu)
    links.watching.append(ends.there)
    launch_sum(gpu, links)
    ends.die()
    with pytest.raises(ChannelClosed, match=r"rank 0: .*[Cc]onnection"):
        links.settle(CPU)
