"""Varuna's arguments, checked and resolved once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from varuna_core.facts.partition import Partition
from varuna_core.records.logs.trace import ActionTrace
from varuna_core.runtime.optim.precision import Precision
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import AUTO, SCHEDULES


@dataclass(frozen=True, kw_only=True)
class VarunaSettings:
    """Options of a training; docs/training.md says what each means to a user."""

    batch_size: int
    """Samples of all replicas in a step."""

    chunk_size: int
    """Samples of a micro-batch."""

    device: torch.device
    may_share: bool
    """Other ranks may have the same GPU."""

    precision: Precision
    shared_weights: Sequence[Sequence[str]] | None
    """Names of parameters that are one, besides those that the model ties."""

    partition: Partition | None
    """Segments of each stage; None: balanced by their costs."""

    schedule: str
    stages_per_rank: int
    tensor: int
    """Ranks that share each layer."""

    tensor_plan: Mapping[str, Any] | None
    """How they share it; None: the model's own plan."""

    recompute: Recompute
    memory_limit: float | None
    """With recompute "auto": bytes that a rank's micro-batches may hold; None: a GPU is asked."""

    opportunistic: bool
    """Forwards may be run before their turn."""

    costs: Costs | None
    """Of each stage, as profiled; None: the dry run's count."""

    zero: int
    compile: bool | str
    """Let torch.compile take modules of the stages; the name of a backend of torch's."""

    cuda_graphs: bool
    """Record forwards and backwards as CUDA graphs (engine/cuda_graphs.py)."""

    offload: str | None
    seed: int
    state_dict: Mapping[str, Tensor] | None
    """Weights to start from."""

    hang_timeout_s: float | None
    """How long a rank waits for another one; None: for ever."""

    trace: ActionTrace | None

    def __post_init__(self) -> None:
        check_memory_limit(self.recompute, self.memory_limit, self.device)
        if self.recompute == "selective" and self.compile:
            raise ValueError(
                "recompute='selective' does not see the operations of compiled modules: "
                "leave compile out, or say 'full'"
            )


def refuse_unknown(
    schedule: str,
    recompute: str,
    batch_size: int,
    chunk_size: int,
) -> None:
    known = (AUTO, *SCHEDULES)
    if schedule not in known:
        raise ValueError(f"schedule {schedule!r}: there are {', '.join(known)}")
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute {recompute!r}: there are {', '.join(get_args(Recompute))}")
    if recompute == "offload" and schedule != AUTO and SCHEDULES[schedule].recomputes:
        raise ValueError(
            f"schedule {schedule!r} recomputes: recompute='offload' goes with another one"
        )
    if batch_size < 1 or chunk_size < 1:
        raise ValueError(f"batch_size {batch_size} and chunk_size {chunk_size} must be 1 or more")


def check_memory_limit(recompute: str, memory_limit: float | None, device: torch.device) -> None:
    if memory_limit is not None and recompute != "auto":
        raise ValueError("memory_limit goes with recompute='auto'")
    if memory_limit is None and recompute == "auto" and device.type != "cuda":
        raise ValueError(
            "recompute='auto' asks a GPU for its memory; here say memory_limit=, the bytes that "
            "the micro-batches of a rank may hold at once"
        )


def why_no_auto(device: torch.device, zero: int) -> str:
    """Why the conf's `recompute: auto` is none here; empty where it can be had."""
    if device.type != "cuda":
        return "only a GPU's memory is measured"
    if zero == 3:
        return "with zero 3 weights and graphs cannot be measured apart"
    return ""


def refuse_zero(zero: int, offload: str | None, recompute: str, tensor: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r}: there are 0, 1, 2 and 3")
    if zero == 3 and recompute == "auto":
        raise ValueError(
            "recompute='auto' takes the weights that zero=3 gathers for activations: "
            "say 'none' or 'full'"
        )
    if zero == 3 and recompute == "offload":
        raise ValueError(
            "recompute='offload' takes the weights that zero=3 gathers for activations: "
            "say 'none' or 'full'"
        )
    if zero == 3 and tensor > 1:
        raise ValueError(
            "zero=3 slices whole weights, not shares of layers: use 1 or 2 with tensor"
        )
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload {offload!r}: there is 'optimizer', or None")
