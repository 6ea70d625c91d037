"""Compute the weight of each sum of a TokenMean in a step: the inverse of the global batch's count.

If the model has `loss_counts`, the count is known before the first backward. Otherwise it is known
only after the last forward of all replicas, and gradients are corrected after the all-reduce:

    backward    sum x 2^-k, about one over the tokens of the inputs
    all-reduce  x 2^k / count

Scaling by a power of two is exact, and keeps half-precision gradients at the scale of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from varuna_core.runtime.comm.agreement import Agreement
from varuna_core.runtime.engine.microbatch import MicroBatch
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import COUNTS, LossForm


class LossWeights:
    """Weights of a rank's losses in one step; empty if the loss is a mean over the samples."""

    def __init__(self, form: LossForm, agreement: Agreement, last: nn.Module | None) -> None:
        """`last` is the module of the last stage if this rank holds that stage, else None."""
        self.form, self.agreement, self.last = form, agreement, last
        self._figures: list[float] = []
        self._weights: list[float] = []
        self._counted: Tensor | None = None

    def start(
        self,
        microbatches: Sequence[MicroBatch],
        size: int,
        num_places: int,
        everywhere: bool = False,
    ) -> Callable[[], list[float]]:
        """Start the all-reduce of the counts over the replicas; `num_places` is the approximate
        number of tokens. If `everywhere` is true, all stages receive the sums."""
        if self.form.is_counted and self.last is not None:
            self._figures = count_inputs(self.last, microbatches, self.form.num_terms)
        elif self.form.num_terms:
            self._figures = [float(max(num_places, size))] * self.form.num_terms
        self._totals = self.agreement.start(size, self._figures, everywhere)
        return self._totals

    def weigh(self) -> list[float]:
        """Return the weight of each sum for the backward."""
        if not self._weights:
            _, *figures = self._totals()
            known = self.form.is_counted
            self._weights = [1 / (f or 1) if known else compute_power(f) for f in figures]
        return self._weights

    def note(self, summed: Tensor) -> None:
        """Record this rank's counts from the forward, before the all-reduce over the replicas."""
        if self.form.is_counted and self.last is not None:
            self._counted = summed[:, 1].clone()

    def check(self) -> None:
        """Raise an error if the model's `loss_counts` and its forward returned different counts.

        This waits for the device, so call it at the end of a step.
        """
        if self._counted is None:
            return
        counted = self._counted.tolist()
        if not all(map(math.isclose, counted, self._figures)):
            raise SplitError(
                f"{COUNTS} returns {_spell(self._figures)} for this batch, but the counts of "
                f"forward's TokenMeans are {_spell(counted)}: the two must be equal"
            )

    def compute_factor(self, summed: Tensor) -> float:
        """Return the factor for all-reduced gradients; `summed` holds the sums of all replicas."""
        factor = 0.0
        if self.last is not None:
            factor = 1 / (self.weigh()[0] * (float(summed[0, 1]) or 1.0))
        return self.agreement.tell_stages(factor)


def compute_power(figure: float) -> float:
    """Return a power of two close to 1 / `figure`."""
    return float(2.0 ** -math.floor(math.log2(max(figure, 1.0))))


@torch.no_grad()
def count_inputs(
    module: nn.Module, microbatches: Sequence[MicroBatch], num_terms: int
) -> list[float]:
    """Return a batch's counts according to the model's `loss_counts`."""
    summed: list[Any] = [0.0] * num_terms
    for micro in microbatches:
        told = getattr(module, COUNTS)(**micro.inputs)
        counts = told if isinstance(told, (tuple, list)) else [told]
        if len(counts) != num_terms:
            raise SplitError(
                f"{COUNTS} returns {len(counts)} counts, but the loss needs {num_terms}"
            )
        summed = [total + _as_double(count) for total, count in zip(summed, counts, strict=True)]
    return [float(total) for total in summed]  # a device is waited for here, and once


def _as_double(count: Tensor | float) -> Tensor:
    return torch.as_tensor(count).reshape(()).double()


def _spell(counts: Sequence[float]) -> str:
    return ", ".join(f"{count:g}" for count in counts)
