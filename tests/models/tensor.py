"""Models that say how their layers are shared, beside the built-in ones."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from tests.models.small import WIDTH, Gpt, PaddedGpt

HEAD = 4


class Block(nn.Module):
    """Query, key and value apart; dropout on what every rank has whole."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        parts = (
            part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Apart(Gpt):
    """The embedding is shared by columns, logits are brought together before the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.positions_scale = nn.Parameter(self.wpe.weight.new_tensor(0.5))
        self.wpe.weight.requires_grad_(False)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.positions_scale

    tensor_parallel_plan: ClassVar[Any] = {
        "wte": ColwiseParallel(output_layouts=Replicate()),
        "blocks.*.[qkv]": ColwiseParallel(),
        "blocks.*.proj": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


class Dropping(Apart):
    """Dropout on shares and on what is whole: attention weights, heads, the inside of an MLP; what
    is drawn otherwise, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.rate = dropout

    def run_block(self, number: int, x: Tensor) -> Tensor:
        block = self.blocks[number]
        y = block.drop(block.norm1(x))
        q, k, v = (
            part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for part in (block.q, block.k, block.v)
        )
        rate = self.rate if self.training else 0.0
        if number % 2:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        else:
            seen = block.drop(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v
        seen = F.dropout2d(seen, rate, self.training)
        x = x + block.drop(block.proj(seen.transpose(1, 2).flatten(2)))
        inside = F.gelu(block.up(block.norm2(x)))
        if self.training:
            inside = inside + 0.1 * torch.empty_like(inside).normal_()
        return x + block.drop(block.down(block.drop(inside)))


class DroppingAgain(Dropping):
    """Its blocks run again in the backward."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().run_block, number, x, use_reentrant=number % 2 == 1)
        return out


class Words(Apart):
    """Logits and loss come out of the model shared, as torch's own."""

    def tensor_parallel_plan(self) -> Any:
        head = ColwiseParallel(use_local_output=False)
        return {**Apart.tensor_parallel_plan, "head": head}


class Padded(PaddedGpt, Words):
    """So does the sum of a mean over tokens."""


class Bare(Apart):
    """Cuts lie right before and right after shared layers."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        block = self.blocks[number]
        return block.down(F.gelu(block.up(x)))

    def tensor_parallel_plan(self) -> Any:
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class Forgetful(Apart):
    """A weight of the root is used on each rank's share, and the plan does not say so."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.gain = nn.Parameter(self.wte.weight.new_ones(2))

    def run_block(self, number: int, x: Tensor) -> Tensor:
        block = self.blocks[number]
        return x + block.down(F.gelu(block.up(x)) * self.gain.mean())


class Crossing(Apart):
    """What reaches a cut is shared still."""

    def tensor_parallel_plan(self) -> Any:
        local = {"wte": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
        return {**Apart.tensor_parallel_plan, **local}

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids)


class Failing(Apart):
    """One of the ranks that share a layer fails in it, in a step."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        if number == 2 and type(x) is Tensor and x.requires_grad and dist.get_rank() == 1:
            raise KeyError("no such block")
        return super().run_block(number, x)
