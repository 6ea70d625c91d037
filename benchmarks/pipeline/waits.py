"""A model whose work is waiting: eight stages then need no eight cores.

Forward, input gradient and weight gradient of a layer are a timed wait each. The last one can be
put off: ours gives it to `WeightGrads`, torch runs a layer's backward twice, for one gradient each.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna_core import CutPoint
from varuna_core.runtime.engine.weight_grads import WeightGrads

UNIT = 2**14
"""Elements of a weight for a wait of `UNIT_S`: stages are balanced by counted work, so what is
counted is made to follow what is waited."""
UNIT_S = 0.02


class Jitter:
    """Factors on the waits: the same in each step, for each job."""

    def __init__(self) -> None:
        self.share = 0.0
        """Waits lie within so much of their length, either way."""
        self.factor = 1.0
        """Factor on this process's waits: another kind of node."""
        self._calls: dict[tuple[int, str], int] = {}

    def begin_step(self) -> None:
        self._calls.clear()

    def wait(self, stage: int, kind: str, seconds: float) -> None:
        if self.share:
            call = self._calls[stage, kind] = self._calls.get((stage, kind), 0) + 1
            seconds *= 1 + self.share * random.Random(f"{stage} {kind} {call}").uniform(-1, 1)
        time.sleep(seconds * self.factor)


jitter = Jitter()


class Waiting(nn.Module):
    """A layer that takes `seconds` for each of its three parts."""

    def __init__(self, stage: int, seconds: float, recomputed: bool = False) -> None:
        super().__init__()
        self.stage, self.seconds, self.recomputed = stage, seconds, recomputed
        self.grads: WeightGrads | None = None
        self.weight = nn.Parameter(torch.ones(round(UNIT * seconds / UNIT_S)))

    def put_off_to(self, grads: WeightGrads) -> None:
        self.grads = grads

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed:
            out: Tensor = checkpoint(self.run, x, use_reentrant=False)
            return out
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        out: Tensor = _Parts.apply(x, self.weight, self)
        return out

    def wait(self, kind: str) -> None:
        jitter.wait(self.stage, kind, self.seconds)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Waiting) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        layer.wait("F")
        weight.sum()  # counted
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,), layer = ctx.saved_tensors, ctx.layer
        input_wanted, weight_wanted, _ = ctx.needs_input_grad  # of this run of the graph
        if input_wanted or layer.stage == 0:
            layer.wait("I")
        if not weight_wanted:
            return grad, None, None
        if layer.grads is not None and layer.grads.puts_off:
            layer.grads.add(partial(_finish, layer), [layer.weight])
            return grad, None, None
        layer.wait("W")
        return grad, torch.ones_like(weight), None


@torch.no_grad()
def _finish(layer: Waiting) -> None:
    layer.wait("W")
    if layer.weight.grad is None:
        layer.weight.grad = torch.ones_like(layer.weight)
    else:
        layer.weight.grad.add_(1.0)


class WaitingModel(nn.Module):
    """A layer a stage; what crosses is the input."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Waiting(stage, each) for stage, each in enumerate(seconds))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(len(seconds) + 1))

    def forward(self, x: Tensor) -> Tensor:
        for block, cut in zip(self.blocks, self.cuts, strict=False):
            x = block(cut(x))
        return compute_loss(self.cuts[-1](x))


def compute_loss(x: Tensor, target: Tensor | None = None) -> Tensor:
    return x[:, :1].mean()
