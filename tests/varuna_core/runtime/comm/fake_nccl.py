"""A GPU and its NCCL groups, as far as `comm` uses them, without either.

    main stream     ── compute ── record ──────────── wait ── overwrite ──►
                                     │ (event)          ▲ (event)
    stream of a group, at the sender └── wait ── send ──┘
                                                  ║ both must be there
    stream of a group, at the receiver ── wait ── recv ── ...

A stream is a list of operations, carried out in order by one thread for the whole GPU, which takes
the streams in an order drawn from a seed and lets an operation wait for as many turns as it was
told. So the GPU is out of step with the host, as a real one, and no clock decides. `send` and
`recv` return at once; neither ends before the other one has begun, whoever is gone, unless they
are aborted. What would make the host wait for the GPU is an error: `synchronize` of a stream, an
event or a device.

There are no tensors of that GPU: of those that a group is given the ones of floats count as its,
and all others go by gloo.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from varuna_core.runtime.comm import wire


def refuse(*_: Any) -> None:
    raise AssertionError("the host would wait for the GPU, whoever is gone")


class Operation:
    """Of a stream: `run` is tried again until it returns True."""

    def __init__(self, run: Callable[[], bool], turns: int = 0) -> None:
        self.run, self.turns = run, turns


class Stream:
    synchronize = refuse

    def __init__(self, device: Any = None) -> None:
        self.gpu = Gpu.current()
        self.operations: deque[Operation] = deque()
        with self.gpu.changed:
            self.gpu.streams.append(self)

    def add(self, run: Callable[[], bool], turns: int = 0) -> None:
        with self.gpu.changed:
            self.operations.append(Operation(run, turns))
            self.gpu.changed.notify_all()

    def wait_event(self, event: Event) -> None:
        self.add(lambda: event.is_over)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    synchronize = refuse

    def __init__(self, **_: Any) -> None:
        self.is_over = False

    def record(self, stream: Stream) -> None:
        def run() -> bool:
            self.is_over = True
            return True

        stream.add(run)

    def query(self) -> bool:
        return self.is_over


class Gpu:
    """Carries out the operations of all its streams."""

    _now: Gpu | None = None

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition()
        self.streams: list[Stream] = []
        self.threads: set[str] = set()
        """Those that made the GPU their current one."""

        self.used: list[torch.Tensor] = []
        """Tensors that the main stream was said to use."""

        self.has_moved = False
        self._random, self._is_over = random.Random(seed), False
        self._local = threading.local()
        Gpu._now = self
        self.main = Stream()
        self._thread = threading.Thread(target=self._work, daemon=True, name="fake GPU")
        self._thread.start()

    @classmethod
    def current(cls) -> Gpu:
        assert cls._now is not None
        return cls._now

    def _work(self) -> None:
        with self.changed:
            while not self._is_over:
                held = [stream for stream in self.streams if stream.operations]
                self._random.shuffle(held)
                self.has_moved = False
                for stream in held:
                    self._try(stream)
                if not self.has_moved:
                    self.changed.wait()

    def _try(self, stream: Stream) -> None:
        first = stream.operations[0]
        if first.turns:
            first.turns -= 1
            self.has_moved = True
        elif first.run():
            stream.operations.popleft()
            self.has_moved = True

    def launch(self, run: Callable[[], Any], turns: int = 0) -> None:
        """A kernel on the thread's current stream."""
        self.current_stream().add(lambda: run() is not False, turns)

    def stop(self) -> None:
        with self.changed:
            self._is_over = True
            self.changed.notify_all()
        self._thread.join()

    def ask(self, question: Callable[[], bool]) -> bool:
        """The answer once nothing moves any more."""
        with self.changed:
            return question()

    # As torch.cuda has them.

    def current_stream(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.main)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def set_device(self, device: Any) -> None:
        self.threads.add(threading.current_thread().name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        for name in ("stream", "current_stream", "set_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(
            wire,
            "record_use",
            lambda tensors, device: self.used.extend(filter(_is_on_gpu, tensors)),
        )


def _is_on_gpu(tensor: Any) -> bool:
    return tensor is not None and tensor.is_floating_point()


class Comm:
    """What both ends of a communicator share."""

    def __init__(self) -> None:
        self.offered: deque[torch.Tensor] = deque()
        self.taken = 0
        self.num_summed = 0
        self.is_aborted = False


class FakeNccl:
    """One rank's end, as `_get_backend` gives it."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.stream = comm, Stream()
        self.num_sent = 0
        self.calls: list[str] = []

    def name(self) -> str:
        return "nccl"

    def send(self, tensor: torch.Tensor) -> Work:
        self.num_sent += 1
        number, comm = self.num_sent, self.comm
        is_offered = False

        def run() -> bool:
            nonlocal is_offered
            if not is_offered and not comm.is_aborted:
                comm.offered.append(tensor)
                is_offered = self.stream.gpu.has_moved = True
            return comm.taken >= number or comm.is_aborted

        return self._begin(run)

    def recv(self, tensor: torch.Tensor) -> Work:
        comm = self.comm

        def run() -> bool:
            if comm.is_aborted:
                return True
            if not comm.offered:
                return False
            tensor.copy_(comm.offered.popleft())
            comm.taken += 1
            return True

        return self._begin(run)

    def sum(self, num_ranks: int) -> Work:
        """Ends once all have begun; nothing is added up."""
        comm, has_begun = self.comm, False

        def run() -> bool:
            nonlocal has_begun
            if not has_begun:
                comm.num_summed += 1
                has_begun = self.stream.gpu.has_moved = True
            return comm.num_summed >= num_ranks or comm.is_aborted

        return self._begin(run)

    def _begin(self, run: Callable[[], bool]) -> Work:
        """After what the thread's current stream holds now."""
        ready, done = Event(), Event()
        ready.record(self.stream.gpu.current_stream())
        self.stream.wait_event(ready)
        self.stream.add(run)
        done.record(self.stream)
        return Work(self.stream.gpu, done)

    def abort(self) -> None:
        self.calls.append("abort")
        with self.stream.gpu.changed:
            self.comm.is_aborted = True
            self.stream.gpu.changed.notify_all()

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class Work:
    def __init__(self, gpu: Gpu, done: Event) -> None:
        self.gpu, self.done = gpu, done

    def wait(self) -> None:
        """The current stream waits, not the host."""
        self.gpu.current_stream().wait_event(self.done)


class FakeGroup:
    """One rank's end of a group with gloo for the host and NCCL for the GPU."""

    def __init__(self, gloo: Any, nccl: FakeNccl | None, ranks: tuple[int, ...] = ()) -> None:
        self.gloo, self.nccl, self.ranks = gloo, nccl, ranks

    def send(self, tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        (tensor,) = tensors
        if self.nccl is not None and _is_on_gpu(tensor):
            return self.nccl.send(tensor)
        return self.gloo.send(tensors, place, tag)

    def recv(self, tensors: list[torch.Tensor], place: int, tag: int) -> Any:
        (tensor,) = tensors
        if self.nccl is not None and _is_on_gpu(tensor):
            return self.nccl.recv(tensor)
        return self.gloo.recv(tensors, place, tag)

    def _get_backend(self, device: torch.device) -> FakeNccl:
        if self.nccl is None:
            raise RuntimeError("no backend for this device")
        return self.nccl
