"""What one rank holds: its stages, and a weight that several of them use as one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varuna_core.records.stage_map import StageMap
from varuna_core.runtime.comm.links import connect_sharing
from varuna_core.runtime.split.split import Split
from varuna_core.runtime.split.stage import Stage

if TYPE_CHECKING:
    from varuna_core.runtime.tensor_parallel.sharding import Sharding


class RankPart:
    """The stages of one rank, in the order of the pipeline."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)

    @staticmethod
    def make(
        split: Split,
        indices: Sequence[int],
        state_dict: Mapping[str, Tensor] | None,
        seed: int | None,
        sharding: Sharding | None = None,
    ) -> RankPart:
        held: dict[str, nn.Parameter] = {}
        stages = []
        for index in indices:
            stage = split.make_stage(
                index, state_dict=state_dict, seed=seed, at_hand=held, sharding=sharding
            )
            held |= stage.parameters()
            stages.append(stage)
        return RankPart(stages)

    def parameters(self) -> dict[str, nn.Parameter]:
        """By the plain model's names; a tied one under each of its names."""
        return {n: p for stage in self.stages for n, p in stage.parameters().items()}

    def take_full(self) -> dict[str, Tensor]:
        """fp32 values of the parameters that are in half precision; once, they are large."""
        full: dict[str, Tensor] = {}
        for stage in self.stages:
            full, stage.full = full | stage.full, {}
        return full

    def buffers(self) -> dict[str, Tensor]:
        """Those that the stages answer for, as they are now."""
        return {n: b for stage in self.stages for n, b in stage.buffers().items()}

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.train(mode)


def share_layers(
    split: Split,
    plan: Mapping[str, Any] | None,
    stage_map: StageMap,
    rank: int,
    device: torch.device,
    hang_timeout_s: float | None,
) -> Sharding | None:
    """How T ranks share the layers of a place; None where each has its own."""
    if stage_map.tensor == 1:
        return None
    from varuna_core.runtime.tensor_parallel.sharding import (
        Sharding,  # torch's part of it takes half a second to load
    )

    group = connect_sharing(stage_map, rank, device, hang_timeout_s)
    return Sharding(split, plan, group, device)
