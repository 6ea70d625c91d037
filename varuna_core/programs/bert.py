"""Define BERT, which predicts masked tokens and the order of two parts; cut as in gpt.py.

The token head shares the embedding's weight. The two losses are added, as in the paper: the mean
over the masked tokens of the whole batch, and the mean over its pairs.
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
"""Label of a token that is not to be predicted (varuna_core/data/bert.py)."""


class TokenHead(nn.Module):
    """Computes the logits of masked tokens."""

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
    """BERT model: returns the losses of a batch of BertSamples, whose mean is the batch's."""

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
        """Return the numbers of predicted tokens and of pairs, the weights of the two losses."""
        return [(held != NO_LABEL).sum() for held in (labels, is_random)]

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return a plan for `Options(tensor_plan=...)`; the loss is computed on sharded logits."""
        from torch.distributed.tensor.parallel import ColwiseParallel

        head = {"token_head.decoder": ColwiseParallel(use_local_output=False)}
        return plan_blocks(sequence_parallel=False) | head

    def predict(self, text: Tensor, types: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each position's token and each pair (B follows A, B is random)."""
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
