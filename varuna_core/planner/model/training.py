"""Describe a training for the planner: bytes of a parameter and messages, for any engine."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_core.planner.profile.errors import PlanningError
from varuna_core.schedule.recompute import Recompute

RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "auto", "selective", "offload")
"""The recompute modes, simplest first."""


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """How a program trains. The defaults are this project's engine in half precision with Adam."""

    batch: int
    """Samples in one step, over all replicas."""
    weight_bytes: float = 2
    gradient_bytes: float = 4
    """Bytes held for a parameter's gradient."""
    state_bytes: float = 12
    """Bytes of a parameter's master copy and two moments."""
    reduced_bytes: float = 4
    """Bytes summed over the replicas for a parameter."""
    overlap_sends: bool = True
    """If False, a rank that sends waits until the message has arrived."""
    overlap_reduction: bool = True
    """If True, buckets are summed as they fill; if False, after the pipeline."""
    deals_whole: bool = True
    """True if ZeRO 1 and 2 assign whole parameters to ranks, not slices of each."""
    split_messages: bool = False
    """True if ranks that share layers each send a part of an activation, not all of it."""
    framework_bytes: float = 1.5 * 2**30
    """Bytes of GPU memory for context, kernels and communication buffers."""
    memory_share: float = 0.95
    """The usable share of GPU memory; the allocator's fragmentation takes the rest."""
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    """The recompute modes that a search may choose."""
    may_have_several_stages: bool = True
    """True if a plan may use several stages on a rank although the conf does not ask for it."""
    data_s: float = 0.0
    """Seconds that a step waits for its samples."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanningError(f"batch is {self.batch}: expected 1 or more")
        if not 0 < self.memory_share <= 1:
            raise PlanningError(f"memory_share is {self.memory_share}: expected 0 to 1")

    def count_micro_batches(self, replicas: int, micro_batch: int) -> int:
        """Return the micro-batches of each replica; 0 if the batch cannot be divided so."""
        share = replicas * micro_batch
        return 0 if self.batch % share else self.batch // share

    def count_fixed_bytes(self, zero: int, replicas: int) -> float:
        """Return a parameter's bytes on each GPU that holds it, except what ZeRO 3 gathers."""
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
        """Bytes of a parameter while ZeRO 3 has gathered its module: weights and gradients."""
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
"""Megatron-LM of 2023 in fp16, whose local data parallelism waits for all-reduces and sends."""
