"""What the engine is made of, without processes: maps, micro-batches, seeds, put-off gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.records.rank_map import parse_stage_map
from varuna_core.runtime.comm.channel import describe_message
from varuna_core.runtime.comm.failure import describe_error
from varuna_core.runtime.comm.values import take_apart
from varuna_core.runtime.engine.microbatch import BatchSplitter, deal_samples
from varuna_core.runtime.engine.weight_grads import WeightGrads
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import pick_loss
from varuna_core.runtime.split.random_streams import build_seeder
from varuna_core.schedule.registry import place_stages

CPU = torch.device("cpu")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, varuna_core; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stage_map_is_read_as_varuna_writes_it() -> None:
    stage_map = parse_stage_map("0,3;1,4;2,5;", 6)
    assert (stage_map.depth, stage_map.num_replicas) == (3, 2)
    assert stage_map.find(4) == (1, 1) and str(stage_map) == "0,3;1,4;2,5;"
    assert parse_stage_map([[0, 3], [1, 4], [2, 5]], 6) == stage_map


def test_stages_lie_round_and_round_or_down_and_up() -> None:
    ranks = parse_stage_map("0,3;1,4;2,5;", 6)
    around = ranks.with_placement(place_stages("interleaved", 3, 2))
    assert around.stages_of(1) == (1, 4) and around.name(4) == "rank 4 (stages 1 and 4, replica 1)"
    assert around.neighbours == ((0, 1), (1, 2), (2, 0))
    bent = ranks.with_placement(place_stages("zbv", 3, 2))
    assert bent.stages_of(0) == (0, 5) and bent.places_of((5, 2, 0)) == (0, 2)
    assert bent.neighbours == ((0, 1), (1, 2), (2, 1), (1, 0))
    assert ranks.with_placement(place_stages("1f1b", 3, 1)) == ranks and str(bent) == str(ranks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,1;2;", "as many ranks as stage 0"),
        ("0;2;", "each of the ranks 0 to 1 once"),
        ("0;0;", "each of the ranks 0 to 1 once"),
        ("0;x;", "expected ranks as in"),
        ("", "expected ranks as in"),
    ],
)
def test_a_wrong_stage_map_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_stage_map(text, 2)


def test_samples_are_dealt_in_whole_micro_batches() -> None:
    assert deal_samples(8, 2, 2) == [range(0, 4), range(4, 8)]
    assert deal_samples(10, 2, 2) == [range(0, 6), range(6, 10)]
    assert deal_samples(9, 4, 2) == [range(0, 8), range(8, 9)]
    assert deal_samples(2, 2, 3) == [range(0, 2), range(2, 2), range(2, 2)]


def test_a_batch_is_cut_where_the_dummy_inputs_say() -> None:
    dummies = {"x": torch.ones(4, 3), "table": torch.ones(6), "scale": 2.0, "mask": None}
    splitter = BatchSplitter.from_inputs(dummies)
    batch = {"x": torch.arange(6.0)[:, None], "table": torch.ones(6), "scale": 3.0}
    parts = splitter.split({**batch, "mask": torch.arange(6)}, 4, 10, CPU)
    assert [part.size for part in parts] == [4, 2]
    assert [part.first_sample for part in parts] == [10, 14]
    assert parts[1].inputs["x"].flatten().tolist() == [4, 5]
    assert parts[1].inputs["mask"].tolist() == [4, 5]
    assert len(parts[1].inputs["table"]) == 6 and parts[1].inputs["scale"] == 3.0


def test_a_function_of_the_size_tells_which_dimension_grows() -> None:
    def get_batch(size: int, device: Any = None) -> dict[str, torch.Tensor]:
        return {"x": torch.arange(3 * size).view(3, size), "table": torch.ones(3)}

    splitter = BatchSplitter.from_function(get_batch, 2)
    parts = splitter.split(get_batch(5), 2, 0, CPU)
    assert [tuple(part.inputs["x"].shape) for part in parts] == [(3, 2), (3, 2), (3, 1)]


def test_inputs_of_different_sizes_are_refused_by_name() -> None:
    splitter = BatchSplitter.from_inputs({"x": torch.ones(4), "y": torch.ones(4)})
    with pytest.raises(ValueError, match=r"'x'\] 3, \['y'\] 2"):
        splitter.count({"x": torch.ones(3), "y": torch.ones(2)})


def test_streams_differ_by_step_sample_and_segment() -> None:
    def draw(step: int, first_sample: int, segment: int) -> float:
        build_seeder(7, step, first_sample)(segment)
        return float(torch.rand(()))

    keys = [(s, f, k) for s in range(3) for f in range(3) for k in range(3)]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(1, 2, 0) == draw(1, 2, 0)


def test_a_description_tells_one_from_true() -> None:
    layouts = []
    for value in (1, True, 1.0, 2, None):
        tensors, structure = take_apart((torch.ones(2), value))
        layouts.append(describe_message(tensors, structure))
    assert sum(a == b for a in layouts for b in layouts) == len(layouts)


@pytest.mark.parametrize(
    "output",
    [torch.tensor(3.0), torch.tensor([3.0]), {"loss": torch.tensor(3.0)}, (torch.tensor(3.0), 1)],
)
def test_the_loss_is_found(output: Any) -> None:
    assert pick_loss(output) == 3.0


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(SplitError, match=r"returns \[2, 3\], not its loss"):
        pick_loss(torch.ones(2, 3))


def test_put_off_weight_gradients_equal_the_usual_ones() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.Linear(5, 3, bias=False)]
    model, x = nn.Sequential(layers[0], nn.LayerNorm(5), layers[1]), torch.randn(2, 3, 4)
    model(x).sum().backward()
    usual = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    grads = WeightGrads()
    grads.install(model)
    for _ in range(2):
        with grads.collecting() as products:
            model(x).sum().backward()
        assert len(products) == 2
        for work in products:
            work()
    for parameter, gradient in zip(model.parameters(), usual, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)  # type: ignore[operator]


def test_products_add_to_the_gradients_that_are_there() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False)), torch.randn(2, 3, 4)
    model(x).sum().backward()
    usual = [2 * parameter.grad for parameter in model.parameters()]
    grads = WeightGrads()
    grads.install(model)
    grads.may_add = True
    held = [parameter.grad.data_ptr() for parameter in model.parameters()]
    heard: list[Any] = []
    layer = model[0]
    model(x).sum().backward()
    for parameter, gradient, place in zip(model.parameters(), usual, held, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
        assert parameter.grad is not None and parameter.grad.data_ptr() == place
    layer.weight.register_hook(heard.append)
    model(x).sum().backward()
    with grads.collecting() as products:
        model(x).sum().backward()
    assert len(heard) == 2, "a user's hook is called whatever the action"
    assert [work.parameters for work in products] == [(model[1].weight,)]


def test_half_products_add_to_the_sum_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel is stood in for; its own numbers are shown by tests/gpu."""
    added: list[float] = []

    def add_product(wide: Any, grad: Tensor, input: Tensor) -> None:
        total, factor = wide
        added.append(factor)
        total.addmm_(grad.t().float(), input.flatten(0, -2).float(), alpha=factor)

    monkeypatch.setattr("varuna_core.runtime.engine.weight_grads.add_product", add_product)
    monkeypatch.setattr("varuna_core.runtime.engine.weight_grads.LARGE", 0)
    sums: list[dict[str, Tensor]] = []
    for can in (False, True):
        monkeypatch.setattr(
            "varuna_core.runtime.optim.grads.can_add_wide", lambda total, can=can: can
        )
        torch.manual_seed(0)
        varuna = Varuna(Gpt(), "0;", make_inputs(2), 6, 2, device="cpu", precision="bf16")
        varuna.step(make_inputs(6, seed=3))
        sums.append({name: p.grad.clone() for name, p in varuna.named_parameters()})
        assert bool(added) == can
    assert set(added) == {4 / 3}  # a weight of 1/3 is a quarter, and the rest of it
    for name, gradient in sums[0].items():
        torch.testing.assert_close(sums[1][name], gradient, rtol=2e-2, atol=2e-4)


class Adversarial(Gpt):
    """Asks within its forward for the gradient of an activation, and moves that along it."""

    def run_block(self, number: int, x: Tensor) -> Tensor:
        if number != 1 or not torch.is_grad_enabled() or not x.requires_grad:
            return super().run_block(number, x)
        kept = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(super().run_block(number, kept).pow(2).sum(), kept)
        return super().run_block(number, x + found.sign() * 0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_a_forward_asks_for_adds_to_no_weight(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where products add to the sums by themselves."""

    def add_product(wide: Any, grad: Tensor, input: Tensor) -> None:
        total, factor = wide
        total.addmm_(grad.t().float(), input.flatten(0, -2).float(), alpha=factor)

    monkeypatch.setattr("varuna_core.runtime.engine.weight_grads.add_product", add_product)
    monkeypatch.setattr("varuna_core.runtime.optim.grads.can_add_wide", lambda total: True)
    norms = []
    for large in (0, 2**30):  # all layers are ours, or none
        monkeypatch.setattr("varuna_core.runtime.engine.weight_grads.LARGE", large)
        torch.manual_seed(0)
        varuna = Varuna(
            Adversarial(), "0;", make_inputs(2), 6, 2,
            device="cpu", precision=precision, schedule="1f1b",
        )  # fmt: skip
        varuna.step(make_inputs(6, seed=3))
        norms.append({n: p.grad.norm() for n, p in varuna.named_parameters() if p.grad is not None})
    torch.testing.assert_close(norms[0], norms[1], rtol=2e-2, atol=1e-4)


def test_small_layers_keep_torchs_own_forward_where_nothing_is_put_off() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(256, 256))
    WeightGrads().install(model, puts_off=False)
    assert ["forward" in layer.__dict__ for layer in model] == [False, True]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: OwnLayer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x * layer.weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        assert layer.grads.puts_off
        layer.grads.add(lambda: setattr(layer.weight, "grad", (grad * x).sum()), [layer.weight])
        return grad * layer.weight, None


class OwnLayer(nn.Module):
    """Puts off its weight gradient itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def put_off_to(self, grads: WeightGrads) -> None:
        self.grads = grads

    def forward(self, x: torch.Tensor) -> Any:
        return _Scaled.apply(x, self)  # type: ignore[no-untyped-call]  # torch: untyped


def test_a_module_may_put_off_its_own_weight_gradient() -> None:
    model, x = nn.Sequential(OwnLayer()), torch.tensor([2.0, 5.0], requires_grad=True)
    grads = WeightGrads()
    grads.install(model)
    with grads.collecting() as products:
        model(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0]
    assert model[0].weight.grad is None
    (work,) = products
    work()
    assert model[0].weight.grad.item() == 7.0


def test_put_off_gradients_reach_the_parameter_whatever_saves_tensors() -> None:
    """They were lost in what the hooks gave back in place of the weight."""
    layer, grads = nn.Linear(3, 2), WeightGrads()
    grads.install(layer)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = layer(torch.ones(1, 3))
    with grads.collecting() as products:
        out.sum().backward()
    for work in products:
        work()
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.ones(2, 3))


def test_an_error_is_told_without_gloos_file_and_advice() -> None:
    text = "[/x/gloo/pair.cc:553] Connection closed by peer [1.2.3.4]:5. This is typically caused"
    told = describe_error(RuntimeError(text))
    assert told == "RuntimeError: Connection closed by peer [1.2.3.4]:5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fp16": True, "precision": "bf16"}, "pass only one of the two"),
        ({"precision": "fp8"}, "precision 'fp8' is not supported: use one of fp32, bf16, fp16"),
        ({"schedule": "zb"}, "there are auto, gpipe"),
        ({"schedule": "1f1b", "stages_per_rank": 2}, "interleaved and auto do, zbv has 2"),
        ({"schedule": "zbv", "stages_per_rank": 3}, "interleaved and auto do, zbv has 2"),
        ({"schedule": "interleaved", "stages_per_rank": 0}, "must be 1 or more"),
        ({"recompute": "some"}, "there are none, full, auto, selective, offload"),
        ({"recompute": "auto"}, "set memory_limit="),
        ({"memory_limit": 1e9}, "only used with recompute='auto'"),
        ({"partition": "1-1"}, "has 2 numbers for 1 stages"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", **options)


def test_one_process_needs_no_process_group() -> None:
    varuna = Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu")
    with pytest.raises(ValueError, match="create it after Varuna"):
        varuna.set_optimizer(torch.optim.SGD(Gpt().parameters()))
    drawn = torch.get_rng_state()
    loss, overflow = varuna.step(make_inputs())
    assert not overflow and torch.equal(drawn, torch.get_rng_state())
    torch.testing.assert_close(loss, varuna.evaluate(make_inputs()))
    assert varuna.state_dict().keys() == Gpt().state_dict().keys()
    with pytest.raises(RuntimeError, match=r"call step\(inputs\)"):
        varuna(make_inputs())
    with pytest.raises(ValueError, match=r"replica 0 of 1 takes 4 of 4"):
        varuna.step(make_inputs(5))


def test_every_action_is_traced() -> None:
    seen: list[str] = []

    def trace(action: str, begin: float, ready: float, end: float) -> None:
        assert begin <= ready <= end
        seen.append(action)

    varuna = Varuna(Gpt(), "0;", make_inputs(), 4, 2, device="cpu", schedule="gpipe", trace=trace)
    varuna.step(make_inputs())
    assert seen == ["0F0", "0F1", "0B0", "0B1"]
