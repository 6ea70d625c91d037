"""Define Varuna's options as the user passes them, and its arguments once they are resolved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from varuna_core.facts.partition import Partition
from varuna_core.records.logs.trace import ActionTrace
from varuna_core.runtime.arguments import FROM_CONF, FromConf
from varuna_core.runtime.optim.precision import Precision
from varuna_core.schedule.costs import Costs
from varuna_core.schedule.recompute import Recompute
from varuna_core.schedule.registry import AUTO, SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for layout, schedule and memory: `Varuna(..., options=Options(zero=1))`.

    FROM_CONF means the conf's value in a run of vjob, and the documented default elsewhere.
    """

    partition: str | Sequence[int] | Partition | FromConf | None = FROM_CONF
    """Number of segments in each stage. N CutPoints give N + 1 segments: the numbers sum to N + 1,
    or to N - 1 without the first and the last segment. With a cut before each of 4 layers, both
    `"2-3"` and `"1-2"` put the second cut between the stages. With several stages per rank,
    list all stages in pipeline order. Default: balanced by costs estimated in the dry run."""

    schedule: str | FromConf = FROM_CONF
    """`gpipe`, `1f1b`, `varuna`, `zero_bubble`, `interleaved`, `zbv`, or `auto`, the default: the
    fastest in simulation, updated with times measured in training (schedule_design.md)."""

    stages_per_rank: int | FromConf = FROM_CONF
    """Number of stages on each rank, for `interleaved` and `auto`; `zbv` has 2. Default: 1."""

    tensor: int | FromConf = FROM_CONF
    """Tensor-parallel degree (tensor_parallel.md): entry k of the stage map then stands for
    `tensor` ranks, from rank k x tensor on. Default: 1."""

    tensor_plan: Mapping[str, Any] | None = None
    """Modules to shard, and their styles. Default: the model's own `tensor_parallel_plan`."""

    recompute: Recompute | FromConf = FROM_CONF
    """Recompute mode of activations: `none` (the default), `full`, `auto`, `selective` or `offload`
    (activations.md)."""

    memory_limit: float | None = None
    """Bytes that a rank's micro-batches may hold at once, with `recompute="auto"`. Default: read
    from the GPU."""

    zero: int | FromConf = FROM_CONF
    """ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights, across replicas
    (zero.md). Default: 0, none."""

    offload: str | FromConf | None = FROM_CONF
    """`"optimizer"` keeps fp32 weights and optimizer state in host memory and steps there."""

    keep_fp32: Sequence[str] = ()
    """Names of inputs and of modules (`"blocks.*.norm"`) that stay in fp32 in half precision,
    including all submodules."""

    compile: bool | str = False
    """Apply torch.compile to the largest modules between two cuts; a string selects the
    backend."""

    cuda_graphs: bool = False
    """Record each stage's forwards and backwards as CUDA graphs."""

    seed: int | FromConf = FROM_CONF
    """Seed of dropout (derived from step, sample and segment, so equal in any layout) and of the
    weights of a model on the meta device. Default: 1234."""

    state_dict: Mapping[str, Tensor] | None = None
    """Initial weights: any mapping from names to tensors, or `open_weights("folder/")`."""

    hang_timeout_s: float | None = None
    """Seconds that a rank waits for another one in a step before the run fails. Default: no
    limit."""

    opportunistic: bool = True
    """Run forwards early while a gradient is late; False makes `varuna` follow its schedule
    strictly and `auto` keep its first schedule."""

    costs: Costs | FromConf | None = FROM_CONF
    """Profiled times of actions and messages, used to build schedules; equal on all ranks.
    Default: the times in the plan of the conf's partition, else estimates of the dry run."""

    trace: ActionTrace | FromConf | None = FROM_CONF
    """Function called after each action with `("0F3", begin, ready, end)` in seconds. Default: in
    a run of vjob, the trace that `vjob report` draws."""


DEPRECATED = dict.fromkeys((field.name for field in fields(Options)), "2026-11-28")
"""Keyword arguments that Varuna itself took until this date, and accepts for one year after it."""


def take_deprecated(options: Options, keywords: Mapping[str, Any]) -> Options:
    """Add options passed to Varuna itself, with one warning; raise an error for unknown ones."""
    for word in keywords:
        if word not in DEPRECATED:
            known = ", ".join(DEPRECATED)
            raise TypeError(
                f"Varuna() has no argument {word!r}: help(Varuna) lists its arguments, and "
                f"options=Options(...) takes {known}"
            )
    if keywords:
        shown = ", ".join(f"{word}=..." for word in keywords)
        since = max(DEPRECATED[word] for word in keywords)
        warnings.warn(
            f"Varuna({shown}) is deprecated since {since}: write options=Options({shown})",
            DeprecationWarning,
            stacklevel=3,
        )
    return replace(options, **keywords)


@dataclass(frozen=True, kw_only=True)
class VarunaSettings(Options):
    """All arguments of a training, validated, with values of the conf filled in."""

    batch_size: int
    """Number of samples in a step, over all replicas."""

    chunk_size: int
    """Number of samples in a micro-batch."""

    device: torch.device
    may_share: bool
    """True if other ranks may use the same GPU."""

    precision: Precision
    shared_weights: Sequence[Sequence[str]] | None
    """Groups of names of one parameter, in addition to the model's own tied weights."""

    partition: Partition | None
    schedule: str
    stages_per_rank: int
    tensor: int
    recompute: Recompute
    costs: Costs | None
    zero: int
    offload: str | None
    seed: int
    trace: ActionTrace | None

    def __post_init__(self) -> None:
        check_memory_limit(self.recompute, self.memory_limit, self.device)
        if self.recompute == "selective" and self.compile:
            raise ValueError(
                "recompute='selective' does not see the operations of compiled modules: "
                "omit compile, or use 'full'"
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
            f"schedule {schedule!r} recomputes, so recompute='offload' is not supported: "
            "choose another schedule"
        )
    if batch_size < 1 or chunk_size < 1:
        raise ValueError(f"batch_size {batch_size} and chunk_size {chunk_size} must be 1 or more")


def check_memory_limit(recompute: str, memory_limit: float | None, device: torch.device) -> None:
    if memory_limit is not None and recompute != "auto":
        raise ValueError("memory_limit is only used with recompute='auto'")
    if memory_limit is None and recompute == "auto" and device.type != "cuda":
        raise ValueError(
            "recompute='auto' needs to know the memory of a GPU, and there is none: set "
            "memory_limit=, the bytes that a rank's micro-batches may hold at once"
        )


def why_no_auto(device: torch.device, zero: int) -> str:
    """Return why a conf's `recompute: auto` is unsupported here; empty if it is supported."""
    if device.type != "cuda":
        return "memory is only measured on a GPU"
    if zero == 3:
        return "with zero 3, weights and graphs cannot be measured separately"
    return ""


def refuse_zero(zero: int, offload: str | None, recompute: str, tensor: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r}: expected 0, 1, 2 or 3")
    if zero == 3 and recompute == "auto":
        raise ValueError(
            "recompute='auto' would count the weights that zero=3 gathers as activations: set "
            "'none' or 'full'"
        )
    if zero == 3 and recompute == "offload":
        raise ValueError(
            "recompute='offload' would treat the weights that zero=3 gathers as activations: set "
            "'none' or 'full'"
        )
    if zero == 3 and tensor > 1:
        raise ValueError("zero=3 does not support sharded layers: use 1 or 2 with tensor")
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload {offload!r}: expected 'optimizer' or None")
