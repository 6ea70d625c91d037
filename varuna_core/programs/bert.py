"""BERT: masked tokens and whether the second part follows the first; cuts as in gpt.py.

Predicting a token shares the embedding's weight. The two losses are added, as in the paper: the
mean over the masked tokens of the whole batch, and the mean over its pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna_core.programs.layers import (
    Dense,
    Embedding,
    PostNormBlock,
    number_positions,
    plan_blocks,
)
from varuna_core.runtime.cross_entropy import cross_entropy
from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.loss import TokenMean

EPS = 1e-12
NO_LABEL = -1
"""Where nothing is predicted (varuna_core/data/bert.py)."""


class TokenHead(nn.Module):
    """Logits of the masked tokens."""

    def __init__(self, hidden: int, vocab: int, embedding: Tensor) -> None:
        super().__init__()
        self.dense = Dense(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPS)
        self.decoder = Dense(hidden, vocab)
        self.decoder.weight = embedding

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(x))))
        return logits


class Bert(nn.Module):
    """Returns the losses of a batch as BertSamples reads it; `.mean()` is that of this batch."""

    def __init__(
        self, *, layers: int, hidden: int, heads: int, sequence: int, vocab: int, dropout: float
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.tokens = Embedding(vocab, hidden)
        self.positions = Embedding(sequence, hidden)
        self.types = Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            [PostNormBlock(hidden, heads, dropout, EPS) for _ in range(layers)]
        )
        self.cuts = nn.ModuleList([CutPoint() for _ in range(layers + 1)])
        self.token_head = TokenHead(hidden, vocab, self.tokens.weight)
        self.pooler = Dense(hidden, hidden)
        self.order_head = Dense(hidden, 2)

    def forward(
        self,
        text: Tensor,
        types: Tensor,
        labels: Tensor,
        padding_mask: Tensor,
        is_random: Tensor,
    ) -> TokenMean:
        tokens, order = self.predict(text, types, padding_mask)
        return _compute_loss(tokens, labels) + _compute_loss(order, is_random)

    def loss_counts(self, labels: Tensor, is_random: Tensor, **others: Tensor) -> list[Tensor]:
        """How many tokens of the batch are predicted, and how many pairs."""
        return [(held != NO_LABEL).sum() for held in (labels, is_random)]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """For `Options(tensor_plan=...)`; the loss is taken of logits that stay shared."""
        from torch.distributed.tensor.parallel import ColwiseParallel

        head = {"token_head.decoder": ColwiseParallel(use_local_output=False)}
        return plan_blocks(sequence_parallel=False) | head

    def predict(self, text: Tensor, types: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of each place's token, and of (the second part follows, it is another's)."""
        mask = padding_mask.bool()[:, None, None, :]
        places = number_positions(text, self.sequence)
        x = self.tokens(text) + self.positions(places) + self.types(types)
        x = self.dropout(self.norm(x))
        for cut, block in zip(self.cuts, self.blocks, strict=False):
            x = block(cut(x), mask)
        x = self.cuts[-1](x)
        return self.token_head(x), self.order_head(torch.tanh(self.pooler(x[:, 0])))


def _compute_loss(logits: Tensor, labels: Tensor) -> TokenMean:
    total = cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    return TokenMean(total, (labels != NO_LABEL).sum())
