"""Define the layers of the built-in models.

Each module with parameters has a `reset_parameters` of its own. Varuna uses it to initialize models
that were built on the meta device, one parameter at a time, seeded by the parameter's name, so that
the weights do not depend on the layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from varuna_core.programs.context import Context
    from varuna_core.records.training import Llama

STD = 0.02
"""Standard deviation of the initial weights of GPT-2 and BERT."""


class Dense(nn.Linear):
    """A linear layer with normally distributed weights and zero biases."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with normally distributed rows."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


class Attention(nn.Module):
    """Self-attention by torch's own kernels, causal or with a mask."""

    context: Context | None = None

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
        dropout = self.dropout if self.training else 0.0
        if self.context is None:
            seen = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal
            )
        else:
            seen = self.context.attend(query, key, value, dropout)
        out: Tensor = self.output(seen.transpose(1, 2).reshape(size, length, -1))
        return out


class Mlp(nn.Module):
    """Two-layer MLP, four times as wide inside."""

    def __init__(self, hidden: int, *, approximate: str, output_std: float = STD) -> None:
        super().__init__()
        self.approximate = approximate
        self.inner = Dense(hidden, 4 * hidden)
        self.output = Dense(4 * hidden, hidden, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.gelu(self.inner(x), approximate=self.approximate))
        return out


class GroupedAttention(nn.Module):
    """Causal self-attention of Llama and Qwen: rotary positions, fewer heads of keys and values."""

    context: Context | None = None

    def __init__(
        self, hidden: int, heads: int, dropout: float, llama: Llama, *, output_std: float
    ) -> None:
        super().__init__()
        self.dropout, self.llama = dropout, llama
        size, bias = llama.head_size, llama.qkv_bias
        self.is_grouped = llama.kv_heads < heads
        self.query = Dense(hidden, heads * size, bias=bias)
        self.key = Dense(hidden, llama.kv_heads * size, bias=bias)
        self.value = Dense(hidden, llama.kv_heads * size, bias=bias)
        if llama.qk_norm:
            self.query_norm = nn.RMSNorm(size, eps=llama.norm_eps)
            self.key_norm = nn.RMSNorm(size, eps=llama.norm_eps)
        self.output = Dense(heads * size, hidden, bias=False, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as are here: with tensor parallelism a rank has some of them.
        shape = (*x.shape[:2], -1, self.llama.head_size)
        query, key, value = (part(x).view(shape) for part in (self.query, self.key, self.value))
        if self.llama.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        first = 0 if self.context is None else self.context.index * shape[1]
        cos, sin = find_turns(range(first, first + shape[1]), self.llama, x.device)
        query, key = (turn(part, cos, sin).transpose(1, 2) for part in (query, key))
        value = value.transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        if self.context is None:
            seen = F.scaled_dot_product_attention(
                query, key, value, None, dropout, is_causal=True, enable_gqa=self.is_grouped
            )
        else:
            seen = self.context.attend(query, key, value, dropout, is_grouped=self.is_grouped)
        out: Tensor = self.output(seen.transpose(1, 2).flatten(2))
        return out


def find_turns(places: range, llama: Llama, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angle of each position and pair of a head, in fp32."""
    size = llama.head_size
    powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    rates = 1.0 / llama.rope_base**powers
    if llama.rope_scaling is not None:
        factor, low, high, before = llama.rope_scaling
        kept = ((before * rates / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / factor)
    angles = torch.outer(
        torch.arange(places.start, places.stop, device=device, dtype=torch.float32), rates
    )
    return angles.cos()[:, None], angles.sin()[:, None]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs taken from a head's two halves, as transformers does; angles are in fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class GatedMlp(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, hidden: int, inner: int, *, output_std: float) -> None:
        super().__init__()
        self.gate = Dense(hidden, inner, bias=False)
        self.inner = Dense(hidden, inner, bias=False)
        self.output = Dense(inner, hidden, bias=False, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.silu(self.gate(x)) * self.inner(x))
        return out


class PreNormBlock(nn.Module):
    """Block with x + f(norm(x)): GPT-2's, or with the parts of `llama`."""

    def __init__(
        self, hidden: int, heads: int, layers: int, dropout: float, llama: Llama | None = None
    ) -> None:
        super().__init__()
        # What is added to the residual stream 2 x layers times starts smaller, as in GPT-2.
        std = STD / math.sqrt(2 * layers)
        self.norm_1 = make_norm(hidden, llama)
        self.attention = (
            Attention(hidden, heads, dropout, causal=True, output_std=std)
            if llama is None
            else GroupedAttention(hidden, heads, dropout, llama, output_std=std)
        )
        self.norm_2 = make_norm(hidden, llama)
        self.mlp = (
            Mlp(hidden, approximate="tanh", output_std=std)
            if llama is None
            else GatedMlp(hidden, llama.inner, output_std=std)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return out


def make_norm(hidden: int, llama: Llama | None) -> nn.Module:
    return nn.LayerNorm(hidden) if llama is None else nn.RMSNorm(hidden, eps=llama.norm_eps)


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
    """Apply torch.compile to each block, and return their number."""
    found = [part for part in module.modules() if isinstance(part, BLOCKS)]
    for block in found:
        block.compile(**options)
    return len(found)


def plan_blocks(sequence_parallel: bool, llama: Llama | None = None) -> dict[str, Any]:
    """Return the tensor-parallel plan, which shards heads, the inside of each MLP and the
    vocabulary. With `sequence_parallel`, other parts are split along the sequence."""
    from torch.distributed.tensor import Replicate, Shard  # takes half a second to load
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    from varuna_core.runtime.tensor_parallel.plan import PackedColwise

    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.output": RowwiseParallel(output_layouts=between),
    }
    if llama is None:
        return plan | {
            "blocks.*.attention.qkv": PackedColwise(parts=3, input_layouts=between),
            "blocks.*.mlp.inner": ColwiseParallel(input_layouts=between),
        }
    for part, layers in {"attention": ("query", "key", "value"), "mlp": ("gate", "inner")}.items():
        # One input for all of them: it is gathered once, and its gradients are summed once.
        plan[f"blocks.*.{part}"] = PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate()
        )
        plan |= {f"blocks.*.{part}.{layer}": ColwiseParallel() for layer in layers}
    if llama.qk_norm:
        for name in ("query_norm", "key_norm"):  # each rank has some of the heads, the third axis
            style = SequenceParallel(sequence_dim=2, use_local_output=True)
            plan[f"blocks.*.attention.{name}"] = style
    return plan


def number_positions(tokens: Tensor, most: int) -> Tensor:
    length = tokens.shape[1]
    if length > most:
        raise ValueError(f"a sample has {length} tokens, but the model has {most} positions")
    return torch.arange(length, device=tokens.device)
