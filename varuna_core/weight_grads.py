"""Weight gradients put off: what an `I` action leaves for its `W`.

The backward of a linear layer is two products, one for the gradient of its input and one for that
of its weight. In an `I` only the first is made, the second waits in a queue. Layers other than
`nn.Linear` make both in the `I`: correct, only with less to fill the bubbles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Work = Callable[[], None]


class WeightGrads:
    """The products that wait, while `putting_off`."""

    def __init__(self) -> None:
        self.putting_off = False
        self._waiting: list[Work] = []

    def add(self, work: Work) -> None:
        self._waiting.append(work)

    def take(self) -> list[Work]:
        """What has been put off since the last call."""
        taken, self._waiting = self._waiting, []
        return taken

    def install(self, model: nn.Module) -> None:
        """Let the linear layers of the model put off; those with a forward of their own do not."""
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                module.forward = _PuttingOff(module, self)  # type: ignore[method-assign]


class _PuttingOff:
    """The forward of one linear layer."""

    def __init__(self, module: nn.Linear, grads: WeightGrads) -> None:
        self.module, self.grads = module, grads

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        simple = torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad
        simple = simple and (bias is None or (bias.is_leaf and bias.requires_grad))
        if not simple or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, weight, bias, self.grads)  # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, grads: WeightGrads
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        # What is saved may come back as another tensor (saved_tensors_hooks): not the parameter.
        ctx.weight, ctx.bias, ctx.grads = weight, bias, grads
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        grad_input = grad @ weight if ctx.needs_input_grad[0] else None
        if ctx.grads.putting_off:
            ctx.grads.add(partial(_accumulate, grad, input, ctx.weight, ctx.bias))
            return grad_input, None, None, None
        return grad_input, *_multiply(grad, input, ctx.bias), None


def _multiply(grad: Tensor, input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    flat = grad.reshape(-1, grad.shape[-1])
    grad_weight = flat.t() @ input.reshape(-1, input.shape[-1])
    return grad_weight, None if bias is None else flat.sum(0)


@torch.no_grad()
def _accumulate(grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    grad_weight, grad_bias = _multiply(grad, input, bias)
    for parameter, made in ((weight, grad_weight), (bias, grad_bias)):
        if parameter is None or made is None:
            continue
        if parameter.grad is None:
            parameter.grad = made
        else:
            parameter.grad.add_(made)
