"""Plain attributes of modules: changes to them are found, and undone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from varuna_core.runtime.split.attributes import KeptAttributes, kept_attributes


def fill(tensor: Tensor) -> None:
    tensor.fill_(7)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number": (lambda: 1, lambda value: value + 1),
    "a tensor that is replaced": (lambda: torch.zeros(2), lambda value: value + 1),
    "a tensor that is written into": (lambda: torch.zeros(2), fill),
    "a list that grows": (lambda: [1], lambda value: value.append(2)),
    "a list of a tensor": (lambda: [torch.zeros(2)], lambda value: fill(value[0])),
    "a tuple of a list": (lambda: ([1], 2), lambda value: value[0].clear()),
    "a dict": (lambda: {"a": [1]}, lambda value: value["a"].append(2)),
    "a set": (lambda: {1}, lambda value: value.add(2)),
    "a deque": (lambda: deque([1], maxlen=1), lambda value: value.append(2)),
    "torch's generator": (torch.Generator, lambda value: torch.rand(1, generator=value)[:0].size()),
    "numpy's generator": (np.random.default_rng, lambda value: (value.random(), None)[1]),
    "numpy's old one": (np.random.RandomState, lambda value: (value.rand(), None)[1]),
    "Python's generator": (random.Random, lambda value: (value.random(), None)[1]),
}


def show(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state()[1].tolist()) + str(value.get_state()[2:])
    return str(value.getstate()) if isinstance(value, random.Random) else repr(value)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_and_put_back(name: str) -> None:
    make, change = CHANGES[name]
    model = nn.Sequential(nn.Identity())
    model[0].kept = value = make()
    before, kept = show(value), KeptAttributes(model)
    assert kept.list_changed() == []
    result = change(value)
    if isinstance(result, (int, Tensor)):
        model[0].kept = result
    assert kept.list_changed() == [("0", "kept")]
    for _ in range(2):  # what is kept may be put back twice
        kept.restore()
        assert model[0].kept is value and show(value) == before
        assert kept.list_changed() == []
        change(value)


def test_attributes_that_come_and_go_are_put_back() -> None:
    model = nn.Identity()
    model.gone = 1
    with kept_attributes(model):
        del model.gone
        model.new = 2
    assert model.gone == 1 and not hasattr(model, "new")


class Hooked(nn.Module):
    """Puts in a hook in its first forward, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_hooked, self.seen = nn.Identity(), False, 0

    def see(self, *args: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.inner.register_forward_hook(self.see)
            self.is_hooked = True
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("is_whole", [True, False])
def test_hooks_go_with_the_attribute_that_tells_of_them(is_whole: bool) -> None:
    model = Hooked()
    places = None if is_whole else {("", "is_hooked"), ("inner", "_forward_hooks")}
    kept = KeptAttributes(model, places)
    model(torch.ones(1))
    kept.restore()
    model.seen = 0
    model(torch.ones(1))
    assert model.seen == 1 and len(model.inner._forward_hooks) == 1
    assert ("", "is_hooked") in kept.list_changed()
