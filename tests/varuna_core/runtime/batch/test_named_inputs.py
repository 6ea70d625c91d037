"""Batches as loaders give them, and Varuna called as the plain model is in an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import small
from varuna_core import Varuna, cut_before, with_loss
from varuna_core.runtime.batch.named_inputs import InputNames


def make_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return cut_before(with_loss(net, nn.CrossEntropyLoss()), "2")


def make_batch(size: int, seed: int = 1) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=draw), torch.arange(size) % 3]


def test_a_batch_of_a_loader_is_given_as_it_is() -> None:
    losses = []
    for by_name in (False, True):
        names = ("input", "target") if by_name else None
        first, batch = (
            dict(zip(names, each, strict=True)) if names else each
            for each in (make_batch(2), make_batch(6))
        )
        model = Varuna(make_net(), "0;", first, 6, 2, device="cpu", partition="1-1",
                       schedule="interleaved", stages_per_rank=2)  # fmt: skip
        losses += [model.step(batch)[0], model.evaluate(batch)]
        model.close()
    assert losses[:2] == losses[2:]


def test_an_evaluation_of_a_plain_script_stands_as_it_is() -> None:
    plain = make_net().eval()
    model = Varuna(make_net(), "0;", make_batch(2), 4, 2, device="cpu",
                   schedule="interleaved", stages_per_rank=2)  # fmt: skip
    model.eval()
    images, target = make_batch(7)
    with torch.no_grad():
        torch.testing.assert_close(model(images), plain(images))
        assert nn.functional.cross_entropy(model(images), target) == pytest.approx(
            model(images, target=target)["loss"]
        )
    with pytest.raises(RuntimeError, match=r"call step\(inputs\).*under torch\.no_grad\(\)"):
        model(images)
    model.close()


def test_an_input_that_the_model_does_not_take_is_answered_with_those_that_it_does() -> None:
    """`with_loss` calls it target, and torch said only that `labels` was not expected."""
    names = InputNames(with_loss(nn.Linear(4, 3), nn.CrossEntropyLoss()))
    with pytest.raises(TypeError, match=r"'labels', which .*; its inputs are input, target$"):
        names.name({"input": 1, "labels": 2})
    assert names.name({"input": 1, "target": 2}) == {"input": 1, "target": 2}


def test_inputs_that_have_no_place_are_refused_by_number() -> None:
    names = InputNames(small.Gpt())
    assert names.bind([1], {"labels": 2}) == {"ids": 1, "labels": 2}
    assert names.name((1, 2)) == {"ids": 1, "labels": 2}
    assert [*names.name(torch.ones(1))] == ["ids"]
    with pytest.raises(TypeError, match=r"3 inputs by position, but .* takes 2 \(ids, labels\)"):
        names.name([1, 2, 3])
    with pytest.raises(TypeError, match="'ids' is passed both by position and by name"):
        names.bind([1], {"ids": 2})
