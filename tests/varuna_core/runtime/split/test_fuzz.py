"""Random models in random partitions: equal to the plain model, or refused by name, never wrong."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.small import chain, chain_backward, sum_gradients
from tests.segments import announce_segments
from varuna_core.runtime.split.cut import CutPoint, SplitError
from varuna_core.runtime.split.split import split_model

WIDTH, SIZE = 4, 3
SAFE = ["linear", "residual", "shared", "tied", "plain", "scaled", "gain", "frozen", "masked"]
SAFE += ["dropout", "in place", "no_grad", "detached", "norm", "extra", "twice", "checked"]
# Only legal where no stage boundary lies between two of them, or in between.
RISKY = ["keep", "use kept", "keep number", "use number", "count", "read count", "shared norm"]
FORMS = ["one", "two", "dict"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model, and how it is cut."""

    blocks: tuple[tuple[str, str | None], ...]
    """What each block does, and in what form its cut is passed before it."""

    partition: str

    @property
    def is_risky(self) -> bool:
        return any(kind in RISKY for kind, _ in self.blocks)


@st.composite
def specs(draw: st.DrawFn, risky: bool) -> Spec:
    kinds = st.sampled_from([*SAFE, *RISKY] if risky else SAFE)
    forms = st.sampled_from([*FORMS, None])
    blocks = draw(st.lists(st.tuples(kinds, forms), min_size=2, max_size=7))
    num_cuts = sum(form is not None for _, form in blocks)
    assume(num_cuts > 0)
    inner = draw(st.lists(st.integers(1, num_cuts), min_size=1, max_size=3))
    ends = [0, *sorted(inner), num_cuts + 1]
    return Spec(blocks=tuple(blocks), partition="-".join(str(b - a) for a, b in pairwise(ends)))


class Drawn(nn.Module):
    """Does what its spec says, block by block."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in spec.blocks])
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in spec.blocks])
        self.shared_norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.cuts = [CutPoint() for _ in spec.blocks]
        self.gain, self.shift = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.shift.requires_grad_(False)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        for layer, (kind, _) in zip(self.layers, spec.blocks, strict=True):
            if kind == "tied":
                layer.weight = self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask, wave = (ids > 5)[:, None], torch.sin(self.shift)
        x, extra = self.embed(ids), torch.zeros(())
        self.kept, self.number = x, x.argmax(-1)
        for number, (kind, form) in enumerate(self.spec.blocks):
            cut = self.cuts[number]
            if form == "one" and "extra" not in {kind for kind, _ in self.spec.blocks}:
                x = cut(x)
            elif form == "dict":
                got = cut({"x": x, "rest": [extra, None, number]})
                x, extra = got["x"], got["rest"][0]
            elif form is not None:
                x, extra = cut(x, extra)
            x, extra = self.run(kind, number, x, extra, mask, wave)
        return F.cross_entropy(self.head(x), labels) + 0.1 * extra

    def run(
        self, kind: str, number: int, x: Tensor, extra: Tensor, mask: Tensor, wave: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[number]
        if kind in ("linear", "tied"):
            x = F.linear(x, layer.weight[:WIDTH].T, layer.bias) if kind == "tied" else layer(x)
        elif kind == "residual":
            x = x + layer(x).relu()
        elif kind == "shared":
            x = self.shared(x) * 1  # tanh needs its output: a change in place may follow
        elif kind == "plain":
            x = torch.cat([x[:, 1:], x[:, :1].sin()], 1)
        elif kind == "scaled":
            x = x * self.scale + wave
        elif kind == "gain":
            x = x * self.gain
        elif kind == "frozen":
            x = x + self.shift
        elif kind == "masked":
            x = x.masked_fill(mask, 0.5)
        elif kind == "dropout":
            x = self.drop(x)
        elif kind == "in place":
            x.mul_(1.5)
        elif kind == "no_grad":
            with torch.no_grad():
                x = layer(x)
        elif kind == "detached":
            x = layer(x.detach()) + x
        elif kind == "norm":
            x = self.norms[number](x)
        elif kind == "extra":
            extra = extra + x.pow(2).mean()
            x = x + extra
        elif kind == "twice":
            x = layer(layer(x).tanh())
        elif kind == "checked":
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        elif kind == "keep":
            self.kept = x
        elif kind == "use kept":
            x = x + self.kept
        elif kind == "keep number":
            self.number = x.argmax(-1)
        elif kind == "use number":
            x = x * self.number[:, None]
        elif kind == "count":
            self.count += 1
        elif kind == "read count":
            x = x * self.count
        elif kind == "shared norm":
            x = self.shared_norm(x)
        return x, extra


def make_inputs(size: int) -> dict[str, Any]:
    ids = torch.arange(size) * 3 % 8
    return {"ids": ids, "labels": (ids + 1) % 8}


def seed(segment: int) -> None:
    torch.manual_seed(100 + segment)


def check_equal(spec: Spec) -> None:
    """SplitError, or the plain model's loss, gradients and buffers."""
    torch.manual_seed(0)
    model = Drawn(spec)
    num_stages = spec.partition.count("-") + 1
    split = split_model(copy.deepcopy(model), make_inputs(SIZE), num_stages, spec.partition)
    stages = [split.make_stage(i) for i in range(num_stages)]
    for size in (SIZE, SIZE + 2, SIZE):
        inputs = make_inputs(size)
        with announce_segments(seed):
            loss = model(**inputs)
        loss.backward()
        out, log = chain(stages, inputs, seed)
        chain_backward(log, out)
        torch.testing.assert_close(out, loss, rtol=1e-6, atol=1e-7)
    summed = sum_gradients(split, stages)
    for name, parameter in model.named_parameters():
        plain, ours = parameter.grad, summed.get(name)
        if plain is None or ours is None:  # a stage may add zeros where the plain model has None
            assert not any(grad is not None and bool(grad.any()) for grad in (plain, ours)), name
        else:
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6, msg=f"{name}: {ours}")
    parts = {n: b for stage in stages for n, b in stage.buffers().items()}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(parts[name], buffer, rtol=1e-6, atol=1e-7, msg=name)


@settings(max_examples=40, deadline=None)
@given(specs(risky=False))
def test_a_legal_model_equals_the_plain_one_in_any_partition(spec: Spec) -> None:
    note(str(spec))
    check_equal(spec)


@settings(max_examples=40, deadline=None)
@given(specs(risky=True))
def test_any_model_is_split_right_or_refused_by_name(spec: Spec) -> None:
    note(str(spec))
    try:
        check_equal(spec)
    except SplitError as error:
        assert spec.is_risky
        assert "cut " in str(error) or "'count'" in str(error) or "norm" in str(error)
