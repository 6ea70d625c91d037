"""Inputs and modules that stay in fp32 in a model of half precision."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.small import Gpt, TiedGpt, make_inputs
from varuna_core import CutPoint, Varuna

WIDTH, SIZE = 8, 4
STEPS = [3.0, 997.0, 500.5, 2049.0]


class Diffusion(nn.Module):
    """A timestep embedding, made in each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cuts = nn.ModuleList([CutPoint() for _ in range(3)])
        self.register_buffer("rates", torch.linspace(0.01, 1, WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, when: dict[str, Any], y: Tensor) -> Tensor:
        steps = when["steps"][0]
        if type(steps) is Tensor:
            self.seen.append(steps)
        waves = torch.sin(steps[:, None] * self.rates)
        x = self.cuts[0](self.first(x))
        x = self.cuts[1](torch.tanh(x + self.embed(waves)))
        x = self.cuts[2](self.second(x))
        return F.mse_loss(x, y)


def make_batch() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(SIZE, WIDTH, generator=draw),
        "when": {"steps": [torch.tensor(STEPS)]},
        "y": torch.randn(SIZE, WIDTH, generator=draw),
    }


def build(
    model: nn.Module, batch: dict[str, Any], precision: str, keep: list[str], **options: Any
) -> Varuna:
    varuna = Varuna(
        model, "0;", batch, SIZE, SIZE, device="cpu",
        precision=precision, keep_fp32=keep, **options,
    )  # fmt: skip
    optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
    varuna.set_optimizer(optimizer, loss_scale=1.0)
    return varuna


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("name", ["when.steps", "when", "w*.steps.0"])
def test_an_input_that_is_kept_arrives_as_it_was(name: str, precision: str) -> None:
    varuna = build(Diffusion(), make_batch(), precision, [name, "embed"])
    seen = varuna.part.stages[0].module.seen
    seen.clear()
    varuna.evaluate(make_batch())
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == STEPS


WAYS: list[dict[str, Any]] = [
    {},
    {"schedule": "zbv", "stages_per_rank": 2},
    {"schedule": "interleaved", "stages_per_rank": 4, "recompute": "full"},
]


@pytest.mark.parametrize("way", WAYS, ids=["one stage", "zbv", "recompute"])
@pytest.mark.parametrize("precision", HALVES)
def test_a_module_that_is_kept_computes_in_fp32(precision: str, way: dict[str, Any]) -> None:
    half = HALVES[precision]
    torch.manual_seed(0)
    plain = Diffusion()
    model = copy.deepcopy(plain)
    plain.to(half)
    plain.embed.float().load_state_dict(model.embed.state_dict())
    plain.embed.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    plain.embed.register_forward_hook(lambda module, args, out: out.to(half))
    varuna = build(model, make_batch(), precision, ["when", "embed"], **way)
    batch = make_batch()
    loss, _ = varuna.step(batch)
    batch |= {name: batch[name].to(half) for name in ("x", "y")}
    expected = plain(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().float())
    for name, parameter in varuna.part.parameters().items():
        assert parameter.dtype == (torch.float32 if name.startswith("embed") else half), name
    for name, master in varuna.masters().items():
        wanted = plain.get_parameter(name).grad
        assert wanted is not None and master.grad is not None
        torch.testing.assert_close(master.grad, wanted.float(), rtol=1e-6, atol=1e-8)


def test_patterns_name_modules_and_buffers_stay_with_them() -> None:
    class Buffered(Gpt):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.norm1.register_buffer("average", torch.ones(3))

    varuna = build(Buffered(), make_inputs(), "bf16", ["blocks.*.norm1", "norm"])
    kept = {n for n, p in varuna.part.parameters().items() if p.dtype == torch.float32}
    expected = {f"blocks.{i}.norm1.{own}" for i in range(4) for own in ("weight", "bias")}
    assert kept == {*expected, "norm.weight", "norm.bias"}
    assert {b.dtype for b in varuna.part.buffers().values()} == {torch.float32}
    loss, _ = varuna.step(make_inputs())
    assert loss.isfinite()


def test_in_fp32_nothing_is_to_be_kept() -> None:
    plain = Gpt()
    varuna = build(copy.deepcopy(plain), make_inputs(), "fp32", ["norm"])
    loss, _ = varuna.step(make_inputs())
    torch.testing.assert_close(loss, plain(**make_inputs()).detach())


def test_a_name_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.\*\.norm', .*neither .*'blocks\.\d\.norm\d'"):
        build(Gpt(), make_inputs(), "bf16", ["blocks.*.norm"])
    with pytest.raises(ValueError, match=r"'timestep'.* inputs are 'ids', 'labels'"):
        build(Gpt(), make_inputs(), "bf16", ["timestep"])
    with pytest.raises(ValueError, match="list of names"):
        build(Gpt(), make_inputs(), "bf16", "norm")  # type: ignore[arg-type]


def test_a_weight_of_a_kept_module_and_of_another_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'head\.weight', .*'wte\.weight'.*include both"):
        build(TiedGpt(), make_inputs(), "bf16", ["head"])


def test_whole_numbers_that_half_precision_loses_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "varuna_core"):
        varuna = build(Diffusion().float(), make_batch(), "fp16", ["embed"])
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'when.steps.0'" in told and "2049" in told and "keep_fp32" in told
    caplog.clear()
    varuna.step(make_batch())
    build(Diffusion(), make_batch(), "bf16", ["when", "embed"])
    build(Diffusion(), make_batch(), "fp32", [])
    assert not caplog.records
