"""The process groups of a layout, and a rank's channels to its neighbours.

stage s ──activations──► stage s + 1      a group of two each way, a replica
stage s ◄──gradients──── stage s + 1
the stages of a replica (verdicts), the replicas of a stage (gradients), the stages of a replica
that share a weight
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from varuna_core.channel import BYE, POISON, Receiver, Sender
from varuna_core.failure import FailureBoard, close_group
from varuna_core.stage_map import StageMap

# A standing receive may wait through the user's longest pause; what has failed closes its groups.
NO_TIMEOUT = timedelta(days=365)
JOIN_TIMEOUT_S = 2.0

_numbers = itertools.count()


@dataclass(kw_only=True)
class Links:
    """All that ties a rank to the others; None where there is nobody."""

    stage_map: StageMap
    stage: int
    replica: int
    board: FailureBoard
    activations_in: Receiver | None = None
    gradients_in: Receiver | None = None
    activations_out: Sender | None = None
    gradients_out: Sender | None = None
    pipeline: Any = None
    replicas: Any = None
    sharing: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """By the stages that share weights."""

    closed: bool = False

    @property
    def name(self) -> str:
        return self.stage_map.name(self.stage_map.ranks[self.stage][self.replica])

    @property
    def senders(self) -> list[Sender]:
        return [s for s in (self.activations_out, self.gradients_out) if s is not None]

    @property
    def receivers(self) -> list[Receiver]:
        return [r for r in (self.activations_in, self.gradients_in) if r is not None]

    def hold(self, capacity: int) -> None:
        """Let so many messages a channel be sent and not yet taken."""
        for sender in self.senders:
            sender.capacity = capacity
        for receiver in self.receivers:
            receiver.hold(capacity)

    def flush(self) -> None:
        for sender in self.senders:
            sender.flush()

    def close(self) -> None:
        """Take leave of the neighbours; a step is no longer possible."""
        if self._say(BYE):
            for receiver in self.receivers:
                receiver.thread.join(JOIN_TIMEOUT_S)

    def abort(self) -> None:
        """Make everybody's wait for this rank end with an error."""
        if not self._say(POISON):
            return
        for receiver in self.receivers:
            receiver.discard()
        for group in (self.pipeline, self.replicas, *self.sharing.values()):
            if group is not None:
                close_group(group)
        self.pipeline = self.replicas = None
        self.sharing.clear()

    def _say(self, word: int) -> bool:
        if self.closed:
            return False
        self.closed = True
        for sender in self.senders:
            sender.close(word)
        return True


def connect(
    stage_map: StageMap,
    rank: int,
    sharing: Sequence[tuple[int, ...]],
    device: torch.device,
) -> Links:
    """Make the groups, the same on every rank and in the same order, and this rank's channels."""
    stage, replica = stage_map.find(rank)
    if stage_map.num_stages * stage_map.num_replicas == 1:
        return Links(stage_map=stage_map, stage=0, replica=0, board=FailureBoard(None, ""))
    store = dist.distributed_c10d._get_default_store()
    board = FailureBoard(store, f"varuna/{next(_numbers)}/failure")
    links = Links(stage_map=stage_map, stage=stage, replica=replica, board=board)

    def make(ranks: Sequence[int], timeout: timedelta | None = None) -> Any:
        group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        return group if rank in ranks else None

    for r in range(stage_map.num_replicas):
        ranks = [stage_map.ranks[s][r] for s in range(stage_map.num_stages)]
        for first, second in itertools.pairwise(ranks):
            forward, backward = (make((first, second), NO_TIMEOUT) for _ in range(2))
            if rank == first:
                links.activations_out = Sender(forward, second)
                links.gradients_in = Receiver(backward, second, device, links.activations_out)
            if rank == second:
                links.gradients_out = Sender(backward, first)
                links.activations_in = Receiver(forward, first, device, links.gradients_out)
        if len(ranks) > 1:
            links.pipeline = make(ranks) or links.pipeline
        for stages in sharing:
            group = make([ranks[s] for s in stages])
            if group is not None:
                links.sharing[stages] = group
    if stage_map.num_replicas > 1:
        for ranks_of_stage in stage_map.ranks:
            links.replicas = make(ranks_of_stage) or links.replicas
    return links
