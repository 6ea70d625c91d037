"""Linear layers whose weight gradients the engine makes give what torch's own layer gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from varuna_core import CutPoint, Varuna
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.schedule.registry import SCHEDULES

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"  # torch.func.jvp itself (2.13, 2.15)
)


class Wave(nn.Module):
    """A model of complex numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=torch.cfloat)
        self.cut = CutPoint()
        self.second = nn.Linear(width, width, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.cut(torch.tanh(self.first(x)))).abs().square().mean()


class Directional(nn.Module):
    """A model whose loss has a derivative along a direction, taken within the forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 1)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        value, slope = jvp(self.first, (x,), (x.cos(),))
        return (self.second(self.cut(value.tanh() + slope)) ** 2).mean()


class Mapped(Directional):
    """A model that maps a layer over its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.cut(vmap(self.first)(x).tanh())) ** 2).mean()


def make_wave(width: int) -> tuple[nn.Module, Tensor]:
    return Wave(width), torch.randn(4, width, dtype=torch.cfloat)


def make_directional(width: int) -> tuple[nn.Module, Tensor]:
    return Directional(width), torch.randn(4, width)


def make_mapped(width: int) -> tuple[nn.Module, Tensor]:
    return Mapped(width), torch.randn(4, width)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "zbv"])
@pytest.mark.parametrize("width", [16, 256], ids=["small", "large"])
@pytest.mark.parametrize("make", [make_wave, make_directional, make_mapped])
def test_gradients_equal_the_plain_models(
    make: Callable[[int], tuple[nn.Module, Tensor]], width: int, schedule: str
) -> None:
    """A complex layer's weights got gradients without the conjugate, and no error."""
    torch.manual_seed(0)
    model, x = make(width)
    model(x).backward()
    usual = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    varuna = Varuna(model, "0;", {"x": x}, 4, 2, device="cpu", schedule=schedule)
    varuna.step({"x": x})
    made = {name: parameter.grad for name, parameter in varuna.named_parameters()}
    torch.testing.assert_close(made, usual, rtol=1e-4, atol=1e-6)


def take_tangent(layer: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.sin())
        tangent: Tensor = forward_ad.unpack_dual(layer(dual)).tangent
        return tangent.clone()


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda layer, x: vmap(layer)(x),
    "grad": lambda layer, x: grad(lambda y: layer(y).square().sum())(x),
    "jvp": lambda layer, x: jvp(layer, (x,), (x.sin(),))[1],
    "forward mode": take_tangent,
    "nested": lambda layer, x: layer(
        torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    ).values(),
    "sparse": lambda layer, x: layer(x.to_sparse()),
    "other weights": lambda layer, x: functional_call(
        layer, {"weight": layer.weight * 2, "bias": layer.bias}, (x,)
    ),
}


@pytest.mark.parametrize("name", USES)
def test_a_layer_is_torchs_own_where_the_fast_way_does_not_lead(name: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4), torch.randn(5, 3)
    usual = USES[name](layer, x)
    usual.square().sum().backward()
    gradients = [layer.weight.grad, layer.bias.grad]
    layer.zero_grad()
    WeightGrads().install(layer)
    made = USES[name](layer, x)
    made.square().sum().backward()
    torch.testing.assert_close(made, usual)
    torch.testing.assert_close([layer.weight.grad, layer.bias.grad], gradients)


ORDERS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(2, 3, 4),
    "columns of one sample": lambda: torch.randn(1, 4, 3).transpose(1, 2),
    "columns of several": lambda: torch.randn(2, 4, 3).transpose(1, 2),
    "columns": lambda: torch.randn(4, 3).t(),
    "permuted": lambda: torch.randn(4, 2, 3).permute(2, 1, 0),
    "a vector": lambda: torch.randn(4),
    "expanded": lambda: torch.randn(4).expand(3, 4),
    "every other": lambda: torch.randn(3, 8)[:, ::2],
    "nothing": lambda: torch.randn(0, 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ORDERS)
def test_the_input_gradient_has_torchs_memory_order(
    name: str, bias: bool, dtype: torch.dtype
) -> None:
    """Rows in place of columns let the batch norm before a layer round otherwise in fp16."""
    layer, x = nn.Linear(4, 5, bias=bias, dtype=dtype), ORDERS[name]().to(dtype).requires_grad_()
    (usual,) = torch.autograd.grad(layer(x).sin().sum(), x)
    WeightGrads().install(layer)
    (made,) = torch.autograd.grad(layer(x).sin().sum(), x)
    assert made.stride() == usual.stride() and torch.equal(made, usual)


def test_torchs_private_names_say_what_they_said() -> None:
    """`is_transformed` reads them; torch has no public ones (2.13)."""
    assert not torch._C._are_functorch_transforms_active()
    assert forward_ad._current_level < 0
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        seen.append(torch._C._are_functorch_transforms_active())
        return x.sum()

    vmap(note)(torch.ones(2, 2))
    grad(note)(torch.ones(2))
    jvp(note, (torch.ones(2),), (torch.ones(2),))
    assert seen == [True] * 3
    with forward_ad.dual_level():
        assert forward_ad._current_level >= 0
