"""Every pass through a stage gives the bits of the plain one, whatever its backward is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import Gpt, PaddedGpt, make_inputs
from tests.ranks.rerun import instead_of_cuda_graphs
from varuna_core import CutPoint, Varuna
from varuna_core.runtime.engine import passes, weight_grads
from varuna_core.schedule.actions import Action, ScheduleError

Order = tuple[str, ...]

BOTH, SPLIT = ("F", "B"), ("F", "I", "W")
PASSES: dict[str, tuple[str, Order, dict[str, Any]]] = {
    "plain": ("PlainPass", BOTH, {}),
    "plain, split": ("PlainPass", SPLIT, {}),
    "recorded": ("RecordedPass", BOTH, {"cuda_graphs": True}),
    "offloaded": ("OffloadedPass", ("FO", "LB"), {}),
    "offloaded, split": ("OffloadedPass", ("FO", "LI", "W"), {}),
    "full": ("RecomputePass", ("f", "RB"), {}),
    "full, split": ("RecomputePass", ("f", "RI", "W"), {}),
    "selective": ("SelectivePass", ("f", "RB"), {"recompute": "selective"}),
    "selective, split": ("SelectivePass", ("f", "RI", "W"), {"recompute": "selective"}),
}
"""The class of a pass, the actions of a micro-batch before and after others take their turn, and
options of Varuna."""


class Normed(nn.Module):
    """A model with buffers that change, and large linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(4):
            x = x if number == 0 else self.cuts[number - 1](x)
            x = self.norms[number](self.layers[number](x)).relu()
        return x.square().mean()


def make_rows(size: int = 4, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))}


def make_dropping() -> nn.Module:
    return Gpt(dropout=0.2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "dropout": (make_dropping, make_inputs),
    "token mean": (PaddedGpt, make_inputs),
    "batch norm": (Normed, make_rows),
}


def order_actions(parts: Order) -> list[Action]:
    """Three micro-batches through two stages, two of them under way at once."""
    first, *rest = parts

    def run(kinds: str, stage: int, number: int) -> list[Action]:
        return [Action(kind, stage, number) for kind in kinds]  # type: ignore[arg-type]

    actions = []
    for number in range(3):
        actions += run(first, 0, number) + run(first, 1, number)
        if number:
            actions += run(rest[0], 1, number - 1) + run(rest[0], 0, number - 1)
    actions += run(rest[0], 1, 2) + run(rest[0], 0, 2)
    for number in range(3):
        for later in rest[1:]:
            actions += run(later, 0, number) + run(later, 1, number)
    return actions


def train(
    model: str, parts: Order, options: dict[str, Any], order: list[str]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Three steps: losses, and gradients and buffers by name."""
    build, make_batch = MODELS[model]
    torch.manual_seed(0)
    with instead_of_cuda_graphs() if "cuda_graphs" in options else nullcontext():
        varuna = Varuna(
            build(), "0;", make_batch(2), 6, 2,
            device="cpu", schedule="interleaved", stages_per_rank=2,
            trace=lambda action, *times: order.append(action), **options,
        )  # fmt: skip
        losses, tensors = [], []
        for step in range(3):
            varuna._plan = lambda num: (tuple(order_actions(parts)), 0)  # type: ignore[method-assign]
            losses.append(varuna.step(make_batch(6, seed=step))[0])
            held = {n: p.grad.clone() for n, p in varuna.named_parameters() if p.grad is not None}
            held |= {name: buffer.clone() for name, buffer in varuna.named_buffers()}
            tensors.append(held)
            varuna.zero_grad()
        losses.append(varuna.evaluate(make_batch(6, seed=9)))
    return losses, tensors


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_gives_the_bits_of_the_plain_one(
    name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_grads, "LARGE", 0)  # all layers go the way of large ones
    kind, parts, options = PASSES[name]
    usual = train(model, BOTH, {}, [])
    made: set[str] = set()
    make = passes.Passes.make

    def note(self: passes.Passes, *given: Any) -> passes.Pass:
        one = make(self, *given)
        made.add(type(one).__name__)
        return one

    monkeypatch.setattr(passes.Passes, "make", note)
    order: list[str] = []
    found = train(model, parts, options, order)
    # A recorded gradient is added to its sum by a kernel of its own, not within its product.
    rtol, atol = (1e-6, 1e-12) if name == "recorded" else (0.0, 0.0)
    torch.testing.assert_close(found, usual, rtol=rtol, atol=atol)
    assert made == {kind}
    assert order == [str(action) for action in order_actions(parts)] * 3


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("F", "RB"), "1R0: a PlainPass has no R"),
        (("f", "OB"), "1O0: a RecomputePass has no O"),
        (("F", "LB"), "1L0: a PlainPass has no L"),
    ],
)
def test_an_action_that_a_pass_lacks_is_refused(parts: Order, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        train("token mean", parts, {}, [])
