"""Saves beside training, copied under the next step, hold what there was at the save."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import small
from varuna_core import Varuna
from varuna_core.checkpoint.store.writer import Staging

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def make(name: str, model: str, **options: Any) -> Varuna:
    torch.manual_seed(0)
    built = getattr(small, model)()
    inputs = built.make_inputs(4) if hasattr(built, "make_inputs") else small.make_inputs(4)
    varuna = Varuna(built, "0;", inputs, 4, 2, device="cpu", **options)
    varuna.set_optimizer(OPTIMIZERS[name](varuna.parameters()))
    return varuna


def train(varuna: Varuna, step: int) -> None:
    varuna.step(small.make_inputs(4, seed=step))
    varuna.optimizer.step()
    varuna.optimizer.zero_grad()


def describe(varuna: Varuna) -> dict[str, Tensor]:
    state = {
        f"{number}/{key}": value
        for number, held in enumerate(varuna.optimizer.state.values())
        for key, value in held.items()
        if isinstance(value, Tensor)
    }
    weights = {str(number): weight for number, weight in enumerate(varuna.parameters())}
    return {name: tensor.detach().clone() for name, tensor in {**state, **weights}.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=["fp32", "bf16", "fp16"]
)
def test_each_has_the_state_of_its_moment_though_the_copy_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    finish, late = Staging.finish, []

    def copy_late(self: Staging) -> Any:
        late.append(len(self._pending))
        time.sleep(0.05)
        return finish(self)

    monkeypatch.setattr(Staging, "finish", copy_late)
    varuna = make(name, "Gpt", **options)
    seen = {}
    for step in range(1, 5):
        train(varuna, step)
        varuna.checkpoint(tmp_path / "store", step, tempdir=tmp_path / "copy")
        seen[step] = describe(varuna)
    varuna.close()
    assert len(late) == 4 and all(late), "what the optimizer changes was put off"
    for step, expected in seen.items():
        again = make(name, "Gpt", **options)
        again.load_checkpoint(tmp_path / "store", step)
        found = describe(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[one], expected[one]) for one in found), step
        again.close()


def test_the_optimizer_waits_for_the_copy_and_an_evaluation_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, finish = threading.Event(), Staging.finish

    def wait_and_copy(self: Staging) -> Any:
        assert opened.wait(60)
        return finish(self)

    monkeypatch.setattr(Staging, "finish", wait_and_copy)
    varuna = make("adamw", "Gpt")
    train(varuna, 1)
    varuna.checkpoint(tmp_path / "store", 1, tempdir=tmp_path / "copy")
    varuna.evaluate(small.make_inputs(4))
    varuna.step(small.make_inputs(4, seed=2))
    before = describe(varuna)
    stepping = threading.Thread(target=varuna.optimizer.step)
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive()
    assert all(torch.equal(describe(varuna)[one], before[one]) for one in before)
    opened.set()
    stepping.join(60)
    assert not stepping.is_alive()
    varuna.close()


class Foreign:
    """An optimizer that nobody can ask to call first."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1)

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def test_for_an_optimizer_without_hooks_all_is_copied_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[int] = []
    finish = Staging.finish
    monkeypatch.setattr(
        Staging, "finish", lambda self: (late.append(len(self._pending)), finish(self))[1]
    )
    varuna = make("adamw", "Gpt")
    varuna.set_optimizer(Foreign(varuna.parameters()))
    train(varuna, 1)
    varuna.checkpoint(tmp_path / "store", 1, tempdir=tmp_path / "copy")
    seen = describe_weights(varuna)
    train(varuna, 2)
    varuna.close()
    assert late == [0]
    again = make("adamw", "Gpt")
    again.set_optimizer(Foreign(again.parameters()))
    again.load_checkpoint(tmp_path / "store", 1)
    assert all(map(torch.equal, describe_weights(again), seen))
    again.close()


def describe_weights(varuna: Varuna) -> list[Tensor]:
    return [weight.detach().clone() for weight in varuna.parameters()]
