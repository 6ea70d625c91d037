"""Memory of a parameter and messages of a step, for our engine or another program."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.schedule.recompute import Recompute

RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "auto", "selective", "offload")
"""From the simplest on."""


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """The defaults are this project's engine in half precision with Adam."""

    batch: int
    """Samples of one step, of all replicas."""
    weight_bytes: float = 2
    gradient_bytes: float = 4
    """Held for a parameter."""
    state_bytes: float = 12
    """Master and two moments of a parameter."""
    reduced_bytes: float = 4
    """Summed over the replicas for a parameter."""
    overlap_sends: bool = True
    """False: a rank that sends waits until the message has arrived."""
    overlap_reduction: bool = True
    """Buckets are summed as they fill; False: after the pipeline."""
    deals_whole: bool = True
    """ZeRO 1 and 2 deal out whole parameters, not slices of each."""
    split_messages: bool = False
    """Each of the ranks that share layers sends its part of an activation, instead of all of it."""
    framework_bytes: float = 1.5 * 2**30
    """Of a GPU's memory: context, kernels, communication buffers."""
    memory_share: float = 0.95
    """Of a GPU's memory that may be used: the allocator's holes need the rest."""
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    """The ways of recompute that a search may choose."""
    may_have_several_stages: bool = True
    """Ranks may have several stages each without a conf that asks for it."""
    data_s: float = 0.0
    """What a step waits for its samples."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanningError(f"batch is {self.batch}: expected 1 or more")
        if not 0 < self.memory_share <= 1:
            raise PlanningError(f"memory_share is {self.memory_share}: expected 0 to 1")

    def count_micro_batches(self, replicas: int, micro_batch: int) -> int:
        """Micro-batches of each replica; 0 where they do not divide the batch."""
        share = replicas * micro_batch
        return 0 if self.batch % share else self.batch // share

    def count_fixed_bytes(self, zero: int, replicas: int) -> float:
        """Bytes of a parameter on each GPU that holds it, but for what ZeRO 3 gathers."""
        whole = self.weight_bytes + self.gradient_bytes
        if not zero or replicas == 1:
            return whole + self.state_bytes
        if zero == 3:
            return (whole + self.state_bytes) / replicas
        # 2: a micro-batch's gradients, and those of all before that are this replica's.
        kept = self.state_bytes + (self.gradient_bytes if zero == 2 else 0.0)
        return whole + kept / replicas

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter while ZeRO 3 has all of its module: weights and gradients."""
        return self.weight_bytes + self.gradient_bytes


MEGATRON = TrainingModel(
    batch=1,
    gradient_bytes=2,
    state_bytes=12,
    reduced_bytes=2,
    overlap_sends=False,
    overlap_reduction=False,
    deals_whole=False,
    split_messages=True,
    recomputes=("none", "full"),
    may_have_several_stages=False,
)
"""Megatron-LM of 2023 in fp16 with its local data parallel: sums and sends wait."""
