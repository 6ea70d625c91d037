"""Accumulate gradients in buffers whose addresses stay the same in all steps.

Recorded backwards (engine/cuda_graphs.py) add to the addresses that they were recorded with. So the
buffers are kept, zeroed when a step begins, and assigned to `.grad` for the optimizer at its end. A
parameter without a gradient in a step has `grad = None`, as in an ordinary step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.optim.precision import Masters

OWN_KERNEL = 2**16
"""Minimum number of elements of a gradient that is added by a kernel of its own."""


Carried = tuple[nn.Parameter, Tensor]
"""A parameter and its gradient from earlier steps."""


class FixedSums:
    """The buffers of one rank in which the gradients of its parameters are summed, at the same
    addresses in each step."""

    def __init__(self, masters: Masters) -> None:
        self._pairs = [(p, place) for p, place in masters.list_places() if p.requires_grad]
        self._place_of = masters.place_of
        self._sums: dict[int, Tensor] = {}
        self._used: set[int] = set()

    @torch.no_grad()
    def begin(self, carried: Sequence[Carried]) -> list[Carried]:
        """Zero all buffers for a new step. Return `carried` gradients of earlier steps, which are
        added later, in separate memory."""
        sums = {total.data_ptr() for total in self._sums.values()}
        carried = [(p, g.clone() if g.data_ptr() in sums else g) for p, g in carried]
        if not self._sums:
            for parameter, place in self._pairs:
                self._sums[id(place)] = torch.zeros_like(parameter, dtype=place.dtype)
        else:
            torch._foreach_zero_([*self._sums.values()])
        self._used.clear()
        for _, place in self._pairs:
            # A tensor of its own: a user may give its `.data` other memory.
            place.grad = self._sums[id(place)].detach()
        return carried

    def use(self, place: nn.Parameter) -> None:
        """Record that `place` has a gradient in this step."""
        self._used.add(id(place))

    def drop_unused(self, places: Iterable[nn.Parameter]) -> None:
        """Set `grad` to None for parameters without a gradient in this step."""
        for place in places:
            if id(place) not in self._used:
                place.grad = None

    @torch.no_grad()
    def add(self, made: Sequence[tuple[nn.Parameter, Tensor]], factor: Tensor) -> None:
        """Add gradients of parameters. Gradients with a separate accumulation buffer are multiplied
        by `factor`, which is a tensor because a recording is replayed with different factors."""
        same: list[tuple[Tensor, Tensor]] = []
        small: list[tuple[Tensor, Tensor]] = []
        for parameter, gradient in made:
            place = self._place_of(parameter)
            total = self._sums[id(place)]
            if place is parameter:
                same.append((total, gradient))
            elif gradient.numel() < OWN_KERNEL:
                small.append((total, gradient))
            else:
                add_scaled(total, gradient, factor)
        if same:
            torch._foreach_add_([total for total, _ in same], [gradient for _, gradient in same])
        if small:
            wide = [torch.empty_like(gradient, dtype=total.dtype) for total, gradient in small]
            torch._foreach_copy_(wide, [gradient for _, gradient in small])
            torch._foreach_mul_(wide, factor)
            torch._foreach_add_([total for total, _ in small], wide)


def add_scaled(total: Tensor, gradient: Tensor, factor: Tensor) -> None:
    """Add a half-precision gradient times a factor, with Triton if possible: torch's kernel for two
    types reaches half of a GPU's bandwidth (torch 2.11 on an H200)."""
    is_flat = total.is_contiguous() and gradient.is_contiguous()
    if total.is_cuda and is_flat and find_spec("triton") is not None:
        count, block = total.numel(), 2048
        _build_kernel()[(-(-count // block),)](total, gradient, factor, count, BLOCK=block)
    else:
        total.addcmul_(gradient, factor)


@cache
def _build_kernel() -> Any:
    """Build the kernel with Triton, which torch includes for CUDA."""
    import triton
    import triton.language as tl

    # Triton reads annotations, and knows none of Python's.
    @triton.jit  # type: ignore[untyped-decorator]
    def add(total, gradient, factor, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        value = tl.load(total + at, mask=inside)
        more = tl.load(gradient + at, mask=inside).to(tl.float32)
        tl.store(total + at, value + more * tl.load(factor), mask=inside)

    return add
