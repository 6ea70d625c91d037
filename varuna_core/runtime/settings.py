"""Define Varuna's options as a user gives them, and its arguments once they are resolved."""

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
    """How a training is cut, scheduled and kept in memory: `Varuna(..., options=Options(zero=1))`.

    FROM_CONF is the conf's value in a run of vjob; elsewhere it is the default that is named.
    """

    partition: str | Sequence[int] | Partition | FromConf | None = FROM_CONF
    """Pieces of the model for each stage. N CutPoints make N + 1 pieces: the numbers sum to N + 1,
    or to N - 1 without the first and the last piece. With a cut before each of 4 layers, both
    `"2-3"` and `"1-2"` put the second cut between the stages. With several stages a rank it has a
    number for each, in the order of the pipeline. Default: balanced by the costs that the dry run
    counts."""

    schedule: str | FromConf = FROM_CONF
    """`gpipe`, `1f1b`, `varuna`, `zero_bubble`, `interleaved`, `zbv`, or `auto`, the default: the
    shortest as simulated, chosen again by times measured in training (schedule_design.md)."""

    stages_per_rank: int | FromConf = FROM_CONF
    """Stages of each rank, with `interleaved` and `auto`; `zbv` has 2. Default: 1."""

    tensor: int | FromConf = FROM_CONF
    """Ranks that share each layer (tensor_parallel.md): entry k of the stage map then stands for
    the ranks from k x tensor on. Default: 1."""

    tensor_plan: Mapping[str, Any] | None = None
    """Modules that are shared, and how. Default: the model's own `tensor_parallel_plan`."""

    recompute: Recompute | FromConf = FROM_CONF
    """What is kept of activations: `none` (the default), `full`, `auto`, `selective` or `offload`
    (activations.md)."""

    memory_limit: float | None = None
    """Bytes that a rank's micro-batches may hold at once, with `recompute="auto"`. Default: the
    GPU is asked."""

    zero: int | FromConf = FROM_CONF
    """What replicas share: 1 the optimizer's state, 2 gradients too, 3 weights too (zero.md).
    Default: 0, nothing."""

    offload: str | FromConf | None = FROM_CONF
    """`"optimizer"`: fp32 weights and the optimizer's state in host memory, and its step there."""

    keep_fp32: Sequence[str] = ()
    """Names of inputs and of modules (`"blocks.*.norm"`) that stay in fp32 in half precision, with
    all that they contain."""

    compile: bool | str = False
    """Let torch.compile take the largest modules between two cuts; the name of a backend of
    torch's."""

    cuda_graphs: bool = False
    """Record each stage's forwards and backwards as CUDA graphs."""

    seed: int | FromConf = FROM_CONF
    """Seed of dropout, drawn by step, sample and segment and so the same in any layout, and of the
    weights of a model on the meta device. Default: 1234."""

    state_dict: Mapping[str, Tensor] | None = None
    """Weights to start from: any mapping of names, or `open_weights("folder/")`."""

    hang_timeout_s: float | None = None
    """Seconds that a rank waits for another one in a step before the run ends. Default: for
    ever."""

    opportunistic: bool = True
    """Run forwards before their turn while a gradient is late; False keeps `varuna` to its list
    and `auto` to its first order."""

    costs: Costs | FromConf | None = FROM_CONF
    """Profiled times of actions and messages, which schedules are made for; the same on all ranks.
    Default: what the plan of the conf's partition knows, else the dry run's count."""

    trace: ActionTrace | FromConf | None = FROM_CONF
    """A function called after each action: `("0F3", begin, ready, end)` in seconds. Default: the
    trace that `vjob report` draws, in a run of vjob."""


DEPRECATED = dict.fromkeys((field.name for field in fields(Options)), "2026-11-28")
"""Keywords that Varuna itself took until this date, and accepts for a year after it."""


def take_deprecated(options: Options, keywords: Mapping[str, Any]) -> Options:
    """Add options given to Varuna itself, with one warning; refuse unknown keywords."""
    for word in keywords:
        if word not in DEPRECATED:
            known = ", ".join(DEPRECATED)
            raise TypeError(
                f"Varuna() has no argument {word!r}. Besides its own arguments, which "
                f"help(Varuna) lists, there are options=Options(...) of {known}"
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
    """All arguments of a training, checked and resolved once, with nothing left to the conf."""

    batch_size: int
    """Samples in a step, over all replicas."""

    chunk_size: int
    """Samples in a micro-batch."""

    device: torch.device
    may_share: bool
    """True if other ranks may use the same GPU."""

    precision: Precision
    shared_weights: Sequence[Sequence[str]] | None
    """Groups of names for one parameter, besides those that the model ties."""

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
    """Return why a conf's `recompute: auto` is not possible here; empty if it is."""
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
