"""Stored names are found under another prefix; what is missing or misshapen is named at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import small as models
from tests.models.small import Gpt, make_inputs
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.stored import match_model, match_names
from varuna_core.runtime.split.weights import Weights


def groups_of(*names: str) -> list[tuple[str, ...]]:
    return [(name,) for name in names]


@pytest.mark.parametrize(
    ("wanted", "stored", "found"),
    [
        (["a.x", "b.x"], ["a.x", "b.x", "c"], {"a.x": "a.x", "b.x": "b.x"}),
        (["m.a.x", "m.b.x"], ["a.x", "b.x"], {"m.a.x": "a.x", "m.b.x": "b.x"}),
        (["a.x", "b.x"], ["m.a.x", "m.b.x", "head"], {"a.x": "m.a.x", "b.x": "m.b.x"}),
        (["i.m.a.x", "i.m.b.x"], ["m.a.x", "m.b.x"], {"i.m.a.x": "m.a.x", "i.m.b.x": "m.b.x"}),
        (["m.a.x", "head.x"], ["a.x", "head.x"], {"m.a.x": "a.x", "head.x": "head.x"}),
        (["m.a.x", "head.x"], ["a.x"], {"m.a.x": "a.x"}),
        (
            ["b.LayerNorm.weight", "b.LayerNorm.bias"],
            ["m.b.LayerNorm.gamma", "m.b.LayerNorm.beta"],
            {
                "b.LayerNorm.weight": "m.b.LayerNorm.gamma",
                "b.LayerNorm.bias": "m.b.LayerNorm.beta",
            },
        ),
        (
            ["m.b.LayerNorm.weight", "m.a.x"],
            ["b.LayerNorm.gamma", "a.x"],
            {"m.b.LayerNorm.weight": "b.LayerNorm.gamma", "m.a.x": "a.x"},
        ),
        (["a.x"], ["b.y"], {}),
    ],
)
def test_names_are_matched(wanted: list[str], stored: list[str], found: dict[str, str]) -> None:
    assert match_names(groups_of(*wanted), stored) == found


def test_one_name_of_a_tied_tensor_suffices() -> None:
    assert match_names([("m.w.x", "head.x"), ("m.a.x",)], ["w.x", "a.x"]) == {
        "m.w.x": "w.x",
        "m.a.x": "a.x",
    }
    assert match_names([("w.x", "head.x")], ["head.x"]) == {"head.x": "head.x"}


def test_two_prefixes_that_would_do_are_refused() -> None:
    stored = [f"{part}.block.{n}.x" for part in ("encoder", "decoder") for n in range(3)]
    with pytest.raises(
        SplitError, match=r"match the model's in two ways, '.*coder\.' taken from them"
    ):
        match_names(groups_of(*(f"block.{n}.x" for n in range(3))), stored)


def test_a_stored_tensor_is_not_taken_for_two() -> None:
    """Two towers, of which the file has one: the other is missing, not the same."""
    assert match_names(groups_of("a.x", "b.x", "m.a.x", "m.b.x"), ["a.x", "b.x"]) == {
        "a.x": "a.x",
        "b.x": "b.x",
    }


class Lazy(Mapping[str, Tensor]):
    """Fails when a tensor is read."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is read")

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)


def match(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    return match_model(model, groups_of(*dict(model.named_parameters())), state)


def test_every_fault_of_a_lazy_file_is_told_before_anything_is_read() -> None:
    model = Gpt()
    state: dict[str, Tensor] = {f"module.{n}": t for n, t in model.state_dict().items()}
    assert match(model, Lazy(state))["wte.weight"] == "module.wte.weight"
    state["module.wte.weight"] = torch.zeros(7, 3)
    del state["module.blocks.2.up.bias"]
    with pytest.raises(SplitError) as caught:
        match(model, Lazy(state))
    assert "'module.wte.weight' has shape [7, 3] in the state dict, [" in str(caught.value)
    assert "the state dict has no 'blocks.2.up.bias'; it has 'module.w" in str(caught.value)


def test_weights_saved_in_half_precision_are_those_of_the_model() -> None:
    model = models.TiedGpt()
    state = {
        f"inner.{n}": t.bfloat16() for n, t in model.state_dict().items() if n != "head.weight"
    }
    stage = split_model(models.TiedGpt(), make_inputs(), 2).make_stage(1, state_dict=state)
    for name, parameter in stage.parameters().items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, model.get_parameter(name).bfloat16().float())


def test_a_table_that_the_file_lacks_stays_and_a_norms_averages_are_missed() -> None:
    class Placed(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(5))

    state: dict[str, Any] = Gpt().state_dict()
    weights = Weights(model=Placed(), state_dict=state)
    assert weights.make(("table",), Placed().table).tolist() == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
    net = models.ConvNet()
    state = {name: tensor for name, tensor in net.state_dict().items() if "running_" not in name}
    with pytest.raises(SplitError, match=r"has none of '.*running_mean'"):
        match(net, state)
