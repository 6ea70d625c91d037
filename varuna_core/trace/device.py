"""Find when a GPU has finished its queued work, by the clock of the host.

    host     F0 F1 F2                    a call returns as soon as its work is queued
               |  |  |                   marks: events behind what was queued before them
    stream   ...F0...|...F1...|...F2...|
                     0        1        2 when each is done: the end of F0, F1, F2

Nothing here waits for the stream during training: once a step, the events are queried. CUDA tells
exactly how long after a reference event another event was done, but not when the reference event
itself was done by the host's clock. Since no event is done before the host has recorded it, each
event gives a lower bound for this time. The highest bound is exact if its event was recorded on an
idle stream, as happens wherever the host waits for a result. The bound is lowered by DRIFT per
second, since the two clocks may drift apart.
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

DRIFT = 5e-5
RENEW_S = 30.0
"""Seconds after which the reference event is replaced, since CUDA returns elapsed times as 32-bit
numbers of milliseconds."""
PATIENCE_S = 30.0
"""Seconds after which an event that is not done is discarded; no other event's time is affected."""
MOST_PENDING = 20_000
CLOSE_S = 2.0
"""Seconds to wait for the last events at the end of the process."""
REST_S = 1e-3


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceClock:
    """CUDA events that one thread has recorded on its stream, with times by the host's clock."""

    def __init__(
        self,
        make_event: Callable[[], Event],
        *,
        is_capturing: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.perf_counter,
        rest: Callable[[float], object] = time.sleep,
    ) -> None:
        """While `is_capturing()` is true (a CUDA graph is being recorded), no event is recorded or
        queried."""
        self._make_event, self._is_capturing = make_event, is_capturing
        self._now, self._rest = now, rest
        self._pending: deque[tuple[float, Event]] = deque()
        self._unused: list[Event] = []
        self._reference: Event | None = None
        self._reference_at = self._elapsed = 0.0
        self._marked: list[float] = []
        self._done: list[float] = []
        """For each moment in `_marked`, the time at which the stream reached it."""
        self._is_off = False

    def mark(self, at: float) -> None:
        """Record an event for this moment (`at`) of the host."""
        if self._is_off or len(self._pending) >= MOST_PENDING:
            return
        try:
            if self._is_capturing():
                return
            event = self._unused.pop() if self._unused else self._make_event()
            event.record()
        except Exception as error:  # whatever a driver raises
            self._fail(error)
            return
        self._pending.append((at, event))

    def settle(self) -> None:
        """Read the events that are done, without waiting for others."""
        if self._is_off or not self._pending:
            return
        try:
            if not self._is_capturing():
                self._read(self._take_done())
        except Exception as error:  # as after a kernel that failed
            self._fail(error)

    def is_settled(self, at: float) -> bool:
        """Return True if no event up to this moment is pending."""
        return not self._pending or self._pending[0][0] > at

    def find(self, at: float) -> float:
        """Return when the stream had finished the work queued before `at`, going by the last mark
        before it."""
        place = bisect_right(self._marked, at) - 1
        return at if place < 0 else max(at, self._done[place])

    def forget(self, before: float) -> None:
        place = bisect_left(self._marked, before) - 1
        if place > 0:
            del self._marked[:place], self._done[:place]

    def close(self) -> None:
        """Wait briefly for the last events; no further events may be recorded."""
        deadline = self._now() + CLOSE_S
        self.settle()
        while self._pending and self._now() < deadline:
            self._rest(REST_S)
            self.settle()
        self._pending.clear()
        self._is_off = True

    def _take_done(self) -> list[tuple[float, Event]]:
        found = []
        while self._pending:
            at, event = self._pending[0]
            if event.query():
                found.append((at, event))
            elif self._now() - at < PATIENCE_S:
                break
            self._pending.popleft()
        return found

    def _read(self, found: list[tuple[float, Event]]) -> None:
        """Compute the times of these events, after adjusting the reference by all of them."""
        if found and self._reference is None:
            self._reference_at, self._reference = found[0]
        reference, times = self._reference, []
        for at, event in found:
            assert reference is not None
            elapsed = 0.0 if event is reference else reference.elapsed_time(event) / 1e3
            self._reference_at -= DRIFT * max(0.0, elapsed - self._elapsed)
            self._reference_at = max(self._reference_at, at - elapsed)
            self._elapsed = max(self._elapsed, elapsed)
            times.append(elapsed)
        for (at, event), elapsed in zip(found, times):  # noqa: B905 # Python 3.9
            last = self._done[-1] if self._done else at
            self._marked.append(at)
            self._done.append(max(self._reference_at + elapsed, at, last))
            if event is not reference:
                self._unused.append(event)
        if times and times[-1] > RENEW_S:
            assert reference is not None
            self._reference = self._unused.pop()  # the last of `found`
            self._unused.append(reference)
            self._reference_at += times[-1]
            self._elapsed = 0.0

    def _fail(self, error: Exception) -> None:
        log.warning("the trace continues with times of the host, not of the GPU: %s", error)
        self._is_off = True
        self._pending.clear()


def find_clock() -> DeviceClock | None:
    """Return the clock of the GPU that the process uses; None as long as it uses none."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return DeviceClock(
        lambda: cuda.Event(enable_timing=True), is_capturing=cuda.is_current_stream_capturing
    )
