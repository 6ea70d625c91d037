"""Half precision without other ranks: types, masters, what an optimizer may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import LEGAL, ConvNet, Gpt, TiedGpt, chain, make_images, make_inputs
from tests.ranks.precision_rank import Foreign, FullLossGpt
from varuna_core import CutPoint, Varuna
from varuna_core.runtime.optim.precision import Masters, choose_precision
from varuna_core.runtime.split.split import split_model
from varuna_core.runtime.split.weights import parameters_on_meta

HALVES = ["bf16", "fp16"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build(model: nn.Module | None = None, inputs: Any = None, **options: Any) -> Varuna:
    torch.manual_seed(0)
    return Varuna(model or Gpt(), "0;", inputs or make_inputs(), 4, 2, device="cpu", **options)


def test_fp16_has_the_ancestors_spelling() -> None:
    assert choose_precision(True, None) == choose_precision(False, "fp16")
    assert choose_precision(True, "fp16").name == "fp16"
    assert choose_precision(False, None).half is None


RUN_IN_HALF = [
    (name, precision)
    for name in LEGAL
    for precision in HALVES
    # These meet fp32 or bf16 of their own making, which the plain half model refuses as well.
    if name != "dict across cuts" and (name, precision) != ("autocast", "fp16")
]


@pytest.mark.parametrize(("name", "precision"), RUN_IN_HALF)
def test_two_stages_in_half_precision_give_the_half_models_loss(name: str, precision: str) -> None:
    make_model, make = LEGAL[name]
    torch.manual_seed(0)
    model, chosen = make_model(), choose_precision(False, precision)
    inputs = chosen.cast(make())
    split = split_model(model, inputs, 2, types=chosen.choose_types(model))
    stages = [split.make_stage(index) for index in range(2)]
    plain = make_model()
    plain.load_state_dict(model.state_dict())
    plain.to(TYPES[precision])
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    for stage in stages:
        trained = {name: p for name, p in stage.parameters().items() if p.requires_grad}
        assert stage.full.keys() == trained.keys()
        for name, values in stage.full.items():
            assert values.dtype == torch.float32
            assert torch.equal(trained[name], values.to(trained[name].dtype))
    ours, _ = chain(stages, inputs)
    expected = plain(**inputs)
    for a, b in zip(leaves(ours), leaves(expected), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def leaves(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def test_batch_norm_stays_in_fp32_and_has_masters() -> None:
    varuna = build(ConvNet(), make_images(), precision="bf16")
    types = {name: p.dtype for name, p in varuna.part.parameters().items()}
    assert types["layers.0.0.weight"] == torch.bfloat16
    assert types["layers.0.1.weight"] == torch.float32
    assert varuna.masters().keys() == types.keys() == dict(ConvNet().named_parameters()).keys()
    assert dict(varuna.named_buffers())["layers.0.1.running_mean"].dtype == torch.float32


def test_drawn_weights_do_not_depend_on_the_precision() -> None:
    drawn = []
    for precision in ("fp32", "bf16"):
        with parameters_on_meta():
            model = Gpt()
        drawn.append(build(model, precision=precision, seed=5).masters())
    assert drawn[0].keys() == drawn[1].keys()
    for name, master in drawn[0].items():
        assert torch.equal(master, drawn[1][name])


def test_a_tied_weight_has_one_master_under_each_name() -> None:
    varuna = build(TiedGpt(), precision="bf16")
    masters = varuna.masters()
    assert masters["wte.weight"] is masters["head.weight"]
    assert len(list(varuna.parameters())) == len(masters) - 1
    assert varuna.state_dict().keys() == TiedGpt().state_dict().keys()


def test_weights_follow_the_masters_whoever_writes_them() -> None:
    varuna = build(precision="bf16")
    before = varuna.evaluate(make_inputs())
    for master in varuna.masters().values():
        master.data.zero_()
    after = varuna.evaluate(make_inputs())
    assert after != before
    torch.testing.assert_close(float(after), float(torch.tensor(32.0).log()), rtol=1e-2, atol=0)


def test_fractions_among_the_inputs_are_cast() -> None:
    inputs = {"a": torch.ones(2, dtype=torch.float64), "b": [torch.ones(2, dtype=torch.long), 3]}
    cast = choose_precision(False, "fp16").cast(inputs)
    assert cast["a"].dtype == torch.float16
    assert cast["b"][0].dtype == torch.long and cast["b"][1] == 3
    assert choose_precision(False, "fp32").cast(inputs)["a"].dtype == torch.float64


def test_what_is_frozen_stays_in_half_precision_alone() -> None:
    model = Gpt()
    model.wpe.weight.requires_grad_(False)
    varuna = build(model, precision="bf16")
    frozen = varuna.masters()["wpe.weight"]
    assert frozen is varuna.part.parameters()["wpe.weight"] and frozen.dtype == torch.bfloat16
    varuna.step(make_inputs())
    assert frozen.grad is None and varuna.masters()["wte.weight"].grad is not None
    frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'wpe\.weight' was frozen when Varuna was created"):
        varuna.step(make_inputs())


def test_fp32_has_no_copies() -> None:
    varuna = build()
    parameters = varuna.part.parameters()
    assert all(varuna.masters()[name] is parameters[name] for name in parameters)


def test_gradients_add_up_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    masters = Masters({"w": parameter}, {"w": torch.zeros(1)})
    for _ in range(300):  # in bf16, 256 + 1 is 256
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        masters.take_gradient(parameter, 0.5)
    master = masters.by_name["w"]
    assert master.grad is not None and master.grad.item() == 150.0
    assert parameter.grad is None


def test_fp16_wants_its_optimizer() -> None:
    varuna = build(fp16=True)
    with pytest.raises(RuntimeError, match="fp16 needs set_optimizer"):
        varuna.step(make_inputs())


@pytest.mark.parametrize("kind", ["torch", "foreign"])
def test_an_overflow_makes_the_optimizers_step_do_nothing(kind: str) -> None:
    varuna = build(FullLossGpt(), fp16=True)
    optimizer: Any = Foreign(varuna.parameters(), 0.1)
    if kind == "torch":
        optimizer = torch.optim.AdamW(varuna.parameters())
    for _ in range(2):  # told twice, it is still stepped once
        varuna.set_optimizer(optimizer, init_loss_scale=2.0**40, min_loss_scale=2.0**39)
    kept = {name: master.clone() for name, master in varuna.masters().items()}
    _, overflow = varuna.step(make_inputs())
    optimizer.step()
    assert overflow
    assert varuna.updates.scale == 2.0**39
    assert all(master.grad is None for master in varuna.masters().values())
    assert all(torch.equal(kept[name], master) for name, master in varuna.masters().items())
    varuna.set_optimizer(optimizer, loss_scale=128)
    varuna.zero_grad()
    _, overflow = varuna.step(make_inputs())
    optimizer.step()
    assert not overflow
    assert not torch.equal(kept["head.weight"], varuna.masters()["head.weight"])
    if kind == "torch":
        assert optimizer.state[varuna.masters()["head.weight"]]["step"] == 1


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="Gpt is not an optimizer"):
        build().set_optimizer(Gpt())


def test_a_gradient_after_the_last_one_is_an_error_with_a_name() -> None:
    varuna = build()
    gradients, head = varuna.gradients, varuna.masters()["head.weight"]
    gradients.begin()
    gradients.before([], None)
    gradients.note(head)
    gradients.before([head], None)
    gradients.note(head)
    with pytest.raises(RuntimeError, match=r"'head\.weight' got another gradient"):
        gradients.note(head)


# Weights of micro-batches.


class MeanOfOnes(nn.Module):
    """Each gradient is 1, whatever the batch, and the loss in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.cut = CutPoint()
        with torch.no_grad():
            self.first.weight.fill_(1)
            self.second.weight.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.cut(self.first(x))).mean()


@pytest.mark.parametrize("way", ["1f1b", "zero_bubble", "zbv", "interleaved"])
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("size", [7, 5, 11])
def test_micro_batches_have_their_exact_weights_in_half_precision(
    precision: str, way: str, size: int
) -> None:
    stages = 2 if way in ("zbv", "interleaved") else 1
    x = {"x": torch.ones(size, 1)}
    varuna = Varuna(
        MeanOfOnes(), "0;", x, size, 3, device="cpu",
        precision=precision, schedule=way, stages_per_rank=stages,
    )  # fmt: skip
    varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), lr=0.1), init_loss_scale=8.0)
    _, overflow = varuna.step(x)
    assert not overflow
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, torch.ones(1, 1), rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(
    "scaling", [{"loss_scale": 2.0**24}, {"init_loss_scale": 2.0**20}, {"loss_scale": 1000.1}]
)
def test_a_scale_beyond_the_range_of_a_half_precision_loss_is_no_overflow(
    scaling: dict[str, Any],
) -> None:
    x = {"x": torch.ones(7, 1)}
    varuna = Varuna(MeanOfOnes(), "0;", x, 7, 3, device="cpu", precision="fp16")
    varuna.set_optimizer(torch.optim.SGD(varuna.parameters(), lr=0.1), **scaling)
    _, overflow = varuna.step(x)
    assert not overflow
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, torch.ones(1, 1), rtol=1e-6, atol=0, msg=name)
