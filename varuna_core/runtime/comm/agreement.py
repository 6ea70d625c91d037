"""Make all ranks agree, in each step, on sample count, loss, gradient norm and received signals.

Signals use all-reduces that each step needs anyway, so one may take two steps to reach all ranks:

    step k      the sum over a replica's stages reports each rank's signal to its last stage
    step k + 1  the sum of sample counts over the replicas of the last stage also combines the
                signals; the sum over the stages then reports the result to all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.runtime.comm.links import Links

DIGIT = 2**17
"""Base of the encoding: larger than any number of ranks, and three digits are exact in a double."""


def encode(heard: int, words: Sequence[int]) -> int:
    """Encode `heard` (one of `words`, or 0) so that a sum over many ranks can be decoded."""
    return DIGIT ** words.index(heard) if heard in words else 0


def decode(total: int, words: Sequence[int]) -> int:
    """Return the last of `words` that occurs in a sum of encoded numbers; 0 if none occurs."""
    for place in reversed(range(len(words))):
        if total >= DIGIT**place:
            return words[place]
    return 0


def compute_mean(totals: Tensor) -> Tensor:
    """Return the sum of the means of all (sum, count) rows; a row with count 0 contributes 0."""
    counts = totals[:, 1]
    return (totals[:, 0] / torch.where(counts == 0, 1.0, counts)).sum()


class Agreement:
    """One rank's side of the agreement on the values of a step."""

    def __init__(self, links: Links, holds_last: bool, hear: Callable[[], int]) -> None:
        """`hear` returns the signal that this rank received, or 0."""
        self.links, self.holds_last, self.hear = links, holds_last, hear
        self.told = 0
        """The signal on which all ranks agreed in the last step, or 0."""

        self._replica_heard = 0
        self._counting: Any = None
        self._all_heard = 0

    def start(
        self, size: int, more: Sequence[float] = (), everywhere: bool = False
    ) -> Callable[[], list[float]]:
        """Start the all-reduce of sample counts and of the figures in `more` over the replicas; the
        last stage, or every stage if `everywhere`, reads the sums later."""
        if self.links.replicas is None or not (self.holds_last or everywhere):
            return lambda: [size, *more]
        # Only the last stage's tells of signals, one of them of its replica's.
        heard = max(self._replica_heard, self.hear()) if self.holds_last else 0
        total = torch.tensor([heard, size, *more], dtype=torch.float64)
        self._counting = dist.all_reduce(total, group=self.links.replicas, async_op=True)

        def wait() -> list[float]:
            if self._counting is not None:
                self._counting.wait()
            self._counting = None
            heard, *figures = total.tolist()
            self._all_heard = int(heard)
            return figures

        return wait

    def sum_means(self, summed: Tensor) -> Tensor:
        """Return a TokenMean's sums and counts over all replicas, on ranks of the last stage."""
        if self.holds_last and self.links.replicas is not None:
            dist.all_reduce(summed, group=self.links.replicas)
            self.links.settle(summed.device)
        return summed

    def tell_stages(self, value: float) -> float:
        """Send the last stage's value to all stages of the replica, and return it."""
        if self.links.pipeline is None:
            return value
        is_teller = self.holds_last and not self.links.stage_map.tensor_rank
        told = torch.tensor(value if is_teller else 0.0, dtype=torch.float64)
        dist.all_reduce(told, group=self.links.pipeline)
        return float(told)

    def finish(
        self, summed: Tensor, square: Tensor, totals: Callable[[], list[float]]
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the square of the gradient norm, equal on every rank.

        `summed` is for this rank's samples; for a TokenMean, the result of `sum_means`.
        """
        loss = torch.zeros((), dtype=summed.dtype, device=summed.device)
        self._all_heard = 0
        if self._counting is not None:
            totals()
        if self.holds_last:
            count = totals()[0]
            if summed.dim():
                loss = compute_mean(summed)
            else:
                loss = summed / count if count else summed
                if self.links.replicas is not None:
                    dist.all_reduce(loss, group=self.links.replicas)
        if self.links.pipeline is None:
            self.links.settle(loss.device)
            self.told = self.hear() if self.links.replicas is None else self._all_heard
            return loss.to(torch.get_default_dtype()), square
        if self.links.stage_map.tensor_rank:  # the first one's are told
            loss, self._all_heard = torch.zeros_like(loss), 0
        words = torch.tensor([self.hear(), self._all_heard], dtype=loss.dtype, device=loss.device)
        agreed = torch.cat([torch.stack([loss, square]), words])
        dist.all_reduce(agreed, group=self.links.pipeline)
        self.links.settle(agreed.device)
        self._replica_heard, told = (int(word) for word in agreed[2:].tolist())
        self.told = self._replica_heard if self.links.replicas is None else told
        return agreed[0].to(torch.get_default_dtype()), agreed[1]

    def answered(self) -> None:
        """Clear the agreed signal after handling it; call this on all ranks at the same point."""
        self.told = self._replica_heard = 0

    def forget(self) -> None:
        """Drop pending work after a failure, since it would keep its process group open."""
        self._counting = None
