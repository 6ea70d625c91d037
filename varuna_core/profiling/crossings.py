"""What crosses the cuts of a segment that is alone: made-up neighbours, and made-up values.

Fractions are drawn around 0, whole numbers are 0 (a valid index), words True. So the time of code
that looks at values, such as a routing by them, is that of these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from varuna_core.profiling.memory import count_bytes, list_storages
from varuna_core.runtime.comm.values import Crossing, Structure, TensorSpec, sign
from varuna_core.runtime.split.record import Cut
from varuna_core.runtime.split.split import Split


class Crossings:
    """Of a model whose segments are all alone."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._shown: Any = None
        self._cuts: list[Cut] = []

    def make(self, segment: int, inputs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """What comes into a segment for such a batch; the same on all ranks."""
        if not segment:
            return ()
        shown = sign(dict(inputs))
        if shown != self._shown:  # one dry run for all segments
            last = len(self.split.record.cuts) - 1
            record = self.split.rehearsal.run(inputs, last, self.split.model.training)
            self._shown, self._cuts = shown, record.cuts
        draw = torch.Generator().manual_seed(segment)
        specs = self._cuts[segment - 1].specs
        return tuple(make_values(spec, draw, self.split.device) for spec in specs)


def make_values(spec: TensorSpec, draw: torch.Generator, device: torch.device) -> Tensor:
    """Fractions around 0, whole numbers 0 (a valid index), words True; the same on all ranks."""
    if spec.dtype.is_floating_point:
        made = torch.randn(spec.shape, generator=draw)
    else:
        made = torch.full(spec.shape, spec.dtype == torch.bool)
    return made.to(device, spec.dtype)


class Inlet:
    """In place of a Receiver: the same message whenever one is asked for."""

    def __init__(self) -> None:
        self.tensors: tuple[Tensor | None, ...] = ()
        self.copying = False
        """As from a channel each message has memory of its own."""

    def take(self) -> Crossing:
        made = (
            None if t is None else t.clone() if self.copying else t.detach() for t in self.tensors
        )
        return Crossing(cast("tuple[Tensor, ...]", tuple(made)), None)

    def is_there(self) -> bool:
        return True


class Outlet:
    """In place of a Sender: notes what is sent, and makes gradients of it for what comes back."""

    def __init__(self, back: Inlet | None) -> None:
        self.back = back
        self.num_bytes = 0
        self.storages: dict[int, int] = {}
        self._shapes: list[Any] = []

    def send(self, tensors: Sequence[Tensor | None], structure: Structure | None = None) -> None:
        self.num_bytes = count_bytes(tensors)
        self.storages = list_storages(tensors)
        shapes = [None if t is None else (t.shape, t.dtype, t.requires_grad) for t in tensors]
        if self.back is None or shapes == self._shapes or not torch.is_grad_enabled():
            return
        self._shapes = shapes
        self.back.tensors = tuple(
            torch.randn_like(t.detach()) if t is not None and t.requires_grad else None
            for t in tensors
        )

    def forget(self) -> None:
        self._shapes, self.storages = [], {}

    def flush(self) -> None:
        pass
