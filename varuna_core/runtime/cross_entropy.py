"""Compute the cross-entropy over a large vocabulary with little memory: in blocks of rows, in fp32.

    torch      holds logits, logits in fp32, log-softmax, its gradient, gradient of the logits
    here       holds logits, one number per row,          gradient of the logits

A block of rows fits in the cache, so this is also faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = {"cpu": 2**20}
"""Number of elements of a block, by type of device."""
BLOCK_ELSEWHERE = 2**25


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Return torch's cross-entropy, computed in fp32. The last dimension of `logits` is the
    vocabulary, and each row has one label; the mean is over labels that are not ignored."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction {reduction!r}: expected 'mean' or 'sum'")
    flat, flat_labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if hasattr(logits, "full_tensor") or flat.dtype == torch.float64:
        # Words that several ranks share are never brought together.
        wide = flat if flat.dtype == torch.float64 else flat.float()
        given: Any = F.cross_entropy(
            wide, flat_labels, ignore_index=ignore_index, reduction=reduction
        )
        whole: Tensor = given.full_tensor() if hasattr(given, "full_tensor") else given
        return whole
    total: Tensor = _Summed.apply(flat, flat_labels, ignore_index)  # type: ignore[no-untyped-call]
    return total / (flat_labels != ignore_index).sum() if reduction == "mean" else total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
        counts = labels != ignored
        places = torch.where(counts, labels, 0)[:, None]
        # Of each row the logarithm of the sum of all exponentials, and the label's own logit.
        sums, own = (torch.empty(len(logits), device=logits.device) for _ in range(2))
        for rows in _list_blocks(logits):
            block = logits[rows].float()
            sums[rows] = torch.logsumexp(block, dim=1)
            own[rows] = block.gather(1, places[rows])[:, 0]
        ctx.save_for_backward(logits, places, counts, sums)
        return torch.where(counts, sums - own, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, places, counts, sums = ctx.saved_tensors
        factors = torch.where(counts, gradient, 0.0)[:, None]
        made = torch.empty_like(logits)
        for rows in _list_blocks(logits):
            block = torch.exp(logits[rows].float() - sums[rows, None])
            block.scatter_add_(1, places[rows], torch.full_like(block[:, :1], -1.0))
            made[rows] = block.mul_(factors[rows])
        return made, None, None


def _list_blocks(logits: Tensor) -> Iterator[slice]:
    elements = BLOCK.get(logits.device.type, BLOCK_ELSEWHERE)
    step = max(1, elements // logits.shape[1])
    return (slice(begin, begin + step) for begin in range(0, len(logits), step))
