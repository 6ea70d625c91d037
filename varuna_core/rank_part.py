"""What one rank holds: its stages, and a weight that several of them use as one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from varuna_core.split import Split
from varuna_core.stage import Stage


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
    ) -> RankPart:
        held: dict[str, nn.Parameter] = {}
        stages = []
        for index in indices:
            stage = split.make_stage(index, state_dict=state_dict, seed=seed, at_hand=held)
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
