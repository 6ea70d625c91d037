"""LAMB against a plain one; apex taken only when it is NVIDIA's."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from varuna_core.runtime.optim.optimizers import (
    APEX,
    TORCH,
    Lamb,
    build_optimizer,
    use_apex_norms,
    why_no_apex,
)


class PlainLamb:
    """The paper's update with NVIDIA's clipping, a parameter at a time, by the given norm."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_norm: float = 1.0,
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.max_norm = weight_decay, max_norm
        self.first: dict[nn.Parameter, Tensor] = {}
        self.second: dict[nn.Parameter, Tensor] = {}
        self.steps: dict[nn.Parameter, int] = {}

    @torch.no_grad()
    def step(self) -> None:
        held = [(p, p.grad) for p in self.parameters if p.grad is not None]
        norm = sum(float(g.double().square().sum()) for _, g in held) ** 0.5
        for p, g in held:
            g = g / max(1.0, norm / self.max_norm)
            t = self.steps[p] = self.steps.get(p, 0) + 1
            b1, b2 = self.betas
            m = self.first[p] = b1 * self.first.get(p, torch.zeros_like(p)) + (1 - b1) * g
            v = self.second[p] = b2 * self.second.get(p, torch.zeros_like(p)) + (1 - b2) * g * g
            u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps) + self.weight_decay * p
            ratio = 1.0
            if self.weight_decay and p.norm() > 0 and u.norm() > 0:
                ratio = float(p.norm() / u.norm())
            p -= self.lr * ratio * u


def make_parameters() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (5,), (), (2, 2, 2)]
    made = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    return [*made, nn.Parameter(torch.zeros(3))]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        # The second one is not used in each step: its own count of steps lags behind.
        used = number != 1 or step % 2
        grad = torch.randn(parameter.shape, generator=draw) * 3
        parameter.grad = grad if used else None


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_lamb_is_the_plain_one(weight_decay: float, max_norm: float) -> None:
    ours, plain = make_parameters(), make_parameters()
    lamb = Lamb(ours, lr=0.1, weight_decay=weight_decay, max_grad_norm=max_norm)
    reference = PlainLamb(plain, lr=0.1, weight_decay=weight_decay, max_norm=max_norm)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(plain, step)
        lamb.step()
        reference.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_lamb_takes_a_norm_that_it_is_told_once() -> None:
    ours, plain = make_parameters(), make_parameters()
    lamb, reference = Lamb(ours, max_grad_norm=1.0), PlainLamb(plain, max_norm=1e-3)
    for step in range(2):
        set_gradients(ours, step)
        set_gradients(plain, step)
        own = torch.nn.utils.get_total_norm([p.grad for p in ours if p.grad is not None])
        lamb.grad_norm = own * 1000
        lamb.step()
        assert lamb.grad_norm is None
        reference.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_lamb_keeps_its_state_in_a_state_dict() -> None:
    ours, other = make_parameters(), make_parameters()
    first, second = Lamb(ours), Lamb(other)
    set_gradients(ours, 1)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for a, b in zip(ours, other, strict=True):
            b.copy_(a)
    set_gradients(ours, 3)
    set_gradients(other, 3)
    first.step()
    second.step()
    for a, b in zip(ours, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", TORCH)
def test_an_optimizer_is_built_by_its_name(name: str) -> None:
    parameters = make_parameters()
    built = build_optimizer(name, iter(parameters), lr=0.1)
    assert type(built) is TORCH[name]
    assert built.defaults.get("fused", True)
    before = [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, 1)
    built.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_what_has_no_fused_kernel_is_taken_as_it_is() -> None:
    odd = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    assert not build_optimizer("adamw", odd).defaults["fused"]
    groups = [{"params": iter(make_parameters()), "lr": 0.5}, {"params": odd[0]}]
    assert not build_optimizer("adamw", groups).defaults["fused"]
    named = [("weight", parameter) for parameter in make_parameters()[:1]]
    assert build_optimizer("adamw", named).defaults["fused"]
    assert build_optimizer("adamw", [{"params": iter(make_parameters())}]).defaults["fused"]
    assert build_optimizer("sgd", make_parameters(), lr=1.0, foreach=True).defaults["foreach"]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'adan' is not supported: use one of adam, adamw, lamb"):
        build_optimizer("adan", make_parameters())


def lay_down(folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names come first on the path; apex' optimizers note their arguments."""
    (folder / "apex").mkdir()
    (folder / "apex/__init__.py").write_text("")
    made = "class {}:\n    def __init__(self, params, **options): self.options = options\n"
    words = {word for word, _ in APEX.values()}
    (folder / "apex/optimizers.py").write_text("".join(map(made.format, sorted(words))))
    (folder / "apex/normalization").mkdir()
    (folder / "apex/normalization/__init__.py").write_text("")
    (folder / "apex/normalization/fused_layer_norm.py").write_text(
        "def fused_layer_norm_affine(x, weight, bias, shape, eps):\n"
        "    assert shape == (3,) and eps == 0.5\n"
        "    return x * weight + bias\n"
    )
    if "amp_C" in names:
        (folder / "amp_C.py").write_text("raise ImportError('needs a GPU')")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_other_apex_is_told_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay_down(tmp_path, ["apex"], monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert type(build_optimizer("lamb", make_parameters(), apex=True)) is Lamb
    assert "not NVIDIA's" in caplog.text and "torch's own lamb is used" in caplog.text
    assert "apex" not in sys.modules


@pytest.mark.parametrize("name", APEX)
def test_nvidias_apex_is_taken_when_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_down(tmp_path, ["apex", "amp_C"], monkeypatch)
    assert why_no_apex() == ""
    built: Any = build_optimizer(name, make_parameters(), apex=True, lr=0.1)
    assert type(built).__name__ == APEX[name][0]
    assert built.options == {"lr": 0.1, **APEX[name][1]}
    assert type(build_optimizer(name, make_parameters(), lr=0.1)) is TORCH[name]
    for word in ("apex", "apex.optimizers"):
        monkeypatch.delitem(sys.modules, word, raising=False)


def test_nvidias_layer_norm_is_taken_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.LayerNorm(3, eps=0.5), nn.LayerNorm(3, elementwise_affine=False))
    x = torch.tensor([1.0, 2.0, 3.0])
    usual = model(x)
    assert use_apex_norms(model) == 0 and "torch's own layer norm is used" in caplog.text
    torch.testing.assert_close(model(x), usual)
    lay_down(tmp_path, ["apex", "amp_C"], monkeypatch)
    assert use_apex_norms(model) == 2
    assert torch.equal(model[0](x), x), "the stand-in's kernel"
    torch.testing.assert_close(model[1](x), usual, msg="what apex's takes no part in stays torch's")
    for word in ("apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        monkeypatch.delitem(sys.modules, word, raising=False)


def test_a_norm_for_apex_lamb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_down(tmp_path, ["apex", "amp_C"], monkeypatch)
    with pytest.raises(ValueError, match="call model"):
        build_optimizer("lamb", make_parameters(), apex=True, max_grad_norm=1.0)


def test_without_any_apex_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna_core.runtime.optim.optimizers.find_spec", lambda name: None)
    assert "is not installed" in why_no_apex()
