"""Times of a device that does later what the host has called."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.varuna_core.trace.streams import Stream, build_clock, put_clock
from varuna_core import trace
from varuna_core.records.logs import trace as records
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.trace import loops, recorder
from varuna_core.trace.device import CLOSE_S, MOST_PENDING, PATIENCE_S, find_clock

MS = 1_000_000
"""In nanoseconds, as the file has it."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    return put_clock(monkeypatch, records, recorder, loops)


def open_writer(path: Path, stream: Stream) -> TraceWriter:
    return TraceWriter(path, 0, log_every=1, find_clock=lambda: build_clock(stream))


def read(writer: TraceWriter) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Events and steps of the file so far."""
    writer.flush()
    found = [json.loads(line) for line in writer.path.read_text().splitlines()[1:]]
    events = [line for line in found if isinstance(line, list)]
    return events, [line for line in found if isinstance(line, dict) and "step" in line]


def act(writer: TraceWriter, stream: Stream, action: str, seconds: float, wait: float = 0) -> None:
    """As the engine does; its message comes after `wait`."""
    begin = stream.host
    stream.host += wait
    ready = writer.now()
    stream.call(seconds)
    writer(action, begin, ready, stream.host)


def list_times(events: list[list[Any]]) -> list[tuple[int, int, int]]:
    """Begin, wait and work in milliseconds."""
    return [(round(event[4] / MS), round(event[5] / MS), round(event[6] / MS)) for event in events]


def test_an_action_lasts_as_long_as_the_device_takes(tmp_path: Path, stream: Stream) -> None:
    """Four actions of 50 ms are called in 4 ms."""
    writer = open_writer(tmp_path / "0.jsonl", stream)
    for step in range(3):
        writer.begin_step(step)
        for number in range(4):
            act(writer, stream, f"0F{number}", 0.05)
        writer.end_step()
    assert read(writer) == ([], []), "the device has done nothing yet"
    stream.wait()
    writer.begin_step(3)
    events, steps = read(writer)
    assert list_times(events) == [(50 * place, 0, 50) for place in range(12)]
    assert [round(step["took"] / MS) for step in steps] == [200, 200, 200]
    assert [step["sums"]["F"] for step in steps] == [[4, 0, 200 * MS]] * 3
    assert stream.num_asked <= stream.num_events + 7, "asked for at both ends of a step, not within"


def test_a_wait_is_what_the_device_waits(tmp_path: Path, stream: Stream) -> None:
    """The second action's message comes while the device is busy, the third's after that."""
    writer = open_writer(tmp_path / "0.jsonl", stream)
    writer.begin_step(0)
    act(writer, stream, "0F0", 0.05)
    act(writer, stream, "0F1", 0.05, wait=0.02)
    act(writer, stream, "0F2", 0.05, wait=0.2)
    stream.wait()
    writer.end_step()
    begin, wait, work = list_times(read(writer)[0])[2]
    assert list_times(read(writer)[0])[:2] == [(0, 0, 50), (50, 0, 50)]
    assert (begin, begin + wait, work) == (100, 222, 50)


def test_an_event_that_is_never_done_keeps_nothing_back(tmp_path: Path, stream: Stream) -> None:
    writer = open_writer(tmp_path / "0.jsonl", stream)
    stream.lost = {4}  # after the second step's first mark
    for step in range(3):
        writer.begin_step(step)
        act(writer, stream, "0F0", 0.05)
        stream.wait()
        writer.end_step()
    assert [line["step"] for line in read(writer)[1]] == [0]
    stream.host += PATIENCE_S
    writer.begin_step(3)
    events, steps = read(writer)
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [work for _, _, work in list_times(events)] == [50, 50, 50]


def test_the_end_waits_for_the_last_events_and_not_for_ever(tmp_path: Path, stream: Stream) -> None:
    for name, lost in (("0.jsonl", set[int]()), ("1.jsonl", {2})):
        writer = open_writer(tmp_path / name, stream)
        stream.num_events, stream.lost = 0, lost
        writer.begin_step(0)
        act(writer, stream, "0F0", 0.05)
        writer.end_step()
        began = stream.host
        writer.close()
        assert stream.host - began <= (CLOSE_S * 1.01 if lost else 0.06)
        events, steps = read(writer)
        assert [line["step"] for line in steps] == [0] and len(events) == 1
        assert lost or list_times(events) == [(0, 0, 50)]
        stream.wait()


def test_after_an_error_of_the_device_the_host_s_times_go_on(
    tmp_path: Path, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(tmp_path / "0.jsonl", stream)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            writer.begin_step(step)
            act(writer, stream, "0F0", 0.05)
            stream.error = RuntimeError("device-side assert") if step else None
            stream.wait()
            writer.end_step()
    assert [work for _, _, work in list_times(read(writer)[0])] == [50, 1, 1]
    assert len(caplog.records) == 1 and "device-side assert" in caplog.text


def test_no_more_events_are_held_than_a_bound(tmp_path: Path, stream: Stream) -> None:
    clock = build_clock(stream)
    stream.call(1000)
    for _ in range(MOST_PENDING + 10):
        clock.mark(stream.host)
    assert stream.num_events == MOST_PENDING
    stream.is_capturing, stream.num_events = True, 0
    clock.mark(stream.host)
    clock.settle()
    assert stream.num_events == 0


@pytest.mark.parametrize("rate", [1 + 4e-5, 1 - 4e-5])
def test_clocks_that_run_apart_stay_together(stream: Stream, rate: float) -> None:
    """Two hours of steps of a second, of which one in ten waits for the device."""
    clock, stream.rate = build_clock(stream), rate
    for step in range(7200):
        at = stream.host
        clock.mark(at)
        true = max(at, stream.free_at)
        stream.call(0.99)
        stream.host += 0.9
        if step % 10 == 0:
            stream.wait()
        if step % 10 == 1:
            clock.settle()
            assert clock.is_settled(at) and clock.find(at) == pytest.approx(true, abs=2e-3)
        clock.forget(stream.host - 20)
    assert len(clock._marked) < 40


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_events_of_a_gpu_are_on_the_host_s_clock(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    writer = TraceWriter(tmp_path / "0.jsonl", 0, log_every=1, find_clock=find_clock)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    writer.begin_step(0)
    first.record()
    for number in range(3):
        begin = writer.now()
        torch.cuda._sleep(50_000_000)
        writer(f"0F{number}", begin, begin, time.perf_counter())
    last.record()
    writer.end_step()
    writer.close()
    events, steps = read(writer)
    ends = [(event[4], event[4] + event[6]) for event in events]
    assert sorted(ends) == ends and len(ends) == 3 and last.query()
    whole = first.elapsed_time(last) * MS
    assert sum(event[6] for event in events) == pytest.approx(whole, rel=0.05)
    assert steps[0]["took"] == pytest.approx(whole, rel=0.05)


@pytest.fixture
def find_writer(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], TraceWriter]]:
    """The trace of a script that nobody has opened."""
    monkeypatch.setenv("VJOB_TRACE", str(tmp_path / "0.jsonl"))
    monkeypatch.setenv("VJOB_TRACE_PID", str(os.getpid()))
    for name in ("VJOB_NODE_TRACE", "VJOB_REPLICA", "VJOB_STAGE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"_writer": None, "_is_off": False, "has_own": False}.items():
        monkeypatch.setattr(trace, name, value)
    monkeypatch.setattr(trace, "find_clock", lambda: build_clock(stream))

    def find() -> TraceWriter:
        writer = trace.get_writer()
        assert writer is not None
        return writer

    yield find
    find().close()


def test_a_loop_is_shown_as_the_device_does_it(
    stream: Stream, find_writer: Callable[[], TraceWriter]
) -> None:
    """Autograd calls what FSDP2 waits for in a thread of its own; another thread is the host's."""
    engine = recorder.Recorder()
    loop = loops.Loop(engine)
    group = SimpleNamespace(reduce_grads=True)

    def run_aside(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def backward() -> None:
        stream.call(0.03)
        run_aside(lambda: loop._reduce_group(lambda group: stream.call(0.02), group))
        stream.call(0.01)

    def save() -> None:
        with trace.open_span("checkpoint"):
            stream.host += 0.001

    for _ in range(2):
        loop._forward(lambda: stream.call(0.05))
        loop._backward(backward)
        run_aside(save)
        loop._begin_update(loop)
        stream.call(0.04)
        loop._end_update(loop)
    stream.wait()
    engine._end()
    events, steps = read(find_writer())
    shown = [(event[0], event[8], round(event[6] / MS)) for event in events[:5]]
    assert shown == [
        ("F", "", 50),
        ("B", "", 30),
        ("communication", "reduce-scatter", 20),
        ("B", "goes on", 10),
        ("optimizer", "", 40),
    ]
    assert (events[5][0], round(events[5][6] / MS)) == ("checkpoint", 1)
    assert [round(step["took"] / MS) for step in steps] == [150, 150]


def test_a_step_of_very_many_spans_has_the_sums_of_all(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_EVENTS", 10)
    writer = open_writer(tmp_path / "0.jsonl", stream)
    writer.begin_step(0)

    def add(kind: str) -> None:
        for _ in range(25):
            begin = writer.now()
            stream.call(0.05 if kind == "compute" else 0)
            stream.wait()
            writer.add(kind, begin, writer.now())

    add("compute")
    thread = threading.Thread(target=add, args=("checkpoint",))
    thread.start()
    thread.join()
    writer.end_step()
    events, (step,) = read(writer)
    assert Counter(event[0] for event in events) == {"compute": 10}
    counts = {kind: (count, round(work / MS)) for kind, (count, _, work) in step["sums"].items()}
    assert counts == {"compute": (25, 25 * 50), "checkpoint": (25, 25)}
