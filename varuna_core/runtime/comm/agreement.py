"""Agreement of all ranks in a step: on samples, loss, norm, and on a signal that one received.

The word of a signal rides on sums that are made anyway, so it may take two steps to come around:

    step k      the sum over a replica's stages tells its last stage who heard what
    step k + 1  the count of samples, over the replicas of the last stage, adds that up; the sum
                over the stages tells it to all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna_core.runtime.comm.links import Links

DIGIT = 2**17
"""More than any number of ranks. Three digits are exact in a double."""


def encode(heard: int, words: Sequence[int]) -> int:
    """A number for one of `words`, 0 for none; the sum of those of many ranks tells which."""
    return DIGIT ** words.index(heard) if heard in words else 0


def decode(total: int, words: Sequence[int]) -> int:
    """The last of `words` that any rank heard; 0 if none did."""
    for place in reversed(range(len(words))):
        if total >= DIGIT**place:
            return words[place]
    return 0


class Agreement:
    """One rank's side of the agreement."""

    def __init__(self, links: Links, holds_last: bool, hear: Callable[[], int]) -> None:
        """`hear` gives this rank's own word, as `encode` has it."""
        self.links, self.holds_last, self.hear = links, holds_last, hear
        self.told = 0
        """What the last step told, the same on every rank."""

        self._replica_heard = 0
        self._counting: Any = None
        self._all_heard = 0

    def start(self, size: int) -> Callable[[], int]:
        """Begin to add up what the replicas were given; the last stage will ask for the sum."""
        if self.links.replicas is None or not self.holds_last:
            return lambda: size
        total = torch.tensor([size, max(self._replica_heard, self.hear())])
        self._counting = dist.all_reduce(total, group=self.links.replicas, async_op=True)

        def wait() -> int:
            if self._counting is not None:
                self._counting.wait()
            self._counting = None
            self._all_heard = int(total[1].item())
            return int(total[0].item())

        return wait

    def finish(
        self, summed: Tensor, square: Tensor, count: Callable[[], int]
    ) -> tuple[Tensor, Tensor]:
        """The mean loss and the square of the norm, the same on every rank."""
        loss = torch.zeros_like(summed)
        self._all_heard = 0
        if self.holds_last:
            total = count()
            loss = summed / total if total else summed
            if self.links.replicas is not None:
                dist.all_reduce(loss, group=self.links.replicas)
        if self.links.pipeline is None:
            self.told = self.hear() if self.links.replicas is None else self._all_heard
            return loss.to(torch.get_default_dtype()), square
        if self.links.stage_map.tensor_rank:  # the first one's are told
            loss, self._all_heard = torch.zeros_like(loss), 0
        words = torch.tensor([self.hear(), self._all_heard], dtype=loss.dtype, device=loss.device)
        agreed = torch.cat([torch.stack([loss, square]), words])
        dist.all_reduce(agreed, group=self.links.pipeline)
        # That sum was on the host: to read it waits for nothing.
        self._replica_heard, told = (int(word) for word in agreed[2:].tolist())
        self.told = self._replica_heard if self.links.replicas is None else told
        return agreed[0].to(torch.get_default_dtype()), agreed[1]

    def answered(self) -> None:
        """Clear the signal that was told and acted on; called on all ranks at the same place."""
        self.told = self._replica_heard = 0

    def forget(self) -> None:
        """After a failure: what is under way would keep its group open."""
        self._counting = None
