"""Record actions, waits and steps of an engine other than Varuna, from calls of its functions.

Wrapped functions call this recorder, which changes no arguments, results or exceptions. An action
inside another one is part of the outer one. Between two actions an engine waits for messages: the
time since its first request for a message is recorded as the wait of the next action.
"""

from __future__ import annotations

import atexit
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from varuna_core import trace

log = logging.getLogger(__name__)

Call = Callable[..., Any]
Around = Callable[..., Any]
"""Function called with the wrapped function, then with that function's arguments."""


class Recorder:
    """Records one rank's engine, which runs in one thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        """Number of open actions and spans; whatever begins while one is open is part of the outer
        one."""
        self._backward: trace.Frames | None = None
        """The open spans of the engine's thread during a backward, which autograd runs in another
        thread for a GPU while the engine's thread waits; None outside of a backward."""
        self._asked: float | None = None
        """The time of the first request for a message since the last action."""
        self._last: float | None = None
        """The time of the last activity in a step recorded here; None before the first step."""
        self._number = -1
        self.is_driven = False
        """True if an engine marks its steps, so that they need not be detected from a loop."""
        self.is_cut = False
        """True while the open step is incomplete; a step that stays incomplete is dropped."""

    def is_busy(self) -> bool:
        """Return True within an action, and in threads other than the engine's."""
        return self._depth > 0 or threading.get_ident() != self._thread

    def place(self, stages: Sequence[int] | None, replica: int) -> None:
        """Set this rank's stages and replica before its first event; later calls have no effect."""
        trace.start(stages=stages, replica=replica)

    def begin_step(self, number: int | None = None, *, at: float | None = None) -> None:
        """Begin a step, now or at the earlier `time.perf_counter` in `at`; the step lasts until the
        next one begins. A step without a number gets the next number.

        Do nothing if the script marks its own steps.
        """
        self._asked = None  # for the last messages of the step before
        writer = trace.get_writer()
        if writer is None or (self._last is None and writer.is_in_step):
            return
        if self._last is None:
            atexit.register(self._end)  # before the writer's own: the last registered is the first
        elif self.is_cut:
            writer.drop_step()
        trace.is_guessed, self.is_cut = not self.is_driven, True
        self._number = self._number + 1 if number is None else number
        writer.begin_step(self._number, at)
        self._last = time.perf_counter()

    def end_step(self) -> None:
        """End the open step at its last activity if the step is complete, since later work is no
        part of it."""
        writer = trace.get_writer() if self._last is not None and not self.is_cut else None
        if writer is not None and writer.is_in_step:
            writer.end_step(self._last)

    def run_step(self, number: int | None, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function of an engine that does one step, and record the step."""
        self.begin_step(number)
        try:
            found = call(*args, **kwargs)
            self.is_cut = False
            return found
        finally:
            self.touch()

    def act(
        self, kind: str, stage: int, micro_batch: int, call: Call, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run and record an action of a schedule."""
        since, self._asked = self._asked, None
        span = trace.open_span(kind, stage=stage, micro_batch=micro_batch, since=since)
        if kind in "BIW":
            self._backward = trace.get_frames()
        self._depth += 1
        try:
            with span:
                return call(*args, **kwargs)
        finally:
            self._depth -= 1
            self._backward = None
            if self._last is not None:
                self._last = time.perf_counter()

    def span(self, kind: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function that is no action of a schedule; record it as a span of a known kind."""
        if self.is_busy():
            return call(*args, **kwargs)
        if kind == "evaluate":
            self.end_step()
        return self._span_between(kind, call, *args, **kwargs)

    def read(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a read of a batch; the time of a read inside a forward is subtracted from the
        forward's."""
        if threading.get_ident() != self._thread:
            return call(*args, **kwargs)
        return self._span_between("data", call, *args, **kwargs)

    def wait_within(self, what: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a call that waits for other ranks; its time is subtracted from the action around
        it."""
        frames = None
        if threading.get_ident() != self._thread:
            frames = self._backward
            if frames is None:
                return call(*args, **kwargs)
        span = trace.open_span("communication", what=what)
        with nullcontext() if frames is None else trace.sharing(frames):
            return self._span(span, call, *args, **kwargs)

    def ask(self, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function that waits for a message for the next action, and note when the wait
        began."""
        if self._asked is None and not self._depth and threading.get_ident() == self._thread:
            self._asked = time.perf_counter()
        return call(*args, **kwargs)

    def open(self, kind: str, stage: int | None = None, micro_batch: int | None = None) -> Any:
        """Open a span for an engine that only reports the span's begin and end."""
        span = trace.open_span(kind, stage=stage, micro_batch=micro_batch)
        span.__enter__()
        self._depth += 1
        return span

    def close(self, span: Any) -> None:
        self._depth -= 1
        span.__exit__(None)
        self.touch()

    def touch(self) -> None:
        """Extend the open step to the present."""
        if self._last is not None:
            self._last = time.perf_counter()

    def _span_between(self, kind: str, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        """Record a span between two actions; its time does not count as the next action's wait."""
        began = time.perf_counter()
        try:
            return self._span(trace.open_span(kind), call, *args, **kwargs)
        finally:
            if self._asked is not None:
                self._asked += time.perf_counter() - began

    def _span(self, span: Any, call: Call, /, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            with span:
                return call(*args, **kwargs)
        finally:
            self._depth -= 1
            if self._last is not None:
                self._last = time.perf_counter()

    def _end(self) -> None:
        """End the last step at its last activity instead of the end of the process; a step that has
        only begun, as with the read that finds no further batch, is dropped."""
        self.end_step()
        writer = trace.get_writer()
        if writer is not None and self.is_cut:
            writer.drop_step()


def is_compiling() -> bool:
    """Return True while torch.compile traces code; callers then leave at once, so that none of
    their other code is traced."""
    import torch

    return torch.compiler.is_dynamo_compiling()


def is_training() -> bool:
    """Return True if autograd is enabled; scripts disable autograd while they evaluate."""
    import torch

    return torch.is_grad_enabled()


def wrap(owner: Any, name: str, around: Around) -> bool:
    """Wrap a function of a module or class in `around`; return False if there is no such name."""
    inner = getattr(owner, name, None)
    if inner is None:
        return False
    torch = sys.modules.get("torch")  # not all of it is there yet

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch is not None and torch.compiler.is_dynamo_compiling():
            return inner(*args, **kwargs)
        return around(inner, *args, **kwargs)

    setattr(owner, name, wrapped)
    return True


def find_argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an argument given by name or position; None if it was not given."""
    return kwargs[name] if name in kwargs else args[position] if position < len(args) else None
