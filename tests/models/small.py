"""Small models of every kind, with cuts, and a way to run a split one by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.loss import TokenMean

Inputs = dict[str, Any]
WIDTH, VOCAB, LENGTH = 16, 32, 8


class Block(nn.Module):
    """A transformer block; `memory` makes it attend to another sequence as well."""

    def __init__(self, dropout: float = 0.0, crossing: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.look = nn.Linear(WIDTH, WIDTH) if crossing else None

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Any = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.proj(seen.transpose(1, 2).flatten(2)))
        if self.look is not None:
            x = x + self.look(memory).mean(1, keepdim=True)
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Cuts before each block and after the last one; pieces to override."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.cuts: Any = nn.ModuleList([CutPoint() for _ in range(blocks + 1)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))

    def run_block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x)

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        x = self.embed(ids)
        for number in range(len(self.blocks)):
            x = self.run_block(number, self.cuts[number](x))
        return self.compute_loss(self.cuts[-1](x), labels)


class SparseGpt(Gpt):
    """Has a sparse buffer that is not saved, as OpenAI's Whisper does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heads", torch.randn(3, 4).relu().to_sparse(), persistent=False)


class PaddedGpt(Gpt):
    """Its loss is a mean over the tokens that have a label, given as (sum, count)."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Any:
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"logits": logits, "loss": (total, (labels >= 0).sum())}


class TiedPaddedGpt(PaddedGpt):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.wte.weight


class LogitsFirstGpt(Gpt):
    """Returns (logits, loss), as nanoGPT's model does, and an accuracy."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Any:
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss, (logits.argmax(-1) == labels).float().mean()


class SkippingGpt(Gpt):
    """Where no token has a label it returns a zero that has no gradient."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Any:
        assert labels is not None
        held = labels >= 0
        if not held.any():
            return TokenMean(torch.zeros(()), 0)
        logits = self.head(self.norm(x))[held]
        return TokenMean(F.cross_entropy(logits, labels[held], reduction="sum"), held.sum())


class ToldGpt(Gpt):
    """Returns more than its loss: numbers, logits, a word."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Any:
        assert labels is not None
        logits = self.head(self.norm(x))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        hits, count = logits.argmax(-1) == labels, (labels >= 0).sum()
        return {
            "loss": TokenMean(total, count),
            "height": logits.max(-1)[0].mean(),
            "hits": hits.sum(),
            "accuracy": TokenMean(hits.sum(), count),
            "several": (logits, {"kind": "told", "rows": hits.float().mean(1)}),
        }


class TwoMeansGpt(Gpt):
    """Two means over different tokens, whose counts the inputs tell."""

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Any:
        assert labels is not None
        logits = self.head(self.norm(x))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        first, second = self.loss_counts(labels)
        squares = torch.where(labels % 3 == 0, logits.logsumexp(-1).square(), 0.0).sum()
        return TokenMean(total, first) + 0.1 * TokenMean(squares, second)

    def loss_counts(self, labels: Tensor, **ignored: Any) -> list[Tensor]:
        return [(labels >= 0).sum(), (labels % 3 == 0).sum()]


class FitfulGpt(Gpt):
    """Its third block takes its time with some batches, so that messages come late."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        if number == 2 and x.abs().sum().item() % 2 < 1:
            time.sleep(0.02)
        return super().run_block(number, x)


class TiedGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.wte.weight


class ThreeWayGpt(Gpt):
    """Embedding, head, and a bias in the middle made of the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.middle = self.wte.weight

    def run_block(self, number: int, x: Tensor) -> Tensor:
        x = super().run_block(number, x)
        return x + self.middle.mean(0) if number == 1 else x


class NamedPairGpt(Gpt):
    """The ancestor's way: two parameters that are told to be one."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.lm_head_weight = nn.Parameter(self.wte.weight.detach().clone())

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        logits = F.linear(self.norm(x), self.lm_head_weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class RootGpt(Gpt):
    """Parameters and buffers of the root, used raw; residuals and functions between cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH))

    def embed(self, ids: Tensor) -> Tensor:
        self.batches += 1
        return super().embed(ids) * self.scale + self.shift

    def run_block(self, number: int, x: Tensor) -> Tensor:
        y = F.relu(super().run_block(number, x)) + x * self.scale
        if number == 2:
            self.average = (0.9 * self.average + 0.1 * y.mean((0, 1))).detach()
            y = y * self.gain
        return y


class PlainListGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        del self.cuts
        self.cuts = [CutPoint() for _ in range(5)]


class AttributeGpt(Gpt):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        del self.cuts
        self.cut_a, self.cut_b, self.cut_c = CutPoint(), CutPoint(), CutPoint()

    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        x = self.blocks[0](self.cut_a(self.embed(ids)))
        return self.compute_loss(self.cut_c(self.blocks[1](self.cut_b(x))), labels)


class SharedBlockGpt(Gpt):
    """One block used at each place."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[0 if number != 2 else 2](x)


class DictGpt(Gpt):
    """A dict with a tensor, an int tensor, None, a number and a tuple crosses each cut."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        state: dict[str, Any] = {"x": self.embed(ids), "ids": ids, "none": None, "k": ids.shape[1]}
        state["pair"] = (state["x"].pow(2).mean(), ids > 3)
        for number, block in enumerate(self.blocks):
            state = self.cuts[number](state)
            x = block(state["x"]) + state["ids"][..., None] / state["k"]
            aux = state["pair"][0] + x.pow(2).mean()
            state = {**state, "x": x, "pair": (aux, state["pair"][1])}
        state, x = self.cuts[-1](state, state["x"])
        x = torch.where(state["pair"][1][..., None], x, x * 2)
        return self.compute_loss(x, labels) + 0.01 * state["pair"][0]


class BranchGpt(Gpt):
    """Looks at values: no dry run on fake tensors."""

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids)
        return x * 2 if ids.max().item() > 3 else x


class AutocastGpt(Gpt):
    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return super().forward(ids, labels)


class CheckpointGpt(Gpt):
    def run_block(self, number: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[number], x, use_reentrant=False)


class FrozenGpt(Gpt):
    """An embedding without gradients, in the user's own no_grad around a cut."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        with torch.no_grad():
            x = self.blocks[0](self.cuts[0](self.embed(ids)))
            x = self.cuts[1](x)
        for number in range(1, len(self.blocks)):
            x = self.run_block(number, x)
            x = self.cuts[number + 1](x)
        return self.compute_loss(x, labels)


class InPlaceGpt(Gpt):
    """Writes into what it just received, and into what lies before."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        x += torch.ones(x.shape)
        return x

    def run_block(self, number: int, x: Tensor) -> Tensor:
        x *= 1.5
        return super().run_block(number, x)


class ChangedInputsGpt(Gpt):
    """Writes into its inputs, before the first cut and after the last one."""

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids.clone())
        ids.add_(1).remainder_(VOCAB)
        return x

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        if labels is not None:
            labels += 1
            labels %= VOCAB
        return super().compute_loss(x, labels)


class Swallowing(Gpt):
    """Catches all it can."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
        try:
            return super().forward(ids, labels)
        except Exception:
            return None


class CutInBlock(nn.Module):
    """A block that passes its cut itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.block = CutPoint(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.cut(x) * 1.5)


class CutInBlockGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CutInBlock() for _ in range(4)])
        self.cuts = nn.ModuleList([nn.Identity() for _ in range(4)] + [CutPoint()])


class Bert(Gpt):
    """Masks made in forward from an input that may be None, used by every block."""

    def __init__(self) -> None:
        super().__init__()
        self.segments, self.pooler = nn.Embedding(2, WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("positions", torch.arange(LENGTH), persistent=False)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kinds: Tensor | None = None,
        next_labels: Tensor | None = None,
        return_dict: bool = False,
        **ignored: Any,
    ) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones_like(ids)
        mask = attention_mask[:, None, None, :].bool()
        x = self.wte(ids) + self.wpe(self.positions[: ids.shape[1]])
        # A stub's result and a tensor of the batch's own shape meet before the stage.
        x = x * attention_mask[..., None]
        if kinds is not None:
            x = x + self.segments(kinds)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x), mask)
        x = self.cuts[-1](x)
        loss = self.compute_loss(x, labels)
        if next_labels is not None:
            loss = loss + F.cross_entropy(self.pooler(x[:, 0]), next_labels)
        return {"loss": loss, "state": x} if return_dict else loss


class EncoderDecoder(nn.Module):
    """The encoder's result passes through each of the decoder's cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([Block(crossing=True), Block(crossing=True)])
        self.cuts = nn.ModuleList([CutPoint() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, **ignored: Any) -> Any:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        x = self.embed(ids)
        x = self.encoder[0](self.cuts[0](x), mask)
        memory = self.encoder[1](self.cuts[1](x), mask)
        # The target's embedding is made after the cut: made before, it would go around.
        memory = self.cuts[2](memory)
        y = self.decoder[0](self.embed(labels), None, memory)
        y, memory = self.cuts[3](y, memory)
        return F.cross_entropy(
            self.head(self.decoder[1](y, None, memory)).flatten(0, 1), labels.flatten()
        )


class UNet(nn.Module):
    """Its skips pass the cuts in a list that grows and shrinks, or go around all of them."""

    skips_pass = True

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(size, 4, 3, padding=1) for size in (3, 4, 4))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(2))
        self.cuts = nn.ModuleList([CutPoint() for _ in range(4)])
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 5)

    def cut(self, number: int, x: Tensor, skips: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if self.skips_pass:
            return self.cuts[number](x, skips)
        return self.cuts[number](x), skips

    def forward(self, images: Tensor, labels: Tensor, **ignored: Any) -> Any:
        skips = [x := self.relu(self.down[0](images))]
        for number in (0, 1):
            x, skips = self.cut(number, x, skips)
            x = self.relu(self.down[number + 1](F.max_pool2d(x, 2)))
            skips = [*skips, x] if number == 0 else skips
        for number in (2, 3):
            x, (*skips, skip) = self.cut(number, x, skips)
            x = torch.cat([F.interpolate(x, size=skip.shape[2:]), skip], 1)
            x = self.relu(self.up[number - 2](x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class ExpertGpt(Gpt):
    """A token goes to its best expert if that has room; the routers' balance passes the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in self.blocks)
        self.experts = nn.ParameterList(torch.randn(3, WIDTH, WIDTH) / 9 for _ in self.blocks)

    def forward(self, ids: Tensor, labels: Tensor, **ignored: Any) -> Any:
        x, balance = self.embed(ids), 0.0
        for number, router in enumerate(self.routers):
            x, balance = self.cuts[number](x, balance)
            gates = router(self.run_block(number, x)).softmax(-1)
            best = F.one_hot(gates.argmax(-1), 3).to(x)
            balance = balance + (gates.mean(1) * best.mean(1)).mean()
            best *= best.cumsum(1) <= 4
            x = x + torch.einsum("bne,bnd,edh->bnh", gates * best, x, self.experts[number])
        x, balance = self.cuts[-1](x, balance)
        return self.compute_loss(x, labels) + 0.1 * balance


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4))
            for i in range(4)
        )
        self.cuts = nn.ModuleList([CutPoint() for _ in range(4)])
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(4, 5)

    def forward(self, images: Tensor, labels: Tensor, **ignored: Any) -> Any:
        x = images
        for layer, cut in zip(self.layers, self.cuts, strict=True):
            x = self.relu(cut(layer(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


# Illegal ones.


class SkipGpt(Gpt):
    """A residual around the cuts."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        first = x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return self.compute_loss(self.cuts[-1](x) + first, labels)


class LearnedBiasGpt(Gpt):
    """A module with parameters runs once; every block uses what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(1, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        bias, x = self.bias(torch.ones(1, 1)), self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x) + bias)
        return self.compute_loss(self.cuts[-1](x), labels)


class RawAroundGpt(TiedGpt):
    """A value of a tied parameter is made before the cut and used after it."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        double, x = self.wte.weight * 2, self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return self.compute_loss(self.cuts[-1](x), labels) + double.mean()


class RoutingGpt(Gpt):
    """A whole number goes around the cuts, which no NaN can mark."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        route = self.head(x).argmax(-1)
        for number, block in enumerate(self.blocks):
            x = block(self.cuts[number](x))
        return self.compute_loss(self.cuts[-1](x) * route[..., None], labels)


class SharedNormNet(ConvNet):
    """One batch norm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3][1] = self.layers[0][1]


def make_inputs(size: int = 4, length: int = LENGTH, seed: int = 1) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (size, length), generator=draw)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def make_bert_inputs(size: int = 4, length: int = LENGTH) -> Inputs:
    inputs = make_inputs(size, length)
    mask = torch.ones_like(inputs["ids"])
    mask[:, length - 2 :] = 0
    return {**inputs, "attention_mask": mask, "kinds": mask, "next_labels": mask[:, 0], "flag": 3}


def make_padded_inputs(size: int = 4, length: int = LENGTH, seed: int = 1) -> Inputs:
    """Samples of all lengths; the second half of some batches has no label at all."""
    inputs = make_inputs(size, length, seed)
    held = torch.randint(0, length + 1, (size, 1), generator=torch.Generator().manual_seed(seed))
    held[1:2] = 0
    if seed == 1:
        held[size // 2 :] = 0
    labels = inputs["labels"].masked_fill(torch.arange(length) >= held, -100)
    return {**inputs, "labels": labels}


def make_images(size: int = 4, length: int = 6) -> Inputs:
    draw = torch.Generator().manual_seed(1)
    return {
        "images": torch.randn(size, 3, length, length, generator=draw),
        "labels": torch.arange(size) % 5,
    }


LEGAL: dict[str, tuple[Callable[[], nn.Module], Callable[..., Inputs]]] = {
    "gpt": (Gpt, make_inputs),
    "tied": (TiedGpt, make_inputs),
    "three-way tie": (ThreeWayGpt, make_inputs),
    "root parameters and buffers": (RootGpt, make_inputs),
    "cuts in a plain list": (PlainListGpt, make_inputs),
    "cuts as attributes": (AttributeGpt, make_inputs),
    "cuts inside blocks": (CutInBlockGpt, make_inputs),
    "module used twice": (SharedBlockGpt, make_inputs),
    "dict across cuts": (DictGpt, make_inputs),
    "data-dependent": (BranchGpt, make_inputs),
    "autocast": (AutocastGpt, make_inputs),
    "checkpoint": (CheckpointGpt, make_inputs),
    "frozen part": (FrozenGpt, make_inputs),
    "in place": (InPlaceGpt, make_inputs),
    "inputs changed": (ChangedInputsGpt, make_inputs),
    "swallowing": (Swallowing, make_inputs),
    "bert": (Bert, make_bert_inputs),
    "encoder-decoder": (EncoderDecoder, make_inputs),
    "convolutions": (ConvNet, make_images),
    "skips": (UNet, make_images),
    "experts": (ExpertGpt, make_inputs),
}


# Chaining stages by hand.


def chain(
    stages: list[Any], inputs: Inputs, on_segment: Callable[[int], None] | None = None
) -> tuple[Any, list[tuple[list[Tensor], Any]]]:
    """What the last stage returns, and for each stage what it got and what it gave."""
    crossing, log = None, []
    for stage in stages:
        got = [] if crossing is None else [tensor.detach().clone() for tensor in crossing.tensors]
        received = None if crossing is None else crossing._replace(tensors=tuple(got))
        crossing = stage.forward(inputs, received, on_segment)
        log.append((got, crossing))
    return crossing, log


def chain_backward(log: list[tuple[list[Tensor], Any]], loss: Tensor) -> None:
    loss.backward()
    for (got, _), (_, sent) in zip(reversed(log[1:]), reversed(log[:-1]), strict=True):
        pairs = [(s, g.grad) for s, g in zip(sent.tensors, got, strict=True) if g.grad is not None]
        if pairs:
            torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])


def sum_gradients(split: Any, stages: list[Any]) -> dict[str, Tensor]:
    """Over the stages that hold a parameter, once for each of its tensors."""
    total: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.parameters().items():
            if name == split.groups[name][0] and parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad
    return total
