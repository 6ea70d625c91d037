"""Adapt the schedule to measured times during training: `schedule: auto`.

    steps      1      2 3 4 5      6 7 8 9      ...
    each rank  warm   notes times of actions and of messages
    all ranks         one all-reduce after every four steps: equal costs on all ranks
                      if costs changed: the best schedule for them, if shorter by GAIN

A message's transit time is measured with two unsynchronized clocks. Messages between two stages go
in both directions, and the clock offset enters with opposite signs, so it cancels in the mean. The
fastest message of a step is used, since the others may have waited for the link.

On a GPU, actions are timed by CUDA events; messages are not timed, since the host does not know
when a message leaves. There the memory of micro-batches is also measured, and schedules that do not
fit are rejected.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from varuna_core.records.rank_map import StageMap
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.engine.plans import Plans
from varuna_core.schedule.actions import Kind
from varuna_core.schedule.measured import MEASURED, KnownCosts
from varuna_core.schedule.recompute import Memory
from varuna_core.trace.device import DeviceClock

log = logging.getLogger(__name__)

WINDOW = 4
"""Steps measured before the ranks agree; a change takes effect within two windows."""

Message = tuple[bool, int, int]
"""A message: True for an activation, False for a gradient; its receiving stage; its micro-batch."""


class ActionTimes:
    """Times of one rank's actions, and of sent and received messages, in recent steps."""

    def __init__(self, stage_map: StageMap, clock: DeviceClock | None = None) -> None:
        self.num_stages, self.clock = stage_map.num_stages, clock
        self.counts = not stage_map.tensor_rank
        """True on the first of the ranks that shard a layer: only its times are used."""

        self.num_microbatches = 0
        self._times: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
        self._messages: list[torch.Tensor] = []

    def clear(self) -> None:
        self._times.clear()
        self._messages.clear()
        if self.clock is not None:
            self.clock.settle()
            self.clock.forget(time.perf_counter())

    def begin(self, num_microbatches: int) -> None:
        """Begin a step; drop the times of steps with another number of micro-batches."""
        if num_microbatches != self.num_microbatches:
            self.clear()
        self.num_microbatches = num_microbatches
        shape = 2, self.num_stages - 1, num_microbatches
        self._messages.append(torch.zeros(shape, dtype=torch.float64))

    def add(self, kind: Kind, stage: int, ready: float, end: float) -> None:
        """Record an action's time from its input's arrival to `end`, by `time.perf_counter`."""
        if self.clock is not None:
            self.clock.mark(end)
        self._times.setdefault(("F" if kind == "f" else kind, stage), []).append((ready, end))

    def has_left(self, message: Message, at: float) -> None:
        self._note(message, -at)

    def has_come(self, message: Message, at: float) -> None:
        self._note(message, at)

    def _note(self, message: Message, value: float) -> None:
        is_activation, stage, microbatch = message
        boundary = stage - 1 if is_activation else stage
        self._messages[-1][int(is_activation), boundary, microbatch] += value

    def list_figures(self) -> torch.Tensor:
        """Return median times by kind and stage (0 if none ran), then each step's message times."""
        times = torch.zeros(len(MEASURED), self.num_stages, dtype=torch.float64)
        if self.clock is not None:
            self.clock.settle()
        for (kind, stage), spans in self._times.items():
            times[MEASURED.index(kind), stage] = statistics.median(map(self._measure, spans))
        parts = [times.flatten(), *(step.flatten() for step in self._messages)]
        return torch.cat(parts) * self.counts

    def _measure(self, span: tuple[float, float]) -> float:
        ready, end = span
        return end - ready if self.clock is None else self.clock.find(end) - self.clock.find(ready)


def measure_hops(times: torch.Tensor) -> torch.Tensor:
    """Return the seconds of a message between two stages. The input holds arrival minus sending
    time, by step, direction, pair of stages and micro-batch."""
    return times.amin(dim=3).mean(dim=1).median(dim=0).values.clamp(min=0)


def agree_on_times(times: ActionTimes, links: Links) -> tuple[dict[Kind, list[float]], list[float]]:
    """Return seconds by kind and stage, and of a message between stages, equal on all ranks."""
    stages = times.num_stages
    summed = times.list_figures()
    dist.all_reduce(summed, group=links.pipeline)
    kinds, messages = summed[: len(MEASURED) * stages], summed[len(MEASURED) * stages :]
    hops = torch.zeros(stages - 1, dtype=torch.float64)
    if messages.numel():
        hops = measure_hops(messages.view(-1, 2, stages - 1, times.num_microbatches))
    figures = torch.cat([kinds, hops])
    if links.replicas is not None:
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=links.replicas)
    listed = figures.tolist()
    each = {kind: listed[i * stages : (i + 1) * stages] for i, kind in enumerate(MEASURED)}
    return each, listed[len(MEASURED) * stages :]


class Adapting:
    """Rebuilds a rank's schedule if costs have changed; all ranks make the same choice."""

    def __init__(
        self,
        plans: Plans,
        links: Links,
        times: ActionTimes,
        find_memory: Callable[[], Memory | None] | None = None,
    ) -> None:
        """`find_memory` agrees with the other ranks on the memory of micro-batches; it returns None
        while that memory is unknown. Without `find_memory`, memory is unlimited."""
        self.plans, self.links, self.times, self._find_memory = plans, links, times, find_memory
        self.known = KnownCosts(plans.costs)
        self._num_steps = 0

    def begin_step(self) -> None:
        """Begin a step, on all ranks; adopt another schedule if costs have changed."""
        if self.plans.lacks_memory:
            self.times.clear()
            return
        self._num_steps += 1
        if self._num_steps == 2:  # the first one did everything for the first time
            self.times.clear()
        elif self._num_steps > 2 and (self._num_steps - 2) % WINDOW == 0:
            self._settle()
            self.times.clear()

    def _settle(self) -> None:
        by_kind, hops = agree_on_times(self.times, self.links)
        is_timed = self.times.clock is None
        costs = self.known.measure(by_kind, hops if is_timed else [None] * len(hops))
        if costs is None or not self.known.has_moved():
            return
        memory = None
        if self._find_memory is not None:
            memory = self._find_memory()
            if memory is None:
                return
        found = self.plans.adapt(costs, memory)
        self.known.note_use(found is not None)
        if found is not None and not self.links.place and not self.links.replica:
            log.info("%s", found)
