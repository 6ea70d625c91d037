"""Gradients that add up in memory which stays where it is from step to step.

Recorded backwards (engine/cuda_graphs.py) add to the addresses that they were recorded with. So the
sums are kept, set to zero as a step begins, and given to the optimizer as `.grad` at its end; a
parameter that got no gradient in a step has none, as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class FixedSums:
    """The sums of one rank's gradients."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Of pairs of a parameter and the place of its gradient."""
        self._pairs = pairs
        self._sums: dict[int, Tensor] = {}
        self._used: set[int] = set()

    def find(self, place: nn.Parameter) -> Tensor:
        """The memory of one place's sum."""
        return self._sums[id(place)]

    def release(self, gradient: Tensor) -> Tensor:
        """The gradient in memory that is not ours: one that waits for more to be added."""
        mine = {one.data_ptr() for one in self._sums.values()}
        return gradient.clone() if gradient.data_ptr() in mine else gradient

    @torch.no_grad()
    def begin(self) -> None:
        """Set all sums to zero, and let gradients come to them."""
        if not self._sums:
            for parameter, place in self._pairs:
                self._sums[id(place)] = torch.zeros_like(parameter, dtype=place.dtype)
        else:
            torch._foreach_zero_([*self._sums.values()])
        self._used.clear()
        for _, place in self._pairs:
            place.grad = self._sums[id(place)]

    def use(self, place: nn.Parameter) -> None:
        """This place has got a gradient."""
        self._used.add(id(place))

    def drop_unused(self, places: Iterable[nn.Parameter]) -> None:
        """Those that got none have none."""
        for place in places:
            if id(place) not in self._used:
                place.grad = None
