"""Hold a replica's rows of a parameter (ZeRO 3).

`zero_weights` makes slices; `precision.Masters` and checkpoints read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from varuna_core.checkpoint.format.box import Box


@dataclass(frozen=True, kw_only=True)
class Slice:
    """This rank's rows of a parameter under ZeRO 3."""

    sharded: nn.Parameter
    """The module's parameter, a DTensor."""
    own: nn.Parameter
    """The rows only, as a parameter on the same memory."""
    shape: tuple[int, ...]
    box: Box
    segment: int
    """The segment of the model that uses the parameter."""

    @property
    def is_first(self) -> bool:
        """Return True for the slice that stores state without rows, such as a step count."""
        return self.box.volume > 0 and self.box.offset[0] == 0

    def collect_gradient(self) -> None:
        """Move the step's gradient, reduced over the replicas, from the DTensor to the rows."""
        gradient: Any = self.sharded.grad
        self.sharded.grad = None
        if gradient is not None:
            self.own.grad = gradient.to_local()


def take_slice(sharded: Any, segment: int, place: int, size: int) -> Slice:
    """Return the rows of a sharded parameter held by replica `place` out of `size`."""
    rows = sharded.detach().to_local()
    step = -(-sharded.shape[0] // size)
    begin = min(place * step, sharded.shape[0])
    box = Box((begin, *[0] * (sharded.dim() - 1)), tuple(rows.shape))
    assert len(rows) == min(step, sharded.shape[0] - begin), "torch slices otherwise"
    return Slice(
        sharded=sharded,
        own=nn.Parameter(rows),
        shape=tuple(sharded.shape),
        box=box,
        segment=segment,
    )
