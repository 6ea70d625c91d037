"""Define GPT-2, Llama and Qwen, with a CutPoint before each block and after the last one.

segment 0        | block 1 | ... | block n | segment n + 1
embeddings       cut       cut   cut       norm, head (if tied the embedding's weight), loss
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from varuna_core.programs.layers import (
    Dense,
    Embedding,
    PreNormBlock,
    make_norm,
    number_positions,
    plan_blocks,
)
from varuna_core.records.training import Llama
from varuna_core.runtime.cross_entropy import cross_entropy
from varuna_core.runtime.split.cut import CutPoint

if TYPE_CHECKING:
    from varuna_core.programs.context import Context


class Gpt(nn.Module):
    """A decoder; takes `sequence + 1` tokens a sample, returns the loss of each next token."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        sequence: int,
        vocab: int,
        dropout: float,
        llama: Llama | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.sequence, self.llama, self.context = sequence, llama, context
        self.tokens = Embedding(vocab, hidden)
        if llama is None:
            self.positions = Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)
        blocks = [PreNormBlock(hidden, heads, layers, dropout, llama) for _ in range(layers)]
        for block in blocks:
            block.attention.context = context
        self.blocks = nn.ModuleList(blocks)
        self.cuts = nn.ModuleList([CutPoint() for _ in range(layers + 1)])
        self.norm = make_norm(hidden, llama)
        self.head = Dense(hidden, vocab, bias=False)
        if llama is None or llama.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self.predict(tokens[:, :-1]), tokens[:, 1:])

    def tensor_parallel_plan(self, sequence_parallel: bool = False) -> dict[str, Any]:
        """Return a plan for `Options(tensor_plan=...)`; the loss is computed on sharded logits."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
        )

        plan = plan_blocks(sequence_parallel, self.llama)
        before = Shard(1) if sequence_parallel else Replicate()
        plan["head"] = ColwiseParallel(input_layouts=before, use_local_output=False)
        if sequence_parallel:
            norms = ("norm", "blocks.*.norm_1", "blocks.*.norm_2")
            plan |= {name: SequenceParallel(use_local_output=True) for name in norms}
            if self.llama is None:
                rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
                plan["positions"] = rows
        return plan

    def predict(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each position."""
        x = self.tokens(tokens)
        if self.llama is None:
            first = 0 if self.context is None else self.context.index * tokens.shape[1]
            x = x + self.positions(first + number_positions(tokens, self.sequence))
        x = self.dropout(x)
        for cut, block in zip(self.cuts, self.blocks, strict=False):
            x = block(cut(x))
        logits: Tensor = self.head(self.norm(self.cuts[-1](x)))
        return logits
