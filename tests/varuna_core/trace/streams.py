"""A stream that does later what the host has called, and its events, as of a GPU.

An event can be recorded, asked and compared, and nothing else: whoever waits for it fails.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from varuna_core.trace.device import DeviceClock


class Stream:
    """Work in order, and a host whose calls take 1 ms each."""

    def __init__(self) -> None:
        self.host = self.free_at = 100.0
        self.rate = 1.0
        """Seconds of the device's clock in one of the host's."""
        self.lost: set[int] = set()
        """Events that are never done, by their number."""
        self.num_events = self.num_asked = 0
        self.is_capturing = False
        self.error: Exception | None = None

    def call(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host) + seconds
        self.host += 0.001

    def wait(self) -> None:
        """As the host does that reads a result."""
        self.host = max(self.host, self.free_at)

    def rest(self, seconds: float) -> None:
        self.host += seconds

    def read(self) -> float:
        return self.host


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.at, self.number = stream, 0.0, -1

    def record(self) -> None:
        assert not self.stream.is_capturing
        self.at = max(self.stream.free_at, self.stream.host)
        self.number, self.stream.num_events = self.stream.num_events, self.stream.num_events + 1

    def query(self) -> bool:
        assert not self.stream.is_capturing
        self.stream.num_asked += 1
        if self.stream.error is not None:
            raise self.stream.error
        return self.stream.host >= self.at and self.number not in self.stream.lost

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event.at - self.at) * self.stream.rate * 1e3


def build_clock(stream: Stream) -> DeviceClock:
    return DeviceClock(
        lambda: Event(stream),
        is_capturing=lambda: stream.is_capturing,
        now=stream.read,
        rest=stream.rest,
    )


def put_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Stream:
    """A new stream, whose host's clock is that of these modules."""
    made = Stream()
    clock = SimpleNamespace(perf_counter=made.read, time_ns=lambda: round(made.host * 1e9))
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return made
