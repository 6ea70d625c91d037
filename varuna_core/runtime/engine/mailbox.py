"""Exchange messages between stages: by channels between ranks, in memory within a rank.

```
        rank 0                  rank 1
stage 0 ──► stage 1      ┌────► stage 2      one channel between ranks per direction
      memory   └─────────┘
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from varuna_core.runtime.comm.channel import ReceivingEnd, SendingEnd
from varuna_core.runtime.comm.links import Links
from varuna_core.runtime.comm.meeting import refuse_batches
from varuna_core.runtime.comm.values import Crossing
from varuna_core.runtime.engine.adapting import ActionTimes, Message
from varuna_core.runtime.split.stage import Stage
from varuna_core.schedule.actions import FORWARDS, Action
from varuna_core.schedule.order import run_ahead

NOTHING: Message = (True, -1, -1)


@dataclass(frozen=True, kw_only=True)
class StageChannels:
    """Channels of one stage; None at the ends of the pipeline, and between stages of one rank."""

    activations_in: ReceivingEnd | None
    gradients_in: ReceivingEnd | None
    activations_out: SendingEnd | None
    gradients_out: SendingEnd | None


def connect_stage(index: int, links: Links) -> StageChannels:
    """Return the channels to the ranks that hold the previous and the next stage."""
    placement = links.stage_map.placement
    before = placement[index - 1] if index else None
    after = placement[index + 1] if index + 1 < len(placement) else None
    return StageChannels(
        activations_in=links.activations_in.get(before) if before is not None else None,
        gradients_out=links.gradients_out.get(before) if before is not None else None,
        activations_out=links.activations_out.get(after) if after is not None else None,
        gradients_in=links.gradients_in.get(after) if after is not None else None,
    )


class Mailbox:
    """Messages to and from the stages of one rank in a step."""

    def __init__(self, stages: Sequence[Stage], links: Links, now: Callable[[], float]) -> None:
        """`now` returns the time at which a message that was just taken became available."""
        self.links, self._now = links, now
        self._channels = {stage.index: connect_stage(stage.index, links) for stage in stages}
        self._in_memory: dict[Message, Crossing] = {}
        self._times: ActionTimes | None = None
        self.ready_s = 0.0
        """Time at which the running action got its message; set by the engine at its start."""

    def begin_step(self, times: ActionTimes | None) -> None:
        """Discard messages of a failed step; `times` records when messages arrive and leave."""
        self._in_memory.clear()
        self._times = times

    def exchange_nothing(self) -> None:
        """Tell neighbouring ranks that this batch has no samples, and check that theirs has none,
        since they would wait for messages that never arrive."""
        links = self.links
        for sender in (*links.activations_out.values(), *links.gradients_out.values()):
            sender.send(())
        for receiver in (*links.activations_in.values(), *links.gradients_in.values()):
            self._take(receiver, NOTHING)

    def order(self, actions: Sequence[Action], ahead: int) -> Iterable[Action]:
        """Return this rank's actions of a step in the order in which to run them. With `ahead`, up
        to so many forwards run earlier than scheduled while the next action waits for a message."""
        if not ahead:
            return actions
        return run_ahead(actions, ahead, self._has_come, self._wait_for_either)

    def take_activation(self, stage: Stage, number: int) -> Crossing | None:
        """Take the activation that the stage receives; return None on the first stage."""
        if stage.is_first:
            return None
        channel = self._channels[stage.index].activations_in
        return self._take(channel, (True, stage.index, number))

    def take_gradients(self, stage: Stage, number: int) -> Sequence[Tensor | None]:
        """Take the gradients of the tensors that the stage has sent."""
        channel = self._channels[stage.index].gradients_in
        return self._take(channel, (False, stage.index, number)).tensors

    def send_activation(self, stage: Stage, number: int, output: Crossing) -> None:
        """Send the values that cross the cut after the stage."""
        channel = self._channels[stage.index].activations_out
        self._send(channel, (True, stage.index + 1, number), output)

    def send_gradients(self, stage: Stage, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of the tensors that the stage has received."""
        channel = self._channels[stage.index].gradients_out
        crossing = Crossing(tuple(gradients), None)  # type: ignore[arg-type]
        self._send(channel, (False, stage.index - 1, number), crossing)

    def _take(self, channel: ReceivingEnd | None, message: Message) -> Crossing:
        if channel is None:
            return self._in_memory.pop(message)
        received = channel.take()
        mine = self.links.arrivals.batch
        if channel.batch != mine:
            refuse_batches({channel.peer: channel.batch, dist.get_rank(): mine})
        self.ready_s = self._now()
        if self._times is not None:
            self._times.has_come(message, channel.came_s)
        return received

    def _send(self, channel: SendingEnd | None, message: Message, crossing: Crossing) -> None:
        if channel is not None:
            if self._times is not None:
                self._times.has_left(message, time.perf_counter())
            channel.send(crossing.tensors, crossing.structure)
            return
        # Tensors of their own, on the same memory: the next stage collects gradients in them.
        detached = tuple(None if t is None else t.detach() for t in crossing.tensors)
        self._in_memory[message] = crossing._replace(tensors=detached)

    def _find_channel(self, action: Action) -> ReceivingEnd | None:
        channels = self._channels[action.stage]
        return channels.activations_in if action.kind in FORWARDS else channels.gradients_in

    def _has_come(self, action: Action) -> bool:
        channel = self._find_channel(action)
        return channel is None or channel.is_there()

    def _wait_for_either(self, *actions: Action) -> None:
        channels = map(self._find_channel, actions)
        self.links.arrivals.wait([channel for channel in channels if channel is not None])
