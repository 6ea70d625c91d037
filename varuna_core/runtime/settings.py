"""What Varuna's arguments mean: what this version refuses, the device, what stages cost."""

from __future__ import annotations

import torch

from varuna_core.runtime.split.split import Split
from varuna_core.schedule.costs import Costs

SCHEDULES = ("auto", "gpipe", "1f1b", "varuna", "zero_bubble", "interleaved", "zbv")


def choose_costs(split: Split, given: Costs | None) -> Costs:
    """Of each stage: as given, or from the dry run's count; then a backward takes two forwards and
    a message nothing."""
    if given is not None:
        if given.num_stages != len(split.stages):
            raise ValueError(f"costs of {given.num_stages} stages, there are {len(split.stages)}")
        return given
    unit = max(sum(split.costs), 1e-30)
    each = tuple(sum(split.costs[s] for s in held) / unit for held in split.stages)
    return Costs(forward=each, input_grad=each, weight_grad=each)


def find_device(device: int | str | torch.device, local_rank: int) -> torch.device:
    """As the ancestor: an index, -1 for the local rank's; or a name such as "cpu"."""
    if not isinstance(device, int):
        return torch.device(device)
    index = device if device >= 0 else local_rank
    if not torch.cuda.is_available():
        if index >= 0:
            raise ValueError(f'device {index}: there is no GPU here; say device="cpu"')
        return torch.device("cpu")
    return torch.device("cuda", max(index, 0))


def refuse_unknown(
    schedule: str,
    recompute: str,
    batch_size: int,
    chunk_size: int,
) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r}: there are {', '.join(SCHEDULES)}")
    if recompute not in ("none", "full", "auto"):
        raise ValueError(f"recompute {recompute!r}: there are 'none', 'full' and 'auto'")
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


def refuse_zero(zero: int, offload: str | None, recompute: str, tensor: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero {zero!r}: there are 0, 1, 2 and 3")
    if zero == 3 and recompute == "auto":
        raise ValueError(
            "recompute='auto' takes the weights that zero=3 gathers for activations: "
            "say 'none' or 'full'"
        )
    if zero == 3 and tensor > 1:
        raise ValueError(
            "zero=3 slices whole weights, not shares of layers: use 1 or 2 with tensor"
        )
    if offload not in (None, "optimizer"):
        raise ValueError(f"offload {offload!r}: there is 'optimizer', or None")
