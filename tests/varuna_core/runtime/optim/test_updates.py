"""Optimizers that are taken, refused, or missing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna_core import CutPoint, Varuna
from varuna_core.runtime.optim.optimizers import Lamb
from varuna_core.runtime.optim.updates import check_optimizers, refuse_whole


class Net(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(4, 4), nn.Linear(4, 4), CutPoint()
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.second(self.cut(self.first(x)))
        return F.mse_loss(out, y, reduction=self.reduction)


BATCH = {"x": torch.ones(4, 4), "y": torch.zeros(4, 4)}
WEIGHT = nn.Parameter(torch.zeros(2, 2))


def make(model: nn.Module) -> Varuna:
    return Varuna(model, "0;", BATCH, 4, 2, device="cpu")


@pytest.mark.parametrize(
    ("kind", "has_pieces", "is_spread", "words"),
    [
        (Lamb, "zero=3", "", "Lamb needs whole tensors.*remove zero=3"),
        (torch.optim.Muon, "tensor parallelism", "", "Muon needs whole tensors"),
        (torch.optim.LBFGS, "", "2 pipeline stages", "LBFGS needs all parameters together"),
        (torch.optim.Muon, "", "2 pipeline stages", ""),
        (torch.optim.LBFGS, "", "", ""),
        (torch.optim.SGD, "zero=3", "2 pipeline stages", ""),
    ],
)
def test_an_optimizer_that_looks_at_more_than_a_rank_has_is_refused(
    kind: Any, has_pieces: str, is_spread: str, words: str
) -> None:
    optimizers = [kind([WEIGHT])]
    if not words:
        refuse_whole(optimizers, has_pieces=has_pieces, is_spread=is_spread)
        return
    with pytest.raises(ValueError, match=words):
        refuse_whole(optimizers, has_pieces=has_pieces, is_spread=is_spread)


def test_two_optimizers_may_not_hold_one_parameter() -> None:
    twice = [torch.optim.SGD([WEIGHT]), torch.optim.SGD([WEIGHT])]
    with pytest.raises(ValueError, match="holds parameters of another optimizer"):
        check_optimizers(twice, {id(WEIGHT)})
    with pytest.raises(ValueError, match="not this rank's"):
        check_optimizers(twice[:1], set())


@pytest.mark.parametrize(
    ("case", "is_told"), [("made before Varuna", True), ("never set", False), ("sums up", False)]
)
def test_an_optimizer_that_changes_nothing_is_told_of(
    case: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    before = torch.optim.SGD(model.parameters())
    varuna = make(model)
    after = torch.optim.SGD(varuna.parameters())
    for _ in range(3):
        varuna.step(BATCH)
        if case != "sums up":
            (before if is_told else after).step()
            varuna.zero_grad()
    varuna.close()
    assert ("make the optimizer after Varuna" in caplog.text) == is_told


@pytest.mark.parametrize(("reduction", "is_told"), [("sum", True), ("mean", False)])
def test_a_loss_that_is_a_sum_is_told_of(
    reduction: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(Net(reduction)).close()
    assert ("the model's loss ends in a sum" in caplog.text) == is_told
