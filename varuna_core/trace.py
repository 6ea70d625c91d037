"""Steps and named spans of one's own script, for `vjob status` and `vjob report`.

    from varuna_core import trace

    for number, batch in enumerate(batches):
        with trace.step(number):
            for micro_batch, piece in enumerate(batch.chunk(4)):
                with trace.span("forward", micro_batch=micro_batch):
                    loss = model(piece)
                with trace.span("backward", micro_batch=micro_batch):
                    loss.backward()
            with trace.span("optimizer"):
                optimizer.step()

Written is `VJOB_TRACE`, which the agent sets for each rank (varuna_core/records/logs/trace.py has
the format); where it is not set, all this does nothing. Times are those of the CPU's clock: work
that a GPU has been given and not done yet belongs to whatever span waits for it. `sync=`, such as
`torch.cuda.synchronize`, is called at both ends of a span or step, and makes its time true at the
cost of that wait. torch is not imported, and CUDA events are not used.

Nested spans: the time of a known kind (NAMES) is taken out of the span around it, so that sums
count every moment of a thread once. A span by any other name is shown, and summed up as `other` if
it stands alone.

Children of a rank's process write nothing: a data loader's workers would spoil their rank's file.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from varuna_core.records.logs.trace import (
    COMMUNICATION,
    COMPUTE,
    CONTINUED,
    DETAIL,
    OTHER,
    OTHERS,
    TraceWriter,
)
from varuna_core.records.training import VARIABLES

log = logging.getLogger(__name__)

NAMES = {
    **{kind: kind for kind in (*COMPUTE, *COMMUNICATION, *OTHERS)},
    "forward": "F",
    "backward": "B",
    "recompute": "R",
    "load": "data",
}
"""Names of known kinds; `backward` is of both gradients, `I` and `W` are those of one."""
EVERY = 10
"""Spans are written one by one in every tenth step and the first two; of the others, their sums."""
NUM_FIRST = 2
_OWNER = "VJOB_TRACE_PID"
"""The process that writes, for those that it starts: they inherit VJOB_TRACE."""

_TIMELINE = VARIABLES["profile.timeline"]
Function = TypeVar("Function", bound="Callable[..., Any]")


class _Nothing:
    """A step or span where no trace is written."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: Function) -> Function:
        return function


_NOTHING = _Nothing()


class _Frame:
    """A span that is open."""

    __slots__ = ("begin", "has_known", "micro_batch", "num_pieces", "since", "span", "stage")

    def __init__(self, span: _Span, begin: float, around: _Frame | None) -> None:
        self.span, self.begin, self.since = span, begin, begin
        self.stage, self.micro_batch = span.stage, span.micro_batch
        if around is not None:
            self.stage = around.stage if self.stage is None else self.stage
            if self.micro_batch is None:
                self.micro_batch = around.micro_batch
        self.num_pieces = 0
        self.has_known = False


class _State(threading.local):
    """The open spans of each thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_state = _State()
_lock = threading.Lock()
_is_off = not os.environ.get("VJOB_TRACE") or os.environ.get(_TIMELINE) == "0"
_writer: TraceWriter | None = None
_last_step = -1


def start(
    *, every: int | None = None, stage: int | None = None, replica: int | None = None
) -> None:
    """Open the trace before the first step or span does, with other settings.

    `every`: how often spans are written one by one, 1 for all steps; by default the conf's
    `train.log_every`, or 10. `stage` and `replica` are those of this rank, by default the conf's.
    """
    _find_writer(every, stage, replica)


def step(
    number: int | None = None, *, sync: Callable[[], object] | None = None
) -> _Step | _Nothing:
    """One optimizer step, as a `with` block or a decorator; without a number they are counted.

    A block that raises is no whole step: its spans are kept, and it counts for no pace.
    """
    return _NOTHING if _is_off else _Step(number, sync)


def span(
    name: str,
    *,
    stage: int | None = None,
    micro_batch: int | None = None,
    num_bytes: int = 0,
    sync: Callable[[], object] | None = None,
) -> _Span | _Nothing:
    """A named span of time, as a `with` block or a decorator; in any thread.

    With `micro_batch`, forwards and backwards of several stages are put together to a pipeline.
    Spans between two steps count to the later one.
    """
    return _NOTHING if _is_off else _Span(name, stage, micro_batch, num_bytes, sync)


def get_folder() -> str:
    """The attempt's folder for traces, which the report searches for torch.profiler's files too;
    `.` outside a run."""
    return os.path.dirname(os.environ.get("VJOB_TRACE", "")) or "."


def get_writer() -> TraceWriter | None:
    """The rank's writer, which Varuna takes as `trace=`; None where no trace is written."""
    return _find_writer()


class _Step(ContextDecorator):
    def __init__(self, number: int | None, sync: Callable[[], object] | None) -> None:
        self.number, self.sync = number, sync
        self._writer: TraceWriter | None = None

    def _recreate_cm(self) -> _Step:  # each call of a decorated function is a step of its own
        return _Step(self.number, self.sync)

    def __enter__(self) -> None:
        global _last_step
        writer = _find_writer()
        if writer is None or writer.is_in_step:  # a step in a step is a part of it
            return
        number = _read_step(self.number)
        if self.sync is not None:
            self.sync()
        writer.begin_step(number)
        self._writer, _last_step = writer, number

    def __exit__(self, error: type | None, *_: object) -> None:
        writer, self._writer = self._writer, None
        if writer is None or _is_off:
            return
        if error is not None:
            writer.drop_step()
            return
        if self.sync is not None:
            self.sync()
        writer.end_step()


def _read_step(number: object) -> int:
    """Integers of numpy and torch are numbers too; without one, or with another thing, the next."""
    if number is not None:
        try:
            return operator.index(number)  # type: ignore[arg-type]  # asked here
        except TypeError:
            _warn_of_step()
    return _last_step + 1


@cache
def _warn_of_step() -> None:
    log.warning("trace.step was given what is no whole number: steps are counted")


class _Span(ContextDecorator):
    def __init__(
        self,
        name: str,
        stage: int | None,
        micro_batch: int | None,
        num_bytes: int,
        sync: Callable[[], object] | None,
    ) -> None:
        self.name, self.kind = str(name), NAMES.get(name)
        self.stage, self.micro_batch, self.num_bytes = stage, micro_batch, num_bytes
        self.sync = sync
        self._frame: _Frame | None = None

    def _recreate_cm(self) -> _Span:
        return _Span(self.name, self.stage, self.micro_batch, self.num_bytes, self.sync)

    def __enter__(self) -> None:
        writer = _find_writer()
        if writer is None:
            return
        if self.sync is not None:
            self.sync()
        frames, now = _state.frames, time.perf_counter()
        if self.kind is not None:
            outer = _find_known(frames)
            if outer is not None:
                _write_piece(writer, outer, now)
            for frame in frames:
                frame.has_known = True
        self._frame = _Frame(self, now, frames[-1] if frames else None)
        frames.append(self._frame)

    def __exit__(self, error: type | None, *_: object) -> None:
        frame, self._frame = self._frame, None
        writer = _writer
        if frame is None or writer is None:
            return
        if self.sync is not None and error is None:
            self.sync()
        frames, now = _state.frames, time.perf_counter()
        if frame in frames:  # else it was entered in another thread
            frames.remove(frame)
        if self.kind is not None:
            _write_piece(writer, frame, now)
            outer = _find_known(frames)
            if outer is not None:
                outer.since = now
        else:
            kind = DETAIL if frames or frame.has_known else OTHER
            _write(writer, kind, frame, frame.begin, now, self.name)


def _find_known(frames: list[_Frame]) -> _Frame | None:
    return next((frame for frame in reversed(frames) if frame.span.kind is not None), None)


def _write_piece(writer: TraceWriter, frame: _Frame, now: float) -> None:
    """What has run of a span of a known kind since its begin, or since a span in it ended."""
    what = CONTINUED if frame.num_pieces else ""
    frame.num_pieces += 1
    _write(writer, frame.span.kind or OTHER, frame, frame.since, now, what)


def _write(
    writer: TraceWriter, kind: str, frame: _Frame, begin: float, end: float, what: str
) -> None:
    writer.add(
        kind,
        begin,
        end,
        stage=frame.stage,
        microbatch=-1 if frame.micro_batch is None else frame.micro_batch,
        num_bytes=frame.span.num_bytes if what != CONTINUED else 0,
        what=what,
    )


# The writer.


def read_every() -> int:
    """Steps between those with details: the conf's `train.log_every`, if it writes one."""
    text = os.environ.get(VARIABLES["train.log_every"], "")
    return int(text) if text.isdecimal() and int(text) else EVERY


def _find_writer(
    every: int | None = None, stage: int | None = None, replica: int | None = None
) -> TraceWriter | None:
    """Opened at the first call."""
    if _writer is not None or _is_off:
        return _writer
    return open_once(lambda: _open(every or read_every(), stage, replica))


def open_once(open_writer: Callable[[], TraceWriter]) -> TraceWriter | None:
    """The rank's writer, for Varuna, which opens it where the script has not; None without a trace.

    Spans of the script are in the same file then.
    """
    global _writer, _is_off
    with _lock:
        if _writer is None and not _is_off:
            _is_off = _is_child()
            _writer = None if _is_off else open_writer()
    return _writer


def _is_child() -> bool:
    """True in a process that a rank's process has started, which may have spans of its own."""
    own = str(os.getpid())
    if os.environ.setdefault(_OWNER, own) != own:
        return True
    loaded = sys.modules.get("multiprocessing.process")
    return loaded is not None and loaded.parent_process() is not None


def _open(every: int, stage: int | None, replica: int | None) -> TraceWriter:
    path = Path(os.environ["VJOB_TRACE"])
    return TraceWriter(
        path,
        _read_number("RANK") if not path.stem.isdigit() else int(path.stem),
        stages=[_read_number("VJOB_STAGE") if stage is None else stage],
        replica=_read_number("VJOB_REPLICA") if replica is None else replica,
        log_every=every,
        num_first=NUM_FIRST,
        facts=_find_device(),
    )


def _read_number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0


def _find_device() -> dict[str, str]:
    """The GPU that the script already uses: ranks are compared with those on the same kind."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return {"device": str(torch.cuda.get_device_name())}
    except Exception as error:  # whatever the foreign module raises
        log.debug("the GPU's name is not known: %s", error)
    return {}


def _stop_in_child() -> None:
    """The file and what is still to be written are the parent's."""
    global _writer, _is_off
    _writer, _is_off = None, True


os.register_at_fork(after_in_child=_stop_in_child)
