"""Layers of the built-in models.

Each module that owns parameters has a `reset_parameters` of its own: Varuna fills models that were
built on the meta device by it, a parameter at a time, seeded by the parameter's name, so that the
weights do not depend on the layout.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02
"""Of a normal distribution: GPT-2's and BERT's initial weights."""


class Dense(nn.Linear):
    """A linear layer with normal weights and a bias of zeros."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of normal rows."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Attention(nn.Module):
    """Self-attention by torch's own kernels; causal, or with a mask of what may be seen."""

    def __init__(
        self, hidden: int, heads: int, dropout: float, *, causal: bool, output_std: float = STD
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden {hidden} must be a multiple of heads {heads}")
        self.head_size, self.dropout, self.causal = hidden // heads, dropout, causal
        self.qkv = Dense(hidden, 3 * hidden)
        self.output = Dense(hidden, hidden, std=output_std)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        packed = self.qkv(x)
        size, length, _ = packed.shape
        # As many heads as are here: with tensor parallelism a rank has some of them.
        shape = (size, length, 3, -1, self.head_size)
        query, key, value = packed.view(shape).permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )  # fmt: skip
        out: Tensor = self.output(seen.transpose(1, 2).reshape(size, length, -1))
        return out


class Mlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, hidden: int, *, approximate: str, output_std: float = STD) -> None:
        super().__init__()
        self.approximate = approximate
        self.inner = Dense(hidden, 4 * hidden)
        self.output = Dense(4 * hidden, hidden, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.gelu(self.inner(x), approximate=self.approximate))
        return out


class PreNormBlock(nn.Module):
    """GPT-2's block: x + f(norm(x))."""

    def __init__(self, hidden: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        # What is added to the residual stream 2 x layers times starts smaller, as in GPT-2.
        std = STD / math.sqrt(2 * layers)
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout, causal=True, output_std=std)
        self.norm_2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, approximate="tanh", output_std=std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


class PostNormBlock(nn.Module):
    """BERT's block: norm(x + f(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, causal=False)
        self.norm_1 = nn.LayerNorm(hidden, eps=eps)
        self.mlp = Mlp(hidden, approximate="none")
        self.norm_2 = nn.LayerNorm(hidden, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm_1(x + self.dropout(self.attention(x, mask)))
        out: Tensor = self.norm_2(x + self.dropout(self.mlp(x)))
        return out


BLOCKS: tuple[type[nn.Module], ...] = (PreNormBlock, PostNormBlock)


def compile_blocks(module: nn.Module, **options: Any) -> int:
    """Let torch.compile take each block; how many there are."""
    found = [part for part in module.modules() if isinstance(part, BLOCKS)]
    for block in found:
        block.compile(**options)
    return len(found)


def plan_blocks(sequence_parallel: bool) -> dict[str, Any]:
    """How T ranks share embedding and blocks: heads, the inside of each MLP, words. With
    `sequence_parallel` each has its part of every sequence where they are not shared."""
    from torch.distributed.tensor import Replicate, Shard  # takes half a second to load
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from varuna_core.runtime.tensor_parallel.plan import PackedColwise

    between = Shard(1) if sequence_parallel else Replicate()
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.qkv": PackedColwise(parts=3, input_layouts=between),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.inner": ColwiseParallel(input_layouts=between),
        "blocks.*.mlp.output": RowwiseParallel(output_layouts=between),
    }


def number_positions(tokens: Tensor, most: int) -> Tensor:
    length = tokens.shape[1]
    if length > most:
        raise ValueError(f"a sample of {length} tokens: the model has {most} positions")
    return torch.arange(length, device=tokens.device)
