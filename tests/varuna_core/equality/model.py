"""The drawn model: an embedding, blocks of every kind with cuts between them, a head, a loss."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from tests.varuna_core.equality.spec import Spec
from varuna_core import CutPoint, TokenMean

WIDTH, LENGTH, VOCAB, TABLE = 4, 3, 8, 13
IGNORED = -100


class Mlp(nn.Module):
    """Shared by tensor ranks, by columns and then rows; dropout falls on what is shared."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        if self.drop is not None:
            y = self.drop(y)
        return x + self.down(y)


class Attention(nn.Module):
    """Query, key and value apart, heads of two."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        return x + self.proj((scores @ v).transpose(1, 2).flatten(2))


class Norm(nn.Module):
    """Batch norm over features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Norm2d(nn.Module):
    """A convolution of images and its batch norm, which leave the other memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT.contiguous().mT
        return x + self.norm(self.conv(x[:, None])).to(x.dtype).mean(1)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x.transpose(1, 2)).transpose(1, 2)) + x


class Counter(nn.Module):
    """Counts its calls in a buffer, and weakens what passes by it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x / (1 + 0.125 * self.count)


class Average(nn.Module):
    """Keeps a running average of what passes, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = x.detach().mean((0, 1))
            self.average = mean if self.average is None else 0.75 * self.average + 0.25 * mean
        return x if self.average is None else x + self.linear(x - self.average)


class Calls(nn.Module):
    """Counts its calls in a plain number, and weakens what passes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(x) / self.calls


class Stream(nn.Module):
    """Draws masks from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.linear = torch.Generator().manual_seed(5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.stream, dtype=torch.float32) < 0.5
        return x + self.linear(x) * mask.to(x.dtype)


class Foreign(nn.Module):
    """Draws masks from Python's and numpy's streams while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        mask = np.random.random(x.shape) < random.choice([0.25, 0.5])
        return x + self.linear(x) * torch.from_numpy(mask).to(x.dtype)


class Listed(nn.Module):
    """A ModuleList that its owner runs through, one of its layers never."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts[:2]:
            x = torch.tanh(part(x)) + x
        return x


class CheckedDropout(nn.Module):
    """Dropout that a backward draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + y


class Complex(nn.Module):
    """A layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        real = x.to(self.linear.weight.real.dtype)
        y = self.linear(torch.complex(real, real.roll(1, -1)))
        return x + (y.real + torch.sin(y.imag)).to(x.dtype)


class Mapped(nn.Module):
    """A layer that vmap runs on each position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.vmap(self.linear, in_dims=1, out_dims=1)(x)
        return x + y.sin()


class Pushed(nn.Module):
    """A layer with its derivative along a direction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, slope = torch.func.jvp(self.linear, (x,), (x.cos(),))
        return x + torch.sin(value) * slope


class InnerGrad(nn.Module):
    """A step down a layer's own energy, by torch.func.grad within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.func.grad(lambda x: self.linear(x).square().sum())(x)
        return x - 0.25 * y


class Force(InnerGrad):
    """The same by torch.autograd.grad, as models of molecules do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(z).square().sum()
            (y,) = torch.autograd.grad(energy, z, create_graph=True)
        return x - 0.25 * y


class Flash(nn.Module):
    """Causal attention by torch's fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class Flex(nn.Module):
    """Flex attention, which has no backward on a CPU (torch 2.13), of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y: Any = flex_attention(q, k, v)
        return x + y.transpose(1, 2).flatten(2).to(x.dtype)


class Ragged(nn.Module):
    """A nested tensor that is made and used in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([*x.unbind()], layout=torch.jagged)
        return x + torch.stack([*torch.sin(self.linear(ragged)).unbind()])


class Rows(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.abs() * 2).long().amax(-1).clamp(max=VOCAB - 1))


def build_pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.5)


def build_old_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


def build_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def build_frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


MODULES: dict[str, Any] = {
    "sequential": build_sequence,
    "listed": Listed,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "conv": Conv,
    "norm": Norm,
    "norm2d": Norm2d,
    "dropout": lambda: nn.Dropout(0.3),
    "mlp": Mlp,
    "mlp_dropout": lambda: Mlp(0.3),
    "attention": Attention,
    "count": Counter,
    "frozen_linear": build_frozen,
    "checked_dropout": CheckedDropout,
    "average": Average,
    "calls": Calls,
    "stream": Stream,
    "foreign": Foreign,
    "complex": Complex,
    "mapped": Mapped,
    "pushed": Pushed,
    "inner_grad": InnerGrad,
    "force": Force,
    "flash": Flash,
    "flex": Flex,
    "pruned": build_pruned,
    "old_norm": build_old_norm,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "ragged": Ragged,
    "rows": Rows,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
"""Blocks that are a module and nothing else."""

LINEAR = (
    "linear",
    "residual",
    "no_grad",
    "detached",
    "twice",
    "checked",
    "branch",
    "frac",
    "switch",
)
LINEAR += ("frac_in_place", "time", "shared_twice")
BARE = ("shared", "tied_use", "plain", "scaled", "gain", "frozen", "masked", "in_place", "extra")
BARE += (
    "skip_start",
    "skip_alias",
    "skip_end",
    "table",
    "in_place_relu",
    "view_in_place",
    "numbers",
)
RARE = ("rows",)
"""Refused wherever they are: most draws have none."""

RISKY = ("keep", "use_kept", "shared_norm", "root_count", "read_count")
"""Legal only where no stage boundary lies between two of them."""

FRACTIONS = ("frac", "frac_in_place")
SHARED_BY_RANKS = ("mlp", "mlp_dropout", "attention")
HALF_KEPT = ("time",)
"""Inputs that are to stay in fp32."""


class Drawn(nn.Module):
    """Does what its spec says, block by block."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList([self.build(block.kind) for block in spec.blocks])
        self.cuts = nn.ModuleList([CutPoint() for block in spec.blocks if block.form is not None])
        if spec.has("shared"):
            self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        if spec.has("shared_norm"):
            self.shared_norm = Norm()
        if spec.has("gain"):
            self.gain = nn.Parameter(1 + torch.rand(WIDTH))
        if spec.has("frozen", "scaled"):
            self.shift = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        if spec.has("scaled"):
            self.register_buffer("scale", 1 + torch.rand(WIDTH))
        if spec.has("root_count", "read_count"):
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if spec.tied:
            self.head.weight = self.embed.weight
        if spec.frozen:
            self.embed.requires_grad_(False)
            self.blocks[: spec.frozen - 1].requires_grad_(False)

    @staticmethod
    def build(kind: str) -> nn.Module:
        if kind in MODULES:
            made: nn.Module = MODULES[kind]()
            return made
        return nn.Linear(WIDTH, WIDTH) if kind in LINEAR else nn.Identity()

    def tensor_parallel_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan: dict[str, Any] = {}
        for number, block in enumerate(self.spec.blocks):
            if block.kind in ("mlp", "mlp_dropout"):
                plan[f"blocks.{number}.up"] = ColwiseParallel()
                plan[f"blocks.{number}.down"] = RowwiseParallel()
            elif block.kind == "attention":
                plan[f"blocks.{number}.[qkv]"] = ColwiseParallel()
                plan[f"blocks.{number}.proj"] = RowwiseParallel()
        return plan

    def forward(self, ids: Tensor, labels: Tensor, **more: Any) -> Any:
        more = {**more, **more.pop("more", {})}
        spec, point = self.spec, 0
        x = self.embed(ids)
        carried = {"extra": x.new_zeros(()), "skip": x * 1}
        self.kept = x * 1
        for number, block in enumerate(spec.blocks):
            if block.form is not None:
                x, carried = self.pass_cut(self.cuts[point], block.form, x, carried, number)
                point += 1
            x = self.run(block.kind, self.blocks[number], x, carried, ids, more)
        return self.finish(x, carried["extra"], labels)

    def pass_cut(
        self, cut: nn.Module, form: str, x: Tensor, carried: dict[str, Tensor], number: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        names = self.spec.carries
        held = [carried[name] for name in names]
        if form == "dict":
            got = cut({"x": x, "rest": [*held, None, number]})
            x, held = got["x"], got["rest"][: len(names)]
        elif form == "popped":
            x, held = cut((x, [*held, x * 0]))
            x = x + held.pop()
        elif form == "edited":
            got = cut({"x": x, "held": [*held], "number": number})
            x, held = got.pop("x"), got["held"]
            held.append(x)
            got["number"] += 1
            del held[-1], got["number"]
            got |= {"more": x}
        elif form == "nested":
            (x, held), _ = cut((x, held), "word")
        else:
            got = cut(x, *held)
            x, held = (got, []) if not held else (got[0], list(got[1:]))
        return x, {**carried, **dict(zip(names, held, strict=True))}

    def run(
        self,
        kind: str,
        layer: nn.Module,
        x: Tensor,
        carried: dict[str, Tensor],
        ids: Tensor,
        more: dict[str, Any],
    ) -> Tensor:
        if kind in MODULES or kind == "linear":
            x = layer(x)
        elif kind == "residual":
            x = x + layer(x).relu()
        elif kind == "shared":
            x = self.shared(x) * 1  # tanh needs its output: a change in place may follow
        elif kind == "tied_use":
            x = F.linear(x, self.embed.weight[:WIDTH])
        elif kind == "plain":
            x = torch.cat([x[..., 1:], x[..., :1].sin()], -1)
        elif kind == "scaled":
            x = x * self.scale + torch.sin(self.shift)
        elif kind == "gain":
            x = x * self.gain
        elif kind == "frozen":
            x = x + self.shift
        elif kind == "masked":
            x = x.masked_fill((ids > 5)[..., None], 0.5)
        elif kind == "in_place":
            x.mul_(1.5)
        elif kind == "in_place_relu":
            x = F.leaky_relu_(x * 2, 0.1) * 1  # as tanh
        elif kind == "view_in_place":
            x = x * 1
            x[:, 0] += 1
        elif kind == "no_grad":
            with torch.no_grad():
                y = layer(x)
            x = x + y
        elif kind == "detached":
            x = layer(x.detach()) + x
        elif kind == "extra":
            carried["extra"] = carried["extra"] + x.pow(2).mean()
            x = x + carried["extra"]
        elif kind == "twice":
            x = layer(layer(x).tanh())
        elif kind == "shared_twice":
            x = torch.tanh(layer(x)) + F.linear(x, layer.weight.T)
        elif kind == "checked":
            x = checkpoint(layer, x, use_reentrant=False)
        elif kind == "branch":
            x = layer(x) if int(ids.sum()) % 2 else x * 0.5
        elif kind == "switch":
            x = layer(x) if more["late"] else x * 0.5
        elif kind == "skip_start":
            carried["skip"] = x * 0.5
        elif kind == "skip_alias":
            carried["skip"] = x  # what changes one in place changes both
        elif kind == "skip_end":
            x = x + carried["skip"]
        elif kind == "numbers":
            x = x + (x.argmax(-1, keepdim=True) * 0).to(x.dtype)
        elif kind == "frac":
            x = x + layer(more["frac"] * 1)[:, None]  # may be changed later
        elif kind == "frac_in_place":
            more["frac"].add_(0.5)
            x = x + layer(more["frac"] * 1)[:, None]  # may be changed later
        elif kind == "time":
            steps = torch.arange(1, WIDTH + 1, device=x.device)
            wave = torch.sin(more["time"][:, None] * steps)
            x = x + layer(wave.to(x.dtype))[:, None]
        elif kind == "table":
            x = x * (1 + more["table"][:WIDTH].mean())
        elif kind == "keep":
            self.kept = x * 0.5
        elif kind == "use_kept":
            x = x + self.kept
        elif kind == "shared_norm":
            x = self.shared_norm(x)
        elif kind == "root_count":
            self.count += 1
        elif kind == "read_count":
            x = x / (1 + self.count)
        else:
            raise ValueError(kind)
        return x

    def finish(self, x: Tensor, extra: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        if self.spec.full_loss and logits.dtype != torch.float64:
            logits, extra = logits.float(), extra.float()
        flat, output = logits.flatten(0, 1), self.spec.output
        if self.spec.tokens:
            return self.give_tokens(flat, labels, extra)
        loss = F.cross_entropy(flat, labels.flatten()) + 0.1 * extra
        if output == "dict":
            return {"logits": logits, "loss": loss}
        if output == "tuple":
            return loss, logits
        return SimpleNamespace(loss=loss) if output == "object" else loss

    def give_tokens(self, flat: Tensor, labels: Tensor, extra: Tensor) -> Any:
        """A mean over the tokens that count, in each way in which it may be returned."""
        summed, count = _sum_up(flat, labels)
        summed = summed + 0.1 * extra * count
        named = self.spec.output == "dict"
        return {"loss": (summed, count)} if named else TokenMean(summed, count)


class TwoMeans(Drawn):
    """Its loss is the sum of two means, of other tokens each."""

    def give_tokens(self, flat: Tensor, labels: Tensor, extra: Tensor) -> Any:
        summed, count = _sum_up(flat, labels)
        return TokenMean(summed + 0.1 * extra * count, count) + 0.1 * TokenMean(
            *_sum_up(flat, _choose_some(labels))
        )

    def loss_counts(self, labels: Tensor, **others: Any) -> Any:
        return _count(labels), _count(_choose_some(labels))


class MeanOfMeans(Drawn):
    """Divides by itself, as a model that knows nothing better."""

    def give_tokens(self, flat: Tensor, labels: Tensor, extra: Tensor) -> Any:
        summed, count = _sum_up(flat, labels)
        return summed / count + 0.1 * extra


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def _sum_up(flat: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wanted = labels.flatten()
    summed = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    return summed, _count(labels)


def _choose_some(labels: Tensor) -> Tensor:
    return labels.masked_fill(labels % 2 == 0, IGNORED)


def choose_kind(spec: Spec) -> type[Drawn]:
    return TwoMeans if spec.tokens and spec.output == "object" else Drawn


def build_model(spec: Spec) -> Drawn:
    torch.manual_seed(spec.seed)
    return choose_kind(spec)(spec)


def make_batch(spec: Spec, step: int, size: int | None = None) -> dict[str, Any]:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(100 * spec.seed + step)
    size = spec.batches[step] if size is None else size
    length = LENGTH - (spec.shorter and step == 1)
    ids = torch.randint(0, VOCAB, (size, length), generator=draw)
    labels = torch.randint(0, VOCAB, (size, length), generator=draw)
    if spec.tokens:
        labels[torch.rand(size, length, generator=draw) < 0.4] = IGNORED
        labels[:, 0] = ids[:, 0]  # none without a token
    more: dict[str, Any] = {}
    if spec.has(*FRACTIONS):
        more["frac"] = torch.randn(size, WIDTH, generator=draw)
    if spec.has("time"):
        more["time"] = torch.randint(1, 1000, (size,), generator=draw).float() + 0.25
    if spec.has("table"):
        more["table"] = torch.rand(TABLE, generator=draw)
    if spec.has("switch"):
        more["late"] = step > 0
    if spec.nested:
        more = {"more": more}
    return {"ids": ids, "labels": labels, **more}


def cut_batch(inputs: Any, size: int, held: range) -> Any:
    if isinstance(inputs, dict):
        return {name: cut_batch(value, size, held) for name, value in inputs.items()}
    if isinstance(inputs, Tensor) and len(inputs) == size and len(inputs) != TABLE:
        return inputs[held.start : held.stop].clone()
    return inputs


def bend(gradient: Tensor) -> Tensor:
    """A hook: of each element apart, and not the same for a sum as for its parts."""
    return gradient / (1 + gradient.abs())


def is_bent(name: str, parameter: Tensor) -> bool:
    return name.startswith("blocks.") and parameter.requires_grad


def add_hooks(named: Any) -> None:
    for name, parameter in named:
        if is_bent(name, parameter):
            parameter.register_hook(bend)
