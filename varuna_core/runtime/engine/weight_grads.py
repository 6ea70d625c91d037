"""Compute weight gradients of linear layers: postponed, or added to `grad` within the product.

The backward of a linear layer has two products, one for the input's gradient and one for the
weight's. An `I` computes only the first; the second waits in a queue for the `W`. Layers other than
`nn.Linear` compute both in the `I`, which is correct but leaves less work to fill pipeline bubbles.

If the weight has a gradient already, the second product adds to it in the same kernel, which takes
an eighth less time than a product and a sum. A `B` does so only if `may_add`, since autograd's
hooks do not see such a gradient. In half precision, a GPU can also add to an existing fp32 sum in
one kernel. A forward may itself request gradients of activations; no weight gradient is computed
then.

torch's own backward is used for layers whose parameters have user hooks or complex numbers, and
inside torch.func transforms and forward-mode differentiation.

A module that can postpone its own products has a method `put_off_to(grads: WeightGrads)`, which is
called once. If `grads.puts_off` is true, the module's backward passes `grads.add` a function that
computes the rest, and the parameters to whose `grad` this function adds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna_core.runtime.comm.private_torch import Use, is_transformed, read_use

LARGE = 2**16
"""Minimum number of elements of a weight for which adding within the product saves time."""


WideSum = tuple[Tensor, float]
"""An fp32 sum of half-precision gradients, and the factor applied to each gradient."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PutOffProduct:
    """A postponed matrix product."""

    make: Callable[[], None]
    """Function that adds to the gradients of the product's parameters."""

    parameters: tuple[nn.Parameter, ...]
    done: Callable[[nn.Parameter], None]

    @torch.no_grad()
    def __call__(self) -> None:
        self.make()
        for parameter in self.parameters:
            self.done(parameter)


class WeightGrads:
    """Computes or postpones the weight gradients of one rank."""

    def __init__(
        self,
        on_made: Callable[[nn.Parameter], None] = lambda parameter: None,
        find_wide: Callable[[nn.Parameter], WideSum | None] = lambda parameter: None,
    ) -> None:
        """`on_made` is called with each parameter whose gradient a product computed, since
        autograd's hooks do not run. `find_wide` returns the fp32 sum to which a product may add."""
        self.on_made, self.find_wide = on_made, find_wide
        self.may_add = False
        """True if products may be added to gradients directly, since no hook needs to run."""

        self._products: list[PutOffProduct] | None = None

    @property
    def puts_off(self) -> bool:
        """True while products are collected instead of being computed."""
        return self._products is not None

    @contextmanager
    def collecting(self) -> Iterator[list[PutOffProduct]]:
        """Collect the products of the backward within the context, to be computed later."""
        products: list[PutOffProduct] = []
        self._products = products
        try:
            yield products
        finally:
            self._products = None

    def add(self, make: Callable[[], None], parameters: Sequence[nn.Parameter]) -> None:
        """Postpone `make`, which adds to the gradients of these parameters."""
        assert self._products is not None, "no products are being postponed"
        done = self.on_made
        self._products.append(PutOffProduct(make=make, parameters=tuple(parameters), done=done))

    def is_hooked(self, parameter: Tensor) -> bool:
        """Return True for a parameter with gradient hooks other than Varuna's."""
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        others = any(hook != self.on_made for hook in after.values())
        return others or bool(parameter._backward_hooks)

    def install(
        self,
        model: nn.Module,
        puts_off: bool = True,
        leaving: Collection[nn.Module] = (),
    ) -> None:
        """Replace the forwards of modules that can postpone gradients: all linear layers with
        torch's own forward or, if nothing will be postponed, the layers that become faster. Modules
        in `leaving` keep autograd's backward."""
        for module in model.modules():
            if module in leaving:
                continue
            put_off_to = getattr(module, "put_off_to", None)
            if callable(put_off_to):
                put_off_to(self)
            elif _is_linear(module) and "forward" not in module.__dict__:
                if not puts_off and module.weight.numel() < LARGE:
                    continue
                module.forward = _LinearForward(module, self)  # type: ignore[method-assign]


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True for an unsharded linear layer with torch's own forward, unless its weight is
    computed (parametrizations): each read may then change the weight."""
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    weight = module._parameters.get("weight")
    return plain and weight is not None and not hasattr(weight, "placements")


class _LinearForward:
    """Replacement for the forward of one linear layer."""

    def __init__(self, module: nn.Linear, grads: WeightGrads) -> None:
        self.module, self.grads = module, grads

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if not self._may_split(input, weight, bias):
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, weight, bias, self.grads)  # type: ignore[no-untyped-call]
        return out

    def _may_split(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return True if `_Linear` may split the products: real tensors and a single backward.
        torch's own backward handles all other cases."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
            return False
        if torch.is_autocast_enabled(input.device.type):
            return False
        if not (input.dtype == weight.dtype and weight.dtype.is_floating_point):
            return False
        if input.layout is not torch.strided or input.is_nested:
            return False
        return self._may_add_to(weight) and (bias is None or self._may_add_to(bias))

    def _may_add_to(self, parameter: Tensor) -> bool:
        is_trained = parameter.is_leaf and parameter.requires_grad
        return is_trained and not self.grads.is_hooked(parameter)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, grads: WeightGrads
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        # What is saved may come back as another tensor (saved_tensors_hooks): not the parameter.
        ctx.weight, ctx.bias, ctx.grads = weight, bias, grads
        out = F.linear(input, weight, bias)
        # A view made in here may not be changed in place, which torch's own output may (2.13).
        return torch.ops.aten._unsafe_view.default(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        grads, bias = ctx.grads, ctx.bias
        grad_input = _make_input_grad(grad, input, weight) if ctx.needs_input_grad[0] else None
        use = read_use(ctx.next_functions[1][0])
        if use is Use.NONE:
            return grad_input, None, None, None
        if use is Use.RETURNED:
            return grad_input, *_multiply(grad, input, bias), None
        weight = ctx.weight
        if grads.puts_off:
            held = (weight,) if bias is None else (weight, bias)
            grads.add(partial(_accumulate, grad, input, weight, bias, grads), held)
            return grad_input, None, None, None
        wide = grads.find_wide(weight)
        if wide is not None:  # autograd's hooks are called all the same
            return grad_input, None, _add_wide(wide, grad, input, bias), None
        if grads.may_add and _has_gradients(weight, bias):
            _accumulate(grad, input, weight, bias, grads)
            return grad_input, None, None, None
        return grad_input, *_multiply(grad, input, bias), None


def _make_input_grad(grad: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """Return the input's gradient in the input's memory order, as torch's product does: in half
    precision, another order may change the rounding of earlier layers."""
    flat = input.reshape(-1, input.shape[-1])
    rows = len(flat)
    if flat.stride() != (1, rows):
        return grad @ weight
    return (weight.t() @ grad.reshape(rows, -1).t()).t().view_as(input)


def _multiply(grad: Tensor, input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    flat = grad.reshape(-1, grad.shape[-1])
    grad_weight = flat.t() @ input.reshape(-1, input.shape[-1])
    return grad_weight, None if bias is None else flat.sum(0)


def _has_gradients(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.grad is not None and (bias is None or bias.grad is not None)


def add_product(wide: WideSum, grad: Tensor, input: Tensor) -> None:
    """Add a product of half-precision tensors to an fp32 sum in one kernel (CUDA only in torch)."""
    total, factor = wide
    flat = input.reshape(-1, input.shape[-1])
    torch.addmm(total, grad.t(), flat, out_dtype=total.dtype, alpha=factor, out=total)


def _add_wide(wide: WideSum, grad: Tensor, input: Tensor, bias: Tensor | None) -> Tensor | None:
    """Add the weight's gradient to its sum, and return the bias's gradient."""
    flat = grad.reshape(-1, grad.shape[-1])
    add_product(wide, flat, input)
    return None if bias is None else flat.sum(0)


def _accumulate(
    grad: Tensor, input: Tensor, weight: nn.Parameter, bias: Tensor | None, grads: WeightGrads
) -> None:
    """Add the gradients of weight and bias, within the product if possible."""
    so_far, wide = weight.grad, grads.find_wide(weight)
    if wide is not None:
        grad_bias = _add_wide(wide, grad, input, bias)
    elif so_far is not None and so_far.dtype == grad.dtype == input.dtype:
        flat = grad.reshape(-1, grad.shape[-1])
        so_far.addmm_(flat.t(), input.reshape(-1, input.shape[-1]))
        grad_bias = None if bias is None else flat.sum(0)
    else:
        grad_weight, grad_bias = _multiply(grad, input, bias)
        _add(weight, grad_weight)
    if bias is not None and grad_bias is not None:
        _add(bias, grad_bias)


def _add(parameter: Tensor, made: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = made
    else:
        parameter.grad.add_(made)
