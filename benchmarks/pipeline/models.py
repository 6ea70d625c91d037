"""The GPT of the paired measurements, and the pieces of it that other engines take."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna_core import CutPoint


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embed(nn.Module):
    def __init__(self, vocab: int, width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class Head(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Gpt(nn.Module):
    """Cuts before each block and after the last."""

    def __init__(
        self,
        blocks: int = 8,
        width: int = 448,
        heads: int = 7,
        vocab: int = 1024,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.vocab, self.length = vocab, length
        self.embed = Embed(vocab, width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = Head(vocab, width)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(blocks + 1))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return compute_loss(self.head(self.cuts[-1](x)), labels)

    def make_batch(self, size: int) -> dict[str, Tensor]:
        shape = (size, self.length)
        return {name: torch.randint(0, self.vocab, shape) for name in ("ids", "labels")}


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def list_layers(model: Gpt) -> list[nn.Module]:
    """A copy of the model as a list of layers."""
    model = copy.deepcopy(model)
    return [model.embed, *model.blocks, model.head]


def cut_layers(model: Gpt, num_stages: int) -> list[nn.Sequential]:
    """As many blocks a stage, embedding and head with the first and the last."""
    layers = list_layers(model)
    blocks = len(model.blocks) // num_stages
    bounds = [0, *(1 + blocks * stage for stage in range(1, num_stages)), len(layers)]
    return [nn.Sequential(*layers[bounds[s] : bounds[s + 1]]) for s in range(num_stages)]


def even_partition(model: Any, num_stages: int) -> str:
    return "-".join([str(len(model.blocks) // num_stages)] * num_stages)
