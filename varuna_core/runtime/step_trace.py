"""Write a trace of a script's steps to one file per rank in the run folder.

A step lasts from one `Varuna.step` to the next, including the optimizer, data loading and
checkpoints between the two; an evaluation ends it at its last activity. If a script passes
`trace=`, it must write steps itself.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.facts.partition import Partition
from varuna_core.records.logs.times import Exchange
from varuna_core.records.logs.trace import TraceWriter
from varuna_core.records.rank_map import StageMap
from varuna_core.schedule.registry import place_stages
from varuna_core.trace.device import find_clock

Read = Callable[[], int]
NUM_EXCHANGES = 8
"""Number of messages exchanged between two clocks; the fastest one is used."""


def open_rank_trace(
    path: Path,
    rank: int,
    stages: StageMap,
    *,
    schedule: str,
    partition: Partition | None,
    stages_per_rank: int,
    device: torch.device,
    log_every: int,
    num_first: int = 0,
) -> TraceWriter:
    """Open the trace of one rank, with the facts that reports need."""
    position, replica = stages.slice(rank % stages.tensor).find(rank)
    placed = stages.with_placement(place_stages(schedule, stages.depth, stages_per_rank))
    facts: dict[str, Any] = {"device": "CPU"}
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
    if partition is not None:
        facts["partition"] = partition.spell()
    return TraceWriter(
        path,
        rank,
        stages=placed.stages_of(position),
        replica=replica,
        log_every=log_every,
        num_first=num_first,
        facts=facts,
        find_clock=find_clock,
    )


class StepTrace:
    """Begins and ends the steps in a rank's trace, unless the script calls `trace.step` itself."""

    def __init__(
        self, writer: TraceWriter, span: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        """`span` is `varuna_core.trace.span`, which tracks the script's own enclosing spans."""
        self.writer, self._span = writer, span
        self._last: float | None = None
        """Time of the last activity in a step opened by this class; None before the first step."""
        self._stepping: list[AbstractContextManager[Any]] = []
        """The span of the optimizer step that is in progress."""
        atexit.register(self.end)  # before the writer's own: the last registered is the first

    def begin(self, step: int) -> None:
        if self._last is None and self.writer.is_in_step:
            return  # the script's own
        self.writer.begin_step(step)
        self._last = time.perf_counter()

    def touch(self) -> None:
        """If this class opened the current step, extend the step to the present time."""
        if self._last is not None:
            self._last = time.perf_counter()

    def drop(self) -> None:
        """Drop a failed step, which would appear as the shortest step."""
        if self._last is not None:
            self.writer.drop_step()
        self._last = None

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Record a span; an evaluation first ends the open step, which it is no part of."""
        if kind == "evaluate" and self._last is not None and self.writer.is_in_step:
            self.writer.end_step(self._last)
        with self._span(kind):
            yield
        self.touch()

    def watch_optimizer(self, optimizer: Any) -> None:
        """Trace an optimizer's steps, if it supports torch's step hooks."""
        before = getattr(optimizer, "register_step_pre_hook", None)
        after = getattr(optimizer, "register_step_post_hook", None)
        if before is not None and after is not None:
            before(self._begin_optimizer)
            after(self._end_optimizer)

    def _begin_optimizer(self, *ignored: Any) -> None:
        self._stepping.append(self._span("optimizer"))
        self._stepping[-1].__enter__()

    def _end_optimizer(self, *ignored: Any) -> None:
        if self._stepping:
            self._stepping.pop().__exit__(None, None, None)
        self.touch()

    def end(self) -> None:
        """End the last step at its last activity, excluding later work of the script."""
        atexit.unregister(self.end)
        if self._last is not None:
            self.writer.end_step(self._last)
        self._last = None


def synchronise_clocks(writer: TraceWriter) -> None:
    """Synchronize clocks if the ranks' group supports CPU tensors; every rank must call this."""
    if dist.is_initialized() and dist.get_world_size() > 1 and "gloo" in str(dist.get_backend()):
        exchange_clocks(writer)


def exchange_clocks(trace: TraceWriter | None) -> None:
    """Measure the offset of this rank's clock from rank 0's by exchanging messages. Every rank must
    call this, including ranks without a trace."""
    read = time.time_ns if trace is None else trace.read_clock
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for other in range(1, world):
            for _ in range(NUM_EXCHANGES):
                _answer(other, read)
        return
    exchanges = [_ask(read) for _ in range(NUM_EXCHANGES)]
    if trace is not None:
        trace.add_exchanges(exchanges)


def _answer(other: int, read: Read) -> None:
    dist.recv(torch.empty(1, dtype=torch.int64), other)
    heard = read()
    dist.send(torch.tensor([heard, read()]), other)


def _ask(read: Read) -> Exchange:
    times = torch.empty(2, dtype=torch.int64)
    asked = read()
    dist.send(torch.tensor([0]), 0)
    dist.recv(times, 0)
    answered = read()
    heard, replied = times.tolist()
    return Exchange(asked=asked, heard=heard, replied=replied, answered=answered)
