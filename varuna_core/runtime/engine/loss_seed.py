"""Sum the loss of a step over samples, and compute the gradients that backwards start from.

The sum stays on the device and is not copied to the host. A backward starts from the micro-batch's
weight in the global mean, times the loss scale. For a half-precision loss, this weight is split
into two factors; the second one is applied when gradients are accumulated (optim/precision.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import LossForm, TokenMean, pick_loss

SplitWeight = Callable[[float, float], float]
"""Function that maps a micro-batch's weight and the loss scale to its backward's start gradient."""


class LossSeed:
    """The losses of one rank's micro-batches, and the gradients that start their backwards."""

    def __init__(
        self, form: LossForm, device: torch.device, split: SplitWeight | None = None
    ) -> None:
        """`split` is called before gradients are computed, on every stage. Without it, a backward
        starts from weight times scale. The weights of a TokenMean are not split."""
        self.form, self.device, self.split = form, device, split
        self.begin_step()

    def begin_step(
        self,
        count: Callable[[], int] | None = None,
        weigh: Callable[[], Sequence[float]] | None = None,
        scale: float = 1.0,
    ) -> None:
        """Reset the sum; the first backward calls `count` and `weigh` (see `Engine.run`)."""
        self._count, self._weigh, self._scale = count, weigh, scale
        self._num_samples = 0
        shape = (self.form.num_terms, 2) if self.form.num_terms else ()
        self.total = torch.zeros(shape, dtype=torch.float64, device=self.device)
        """The sum so far, of the losses or of the `totals` of TokenMeans."""

    def find(self, output: Any) -> Tensor | TokenMean:
        """Return the loss in the model's output."""
        return pick_loss(output, self.form.path)

    def add(self, output: Any, micro: MicroBatch) -> Tensor | TokenMean:
        """Find the loss of a micro-batch and add it to the sum."""
        loss = self.find(output)
        terms = len(loss.terms) if isinstance(loss, TokenMean) else 0
        if terms != self.form.num_terms:
            raise SplitError(
                f"the loss has {terms} TokenMeans, but it had {self.form.num_terms} in the dry "
                "run: give dummy_inputs with all inputs of the loss, and always return the loss "
                "in the same form"
            )
        if isinstance(loss, TokenMean):
            self.total.add_(loss.totals())
        else:
            self.total.add_(loss.detach(), alpha=micro.size)
        return loss

    def pair(self, loss: Tensor | TokenMean, micro: MicroBatch) -> Sequence[tuple[Tensor, Tensor]]:
        """Return the tensors from which a loss's backward starts, each with its start gradient."""
        if not isinstance(loss, TokenMean):
            if self.split is not None:
                seed = self.split(self._weight(micro), self._scale)
            else:
                seed = self._weight(micro) * self._scale
            return [(loss, torch.full_like(loss, seed))]
        if self._weigh is not None:
            weights = self._weigh()
        else:
            weights = [1 / self._count_samples()] * len(loss.terms)
        # Where nothing counts a model may return a zero of its own.
        return [
            (total, torch.full_like(total, weight * self._scale))
            for (total, _), weight in zip(loss.terms, weights, strict=True)
            if total.requires_grad
        ]

    def split_weight(self, micro: MicroBatch) -> None:
        """Give a micro-batch's weight and the loss scale to `split`, which multiplies them into
        the gradients of a stage whose backward does not begin at a loss."""
        if self.split is not None:
            self.split(self._weight(micro), self._scale)

    def _weight(self, micro: MicroBatch) -> float:
        return micro.size / self._count_samples()

    def _count_samples(self) -> int:
        if not self._num_samples:
            assert self._count is not None
            self._num_samples = self._count()
        return self._num_samples
