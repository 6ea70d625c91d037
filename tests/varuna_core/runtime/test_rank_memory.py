"""A rank holds its own part: not the model that it was given, nor a state that a load replaces."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.small import ConvNet, Gpt, TiedGpt, make_images, make_inputs
from varuna_core import Varuna
from varuna_core.checkpoint.store.reader import CheckpointReader
from varuna_core.runtime.optim.precision import add_wide


def build(model: nn.Module, inputs: Any, **options: Any) -> Varuna:
    return Varuna(model, "0;", inputs, 4, 2, device="cpu", **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [Gpt, TiedGpt, ConvNet])
def test_the_given_models_memory_is_free_once_varuna_has_it(
    kind: type[nn.Module], precision: str
) -> None:
    model = kind()
    inputs = make_images() if kind is ConvNet else make_inputs()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    originals = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    varuna = build(model, inputs, precision=precision)
    del model
    gc.collect()
    assert not [ref for ref in originals if ref() is not None]
    assert all(tensor.is_meta for tensor in varuna.split.model.state_dict().values())
    for name, tensor in varuna.state_dict().items():
        assert torch.equal(tensor.to(kept[name].dtype), kept[name]), name
    varuna.step(inputs)
    varuna.close()


def test_a_load_drops_the_optimizers_state_before_it_reads_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    varuna = build(Gpt(), make_inputs())
    optimizer = torch.optim.AdamW(varuna.parameters())
    varuna.set_optimizer(optimizer)
    varuna.step(make_inputs())
    optimizer.step()
    varuna.zero_grad()
    varuna.checkpoint(tmp_path)
    kept = [state["exp_avg"].clone() for state in optimizer.state.values()]
    old = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    alive: list[int] = []
    real = CheckpointReader.read_optimizers

    def read(self: CheckpointReader, *args: Any) -> Any:
        alive.append(sum(ref() is not None for ref in old))
        return real(self, *args)

    monkeypatch.setattr(CheckpointReader, "read_optimizers", read)
    varuna.load_checkpoint(tmp_path)
    assert alive and not any(alive)
    loaded = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))
    varuna.close()


@pytest.mark.parametrize("shape", [(), (7,), (3000, 300), (600000,), (1000, 2, 3, 200), (0, 5)])
def test_a_half_gradient_added_in_pieces_gives_the_same_sum(shape: tuple[int, ...]) -> None:
    total, gradient = torch.randn(shape), torch.randn(shape).bfloat16()
    wanted = total.clone().add_(gradient, alpha=0.37)
    add_wide(total, gradient, 0.37)
    assert torch.equal(total, wanted)
    strided, turned = torch.randn(700, 600).t(), torch.randn(600, 700).bfloat16()
    wanted = strided.clone().add_(turned, alpha=0.5)
    add_wide(strided, turned, 0.5)
    assert torch.equal(strided, wanted)
