"""Mark the steps and named spans of a script, for `vjob status` and `vjob report`.

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

The trace is written to the file in the variable `VJOB_TRACE`, which the agent sets for each rank
(varuna_core/records/logs/trace.py describes the format). Without this variable, these functions do
nothing. Once the script uses a GPU, a span ends when the GPU has finished the work that was queued
in the span (device.py); the script does not wait for this. Spans in threads other than the thread
of the steps, and all spans of a script without a GPU, are measured by the CPU's clock. A function
passed as `sync` is called at both ends of a span or step, for devices that torch.cuda does not
know. This module does not import torch.

If a span of a known kind (NAMES) encloses another one, the inner one's time is subtracted from the
outer one's, so that sums count every moment of a thread once. A span with any other name is shown,
but counts in a sum, as `other`, only if no span encloses it and it encloses none of a known kind.

Child processes of a rank write nothing: a data loader's workers would corrupt the rank's file.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
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
    choose_trace_file,
)
from varuna_core.records.training import VARIABLES
from varuna_core.trace.device import find_clock

log = logging.getLogger(__name__)

NAMES = {
    **{kind: kind for kind in (*COMPUTE, *COMMUNICATION, *OTHERS)},
    "forward": "F",
    "backward": "B",
    "recompute": "R",
    "load": "data",
}
"""Maps the names that scripts use to kinds of spans. A `backward` computes both gradients, an `I`
only those of inputs, a `W` only those of weights."""
EVERY = 10
"""Default interval, in steps, at which single spans are written, besides the first two steps; of
all other steps only sums are written."""
NUM_FIRST = 2
_OWNER = "VJOB_TRACE_PID"
"""Variable with the id of the process that writes the trace. Its child processes inherit VJOB_TRACE
too, and see from this variable that they must not write."""

_TIMELINE = VARIABLES["profile.timeline"]
Function = TypeVar("Function", bound="Callable[..., Any]")


class _Nothing:
    """A step or span that does nothing, used if no trace is written."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: Function) -> Function:
        return function


_NOTHING = _Nothing()


Frames = list["_Span"]


class _State(threading.local):
    """The open spans of each thread, innermost last."""

    def __init__(self) -> None:
        self.frames: Frames = []


_state = _State()
_lock = threading.Lock()
_is_off = not os.environ.get("VJOB_TRACE") or os.environ.get(_TIMELINE) == "0"
_writer: TraceWriter | None = None
_last_step = -1
has_own = False
"""True once the script has opened a step or span itself."""
is_guessed = False
"""True if the open step was detected from a loop (loops.py); the script's own steps end it."""


def start(
    *,
    every: int | None = None,
    stage: int | None = None,
    stages: Sequence[int] | None = None,
    replica: int | None = None,
) -> None:
    """Open the trace with these settings, before the first step or span opens it with the defaults.

    Single spans are written in every `every`-th step (1 means all steps); the default is the conf's
    `train.log_every`, or 10. `stage` (or `stages`, for a rank with several) and `replica` are this
    rank's; by default, those that vjob has given to the rank.
    """
    _find_writer(every, stages if stage is None else [stage], replica)


def step(
    number: int | None = None, *, sync: Callable[[], object] | None = None
) -> _Step | _Nothing:
    """Mark an optimizer step, as a `with` block or a decorator; steps without a number are counted.

    If the block raises an exception, its spans are kept, but its duration does not count as a
    step's.
    """
    global has_own
    has_own = True
    return _NOTHING if _is_off else _Step(number, sync)


def span(
    name: str,
    *,
    stage: int | None = None,
    micro_batch: int | None = None,
    num_bytes: int = 0,
    sync: Callable[[], object] | None = None,
) -> _Span | _Nothing:
    """Mark a named span of time, as a `with` block or a decorator, in any thread.

    With `micro_batch`, reports join the forwards and backwards of several stages to a pipeline.
    Spans between two steps belong to the later step.
    """
    global has_own
    has_own = True
    return _NOTHING if _is_off else _Span(str(name), stage, micro_batch, num_bytes, sync)


def open_span(
    kind: str,
    *,
    stage: int | None = None,
    micro_batch: int | None = None,
    since: float | None = None,
    what: str = "",
) -> _Span | _Nothing:
    """Open a span for an engine. `since` is the `time.perf_counter` at which the engine began to
    wait for the span's input; `what` is a further name.

    Nothing is recorded before the trace is open, since the rank's stage is not known yet.
    """
    return (
        _NOTHING
        if _is_off or _writer is None
        else _Span(kind, stage, micro_batch, 0, None, since, what)
    )


def get_frames() -> Frames:
    """Return the list of this thread's open spans, which changes as spans open and close."""
    return _state.frames


@contextmanager
def sharing(frames: Frames) -> Iterator[None]:
    """Nest this thread's spans in those of another thread, which waits for this one."""
    own, _state.frames = _state.frames, frames
    writer, thread = _writer, threading.get_ident()
    if writer is not None:
        writer.threads.add(thread)
    try:
        yield
    finally:
        _state.frames = own
        if writer is not None:
            writer.threads.discard(thread)


def get_folder() -> str:
    """Return the folder for traces of this attempt, also those of torch.profiler; `.` outside a
    run."""
    return os.path.dirname(os.environ.get("VJOB_TRACE", "")) or "."


def is_open() -> bool:
    """Return True once this rank's file has a header, which needs the rank's stage."""
    return _writer is not None


def get_writer() -> TraceWriter | None:
    """Return the rank's writer, for Varuna's `trace=`; None if no trace is written."""
    return _find_writer()


class _Step(ContextDecorator):
    def __init__(self, number: int | None, sync: Callable[[], object] | None) -> None:
        self.number, self.sync = number, sync
        self._writer: TraceWriter | None = None

    def _recreate_cm(self) -> _Step:  # each call of a decorated function is a step of its own
        return _Step(self.number, self.sync)

    def __enter__(self) -> None:
        global _last_step, is_guessed
        writer = _find_writer()
        if writer is not None and is_guessed:
            is_guessed = False
            writer.drop_step()
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
    """Return a step number, also from numpy's or torch's integers; else the next number."""
    if number is not None:
        try:
            return operator.index(number)  # type: ignore[arg-type]  # asked here
        except TypeError:
            _warn_of_step()
    return _last_step + 1


@cache
def _warn_of_step() -> None:
    log.warning("trace.step was not given a whole number: steps are counted")


class _Span(ContextDecorator):
    """A span and, while it is open, its position among the open spans around it.

    The wrapped functions of an engine open spans thousands of times, while the processor's caches
    hold the engine's data: so little code may run here, and few objects may be touched.
    """

    def __init__(
        self,
        name: str,
        stage: int | None,
        micro_batch: int | None,
        num_bytes: int,
        sync: Callable[[], object] | None,
        since: float | None = None,
        what: str = "",
    ) -> None:
        self.since, self.what = since, what
        self.name, self.kind = name, NAMES.get(name)
        self.own, self.num_bytes, self.sync = (stage, micro_batch), num_bytes, sync
        self.begun: float | None = None
        """Begin of the part of the span that is not yet written: the time at which the span was
        opened or, for a span of a known kind, at which the last such span inside it ended. None
        once closed."""

    def _recreate_cm(self) -> _Span:
        return _Span(self.name, *self.own, self.num_bytes, self.sync)

    def __enter__(self) -> None:
        writer = _find_writer() if _writer is None else _writer
        if writer is None:
            return
        if self.sync is not None:
            self.sync()
        frames, now = _state.frames, writer.now()
        self.stage, self.micro_batch = self.own
        self.num_pieces, self.has_known = 0, False
        if frames:
            self._nest(writer, frames, now)
        self.begun = now
        frames.append(self)

    def _nest(self, writer: TraceWriter, frames: Frames, now: float) -> None:
        """Begin inside the span around this one: take over its stage and micro-batch, and interrupt
        its time if this span is of a known kind."""
        if self.kind is not None:
            outer = _find_known(frames)
            if outer is not None:
                outer._write(writer, now, outer.kind or OTHER, outer.what)
            for frame in frames:
                frame.has_known = True
        around = frames[-1]
        self.stage = around.stage if self.stage is None else self.stage
        self.micro_batch = around.micro_batch if self.micro_batch is None else self.micro_batch

    def __exit__(self, error: type | None, *_: object) -> None:
        writer = _writer
        if self.begun is None or writer is None:
            return
        if self.sync is not None and error is None:
            self.sync()
        frames, now = _state.frames, writer.now()
        if frames and frames[-1] is self:
            frames.pop()
        elif self in frames:  # else it was entered in another thread
            frames.remove(self)
        if self.kind is None:
            self._write(writer, now, DETAIL if frames or self.has_known else OTHER, self.name)
        else:
            self._write(writer, now, self.kind, self.what)
            outer = _find_known(frames) if frames else None
            if outer is not None:
                outer.begun = now
        self.begun = None

    def _write(self, writer: TraceWriter, now: float, kind: str, what: str) -> None:
        """Write the part of this span since `begun`."""
        ready = now if self.begun is None else self.begun
        begin, num_bytes = ready, self.num_bytes
        if self.num_pieces:
            what, num_bytes = CONTINUED, 0
        elif self.since is not None:
            begin = self.since
        self.num_pieces += 1
        micro_batch = -1 if self.micro_batch is None else self.micro_batch
        writer.put(kind, self.stage, micro_batch, begin, ready, now, num_bytes, what)


def _find_known(frames: Frames) -> _Span | None:
    return next((frame for frame in reversed(frames) if frame.kind is not None), None)


# The writer.


def read_every() -> int:
    """Return the interval, in steps, at which single spans are written: the conf's
    `train.log_every`, or EVERY."""
    text = os.environ.get(VARIABLES["train.log_every"], "")
    return int(text) if text.isdecimal() and int(text) else EVERY


def _find_writer(
    every: int | None = None, stages: Sequence[int] | None = None, replica: int | None = None
) -> TraceWriter | None:
    """Return the writer, opening it at the first call."""
    if _writer is not None or _is_off:
        return _writer
    return open_once(lambda: _open(every or read_every(), stages, replica))


def open_once(open_writer: Callable[[], TraceWriter]) -> TraceWriter | None:
    """Return the rank's writer for Varuna; open it with `open_writer` unless the script has opened
    one. Return None if no trace is written.

    Spans of the script are then written to the same file.
    """
    global _writer, _is_off
    with _lock:
        if _writer is None and not _is_off:
            _is_off = _is_child()
            _writer = None if _is_off else open_writer()
    return _writer


def _is_child() -> bool:
    """Return True in a child of a rank's process, which would corrupt the rank's file.

    If one process starts all ranks of a node, the first of these ranks writes for the node.
    """
    if "VJOB_NODE_RANKS" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        return True
    own = str(os.getpid())
    if os.environ.setdefault(_OWNER, own) != own:
        return True
    loaded = sys.modules.get("multiprocessing.process")
    return loaded is not None and loaded.parent_process() is not None


def _open(every: int, stages: Sequence[int] | None, replica: int | None) -> TraceWriter:
    stem = Path(os.environ["VJOB_TRACE"]).stem
    return TraceWriter(
        choose_trace_file(os.environ),
        int(stem) if stem.isdecimal() else _read_number("RANK"),
        stages=[_read_number("VJOB_STAGE")] if stages is None else stages,
        replica=_read_number("VJOB_REPLICA") if replica is None else replica,
        log_every=every,
        num_first=NUM_FIRST,
        facts=_find_device(),
        find_clock=find_clock,
    )


def _read_number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _find_device() -> dict[str, str]:
    """Return the name of the GPU if the script already uses one; reports compare ranks on the same
    kind of GPU."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return {"device": str(torch.cuda.get_device_name())}
    except Exception as error:  # whatever the foreign module raises
        log.debug("the GPU's name is not known: %s", error)
    return {}


def _stop_in_child() -> None:
    """Stop tracing in a forked child: the file and its pending lines belong to the parent."""
    global _writer, _is_off
    _writer, _is_off = None, True


os.register_at_fork(after_in_child=_stop_in_child)
