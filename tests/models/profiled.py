"""Models whose profile is known beforehand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from varuna_core.runtime.split.cut import CutPoint

WIDTH, MIDDLE, NUM_BLOCKS = 8, 16, 5
SCRATCH = 1 << 18
"""Elements that the last segment needs while it runs, and only then."""

Inputs = dict[str, Tensor]


def make_batch(size: int) -> Inputs:
    return {"x": torch.ones(size, WIDTH)}


def is_real(x: Tensor) -> bool:
    """Not a dry run's."""
    return not isinstance(x, FakeTensor) and not x.is_meta


class Ladder(nn.Module):
    """Three linear layers, a segment each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, MIDDLE)
        self.third = nn.Linear(MIDDLE, 1)
        self.cuts = nn.ModuleList([CutPoint(), CutPoint()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.cuts[1](self.second(self.cuts[0](self.first(x))))
        scratch = torch.zeros(SCRATCH, device=x.device)
        nothing = scratch.sum() * 0
        del scratch
        return self.third(x).mean() + nothing


class Rung(nn.Module):
    """A block that says when it is run, and for how many samples."""

    def __init__(self, number: int, runs: list[tuple[int, int]], limit: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.limit = number, limit
        self.tell = runs.append

    def forward(self, x: Tensor) -> Tensor:
        if is_real(x):
            self.tell((self.number, len(x)))
            if len(x) > self.limit:
                raise torch.OutOfMemoryError(f"{len(x)} samples")
        return self.linear(x).relu()


class Stack(nn.Module):
    """Equal blocks, all of them cut apart; `limit` is how many samples fit into one of them."""

    def __init__(self, limit: int = 1000, where: int = 2) -> None:
        super().__init__()
        self.runs: list[tuple[int, int]] = []
        self.blocks = nn.ModuleList(
            [Rung(n, self.runs, limit if n == where else 1000) for n in range(NUM_BLOCKS)]
        )
        self.cuts: Any = nn.ModuleList([CutPoint() for _ in range(NUM_BLOCKS - 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for cut, block in zip(self.cuts, self.blocks[1:], strict=True):
            x = block(cut(x))
        return x.mean()
