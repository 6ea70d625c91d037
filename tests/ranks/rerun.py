"""In the place of CUDA graphs, where there is no GPU: what is recorded is run again.

As of a CUDA graph, what recorded work returns lies in memory that stays, and recording it changes
neither sums nor buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna_core.runtime import assembly
from varuna_core.runtime.optim.fixed_sums import FixedSums
from varuna_core.runtime.split.stage import Stage


class Rerun:
    """Runs the work again, as often as it is replayed."""

    is_recording = False

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        Rerun.is_recording = True
        try:
            made = work()
        finally:
            Rerun.is_recording = False
        into = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]

        def replay() -> None:
            with torch.enable_grad():
                again = [t for t in pytree.tree_leaves(work()) if isinstance(t, Tensor)]
            with torch.no_grad():
                for to, value in zip(into, again, strict=True):
                    to.copy_(value)

        return made, replay


@contextmanager
def instead_of_cuda_graphs() -> Iterator[None]:
    add, forward = FixedSums.add, Stage.forward

    def add_in_replays(self: Any, *given: Any) -> None:
        if not Rerun.is_recording:
            add(self, *given)

    def keep_buffers(self: Stage, *rest: Any) -> Any:
        buffers = [*self.module.buffers()] if Rerun.is_recording else []
        kept = [buffer.clone() for buffer in buffers]
        made = forward(self, *rest)
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)  # unseen by autograd, which has saved it
        return made

    with (
        mock.patch.object(assembly, "why_none_recorded", lambda tensor, zero, device: ""),
        mock.patch.object(assembly, "CudaRecorder", lambda device: Rerun()),
        mock.patch.object(FixedSums, "add", add_in_replays),
        mock.patch.object(Stage, "forward", keep_buffers),
    ):
        yield
