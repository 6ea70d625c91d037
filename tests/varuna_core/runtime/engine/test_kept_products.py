"""A selective recompute makes no matrix product twice, and takes none that has become another."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.varuna_core.runtime.engine.test_graph_offload import measure_peak
from varuna_core import CutPoint, Varuna
from varuna_core.runtime.engine.graph_memory import GraphMeter, agree_on_memory
from varuna_core.runtime.engine.kept_products import KeptProducts, is_worth_keeping

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"  # torch.func.jvp itself (2.13, 2.15)
)

WIDTH, LENGTH, ROWS = 8, 20, 4
aten: Any = torch.ops.aten


class Attention(nn.Module):
    """Scores, softmax, and what they choose; then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.norm = nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.cut, self.drop = CutPoint(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.enter(self.norm(x)).chunk(3, dim=-1)
        scores = self.drop((query @ key.mT).softmax(dim=-1))
        x = self.cut(scores @ value)
        return self.down(self.act(self.up(x))).square().mean()

    def act(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(x))


class InPlace(Attention):
    def act(self, x: Tensor) -> Tensor:
        return self.drop(x.relu_())


class Fused(Attention):
    def act(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, WIDTH)).transpose(1, 2)
        made = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        return self.drop(made.transpose(1, 2).flatten(2))


class Pushed(Attention):
    """torch adds the bias through a view that counts no changes."""

    def act(self, x: Tensor) -> Tensor:
        across = x.mT.contiguous().mT
        value, slope = torch.func.jvp(self.square, (across,), (across.cos(),))
        return self.drop(value.sin() * slope)

    def square(self, x: Tensor) -> Tensor:
        return F.linear(x, self.up.weight @ self.up.weight.mT, self.up.bias)


class Asking(Attention):
    def act(self, x: Tensor) -> Tensor:
        return x + x.detach() @ torch.eye(4 * WIDTH) if torch.is_grad_enabled() else 2 * x


class Counting(TorchDispatchMode):
    """Counts the products that are really made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (aten.mm.default, aten.addmm.default):
            self.made.append("product")
        if func is aten.bmm.default:
            is_scores = args[0].shape[-1] == WIDTH and args[1].shape[-1] == LENGTH
            self.made.append("scores" if is_scores else "product")
        return func(*args, **(kwargs or {}))


def make(model: type[nn.Module], **options: Any) -> tuple[Varuna, Any]:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4 * ROWS, LENGTH, WIDTH)}
    options = {"device": "cpu", "schedule": "gpipe", **options}
    return Varuna(model(), "0;", inputs, 4 * ROWS, ROWS, **options), inputs


def step(model: type[nn.Module], recompute: str) -> tuple[list[Tensor], list[str]]:
    """Loss and gradients, and the products that were made."""
    varuna, inputs = make(model, recompute=recompute)
    with Counting() as counting:
        loss, _ = varuna.step(inputs)
    gradients = [p.grad for p in varuna.parameters() if p.grad is not None]
    return [loss, *gradients], counting.made


@pytest.mark.parametrize("model", [Attention, InPlace, Fused, Pushed])
def test_it_changes_no_bit(model: type[nn.Module]) -> None:
    assert all(map(torch.equal, step(model, "selective")[0], step(model, "none")[0]))


def test_only_scores_are_made_again() -> None:
    made = {way: step(Attention, way)[1] for way in ("none", "selective", "full")}
    scores = {way: found.count("scores") for way, found in made.items()}
    products = {way: found.count("product") for way, found in made.items()}
    # Of four micro-batches three or four wait for their backward; a forward makes four products.
    assert products["selective"] == products["none"] == products["full"] - 4 * 4
    assert scores["selective"] == scores["full"] == scores["none"] + 4


def test_a_product_that_was_changed_in_place_is_made_again() -> None:
    again = step(InPlace, "selective")[1].count("product")
    assert again == step(InPlace, "none")[1].count("product") + 4


def test_a_forward_that_makes_other_products_is_recomputed_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        ours = step(Asking, "selective")[0]
    said = [record.message for record in caplog.records if "matrix products" in record.message]
    assert len(said) == 1 and "recompute='full' replaces 'selective'" in said[0]
    assert all(map(torch.equal, ours, step(Asking, "full")[0]))


def test_what_draws_random_numbers_is_not_kept() -> None:
    flash = aten._scaled_dot_product_flash_attention.default
    heads = torch.zeros(1, 1, 2, 2)
    assert is_worth_keeping(flash, (heads, heads, heads), {}, heads)
    assert is_worth_keeping(flash, (heads, heads, heads, 0.0, True), {}, heads)
    assert not is_worth_keeping(flash, (heads, heads, heads, 0.1), {}, heads)
    assert not is_worth_keeping(flash, (heads, heads, heads), {"dropout_p": 0.1}, heads)


def test_less_is_kept_than_a_graph_and_more_than_inputs() -> None:
    assert measure_peak("full") < measure_peak("selective") < measure_peak("none")


def test_what_is_kept_counts_as_memory() -> None:
    varuna, inputs = make(Attention, recompute="selective")
    meter = varuna.engine.passes.meter = GraphMeter(ROWS)
    varuna.step(inputs)
    assert meter.kept == {0: ROWS * LENGTH * (3 + 1 + 4 + 1) * WIDTH * 4}
    memory = agree_on_memory(meter, 1e9, varuna.links)
    assert memory is not None and memory.inputs == (meter.kept[0],) and meter.inputs == {0: 0.0}


def test_compiled_modules_are_refused() -> None:
    with pytest.raises(ValueError, match="does not see the operations of compiled modules"):
        make(Attention, recompute="selective", compile="aot_eager")


@pytest.mark.parametrize("by_name", [False, True])
def test_an_attention_without_gradients_keeps_what_its_backward_needs(by_name: bool) -> None:
    """A GPU's leaves it out then, and the recompute's backward would read what is not there."""
    heads = torch.empty(2, 4, LENGTH, WIDTH, device="meta")
    given: dict[str, Any] = {"attn_bias": None, "compute_log_sumexp": False}
    attend = aten._scaled_dot_product_efficient_attention
    products = KeptProducts()
    with torch.no_grad(), products.keeping():
        attend(heads, heads, heads, **given) if by_name else attend(*[heads] * 3, *given.values())
    (kept,) = products.results.values()
    _, sums, *_ = kept.result
    assert sums.numel() > 0
