"""A split model, its stages chained by hand, equals the plain one."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import small as models
from tests.models.small import LEGAL, Gpt, chain, chain_backward, make_inputs, sum_gradients
from tests.segments import announce_segments
from varuna_core.runtime.split.cut import CutPoint
from varuna_core.runtime.split.split import Split, split_model
from varuna_core.runtime.split.stage import Stage


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def make_stages(split: Split, **options: Any) -> list[Stage]:
    return [split.make_stage(i, **options) for i in range(len(split.stages))]


def run_plain(model: nn.Module, inputs: models.Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**copy.deepcopy(inputs))  # some change them
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(plain: dict[str, Tensor], split: dict[str, Tensor]) -> None:
    """Bit for bit, but for the sums of a tied parameter, which are added in another order."""
    zero = [name for name in split.keys() - plain.keys() if not split[name].any()]
    assert plain.keys() | set(zero) == split.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-7, rtol=1e-5, msg=name)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", LEGAL)
def test_stages_chained_by_hand_equal_the_plain_model(name: str, num_stages: int) -> None:
    build, make = LEGAL[name]
    model = build()
    if name == "cuts as attributes" and num_stages == 5:
        pytest.skip("the model has four segments")
    split = split_model(model, make(), num_stages)
    stages = make_stages(split)
    assert all(len(stage.segments) for stage in stages)
    for inputs in (make(), make(3), make(4, 5), make()):  # other batch sizes and lengths
        model.zero_grad()
        for stage in stages:
            stage.module.zero_grad()
        loss, gradients = run_plain(model, inputs)
        out, log = chain(stages, inputs)
        chain_backward(log, out)
        assert torch.equal(loss, out)
        assert_equal_gradients(gradients, sum_gradients(split, stages))
    plain = dict(model.named_buffers())
    parts = {n: buffer for stage in stages for n, buffer in stage.buffers().items()}
    assert plain.keys() == parts.keys()
    for key, buffer in plain.items():
        assert torch.equal(buffer, parts[key]), key
    model.eval()
    for stage in stages:
        stage.train(False)
    with torch.no_grad():
        assert torch.equal(model(**make()), chain(stages, make())[0])


@pytest.mark.parametrize("partition", ["0-0-4-0", "0-2-0-2", "1-0-0-3", "1-0-4-1", "2-0-2-0"])
def test_stages_without_layers_hand_on(partition: str) -> None:
    model, inputs = models.DictGpt(), make_inputs()
    split = split_model(model, inputs, 4, partition)
    stages = make_stages(split)
    loss, gradients = run_plain(model, inputs)
    out, log = chain(stages, inputs)
    chain_backward(log, out)
    assert torch.equal(loss, out)
    assert_equal_gradients(gradients, sum_gradients(split, stages))


def test_untied_models_give_the_same_bits() -> None:
    model, inputs = Gpt(), make_inputs()
    split = split_model(model, inputs, 3)
    stages = make_stages(split)
    _, gradients = run_plain(model, inputs)
    out, log = chain(stages, inputs)
    chain_backward(log, out)
    parts = sum_gradients(split, stages)
    assert all(torch.equal(gradients[name], parts[name]) for name in gradients)


def test_plain_tensors_may_be_handed_on_without_their_structure() -> None:
    model, inputs = models.DictGpt(), make_inputs()
    stages = make_stages(split_model(model, inputs, 3, "0-2-2"))
    received = None
    for stage in stages:
        out = stage.forward(inputs, received)
        received = getattr(out, "tensors", None)
    assert torch.equal(out, model(**inputs))


def test_a_stage_has_its_own_parameters_and_no_memory_for_others() -> None:
    split = split_model(Gpt(), make_inputs(), 3, "0-4-0")
    first, middle, last = make_stages(split)
    assert set(first.parameters()) == {"wte.weight", "wpe.weight"}
    assert set(last.parameters()) == {"norm.weight", "norm.bias", "head.weight"}
    assert all(name.startswith("blocks.") for name in middle.parameters())
    assert middle.module.wte.weight.untyped_storage().nbytes() == 4
    assert middle.module.wte.weight.device == torch.device("cpu")


def test_other_shapes_get_their_own_stubs_and_keep_them() -> None:
    split = split_model(models.Bert(), models.make_bert_inputs(), 2)
    last = split.make_stage(1)
    kept = last._loaded
    for size in (2, 3, 2, 3):
        got = [torch.randn(size, 8, 16)]
        last.forward(models.make_bert_inputs(size), got)
    assert len(kept) == 3  # the dummy inputs are of size 4


def test_code_that_differs_between_training_and_evaluation_gets_stubs_for_both() -> None:
    class Noisy(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(16, 16)

        def embed(self, ids: Tensor) -> Tensor:
            x = super().embed(ids)
            return torch.cat([self.extra(x), x], 1) if self.training else self.extra(x[:, :1]) + x

    model = Noisy()
    inputs = {"ids": make_inputs()["ids"]}
    stages = make_stages(split_model(model, inputs, 3))
    for mode in (True, False, True):
        model.train(mode)
        for stage in stages:
            stage.train(mode)
        assert torch.equal(chain(stages, inputs)[0], model(**inputs))


def test_none_and_non_tensor_inputs_reach_the_model() -> None:
    model = models.Bert()
    inputs = {**make_inputs(), "attention_mask": None, "return_dict": True}
    stages = make_stages(split_model(model, inputs, 3))
    out, plain = chain(stages, inputs)[0], model(**inputs)
    assert out.keys() == plain.keys()
    assert torch.equal(out["loss"], plain["loss"]) and torch.equal(out["state"], plain["state"])


def test_dropout_seeded_by_segment_is_the_same_in_any_layout() -> None:
    model, inputs = Gpt(dropout=0.3), make_inputs()

    def seed(segment: int) -> None:
        torch.manual_seed(100 + segment)

    with announce_segments(seed):
        loss = model(**inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for num_stages in (1, 2, 4):
        split = split_model(model, inputs, num_stages)
        stages = make_stages(split)
        out, log = chain(stages, inputs, seed)
        chain_backward(log, out)
        assert torch.equal(out, loss)
        assert_equal_gradients(gradients, sum_gradients(split, stages))


def test_only_the_stage_and_the_plain_code_before_it_run() -> None:
    seen: list[str] = []

    class Telling(nn.Linear):
        def __init__(self, name: str) -> None:
            super().__init__(4, 4)
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.name)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (Telling(name) for name in "abc")
            self.cuts = nn.ModuleList([models.CutPoint(), models.CutPoint()])

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.cuts[0](self.a(x))
                seen.append("plain")
                x = self.cuts[1](self.b(x))
                return self.c(x).sum()
            finally:
                seen.append("unwound")

    inputs = {"x": torch.ones(2, 4)}
    stages = make_stages(split_model(Model(), inputs, 3))
    seen.clear()
    chain(stages, inputs)
    assert seen == ["a", "unwound", "plain", "b", "unwound", "plain", "c", "unwound"]


def test_the_model_itself_is_left_alone() -> None:
    model = models.RootGpt()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    make_stages(split_model(model, make_inputs(), 3))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_code_that_looks_at_values_is_run_for_real() -> None:
    assert split_model(models.BranchGpt(), make_inputs(), 2).record.real
    assert not split_model(Gpt(), make_inputs(), 2).record.real


class Experts(nn.Module):
    """Multiplies groups of rows at once, as transformers' mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = CutPoint()
        self.weights = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        x = torch._grouped_mm(x, self.weights, offs=ends)
        x = torch._grouped_mm(self.cut(x), self.weights, offs=ends)
        return x.square().mean()


def test_a_failure_on_fake_tensors_is_not_logged_if_the_real_run_is_well() -> None:
    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logged: list[str] = []
    listening = Listening()
    torchs = logging.getLogger("torch._subclasses.fake_tensor")
    torchs.addHandler(listening)
    try:
        split = split_model(Experts(), {"x": torch.randn(4, 16)}, 2)
    finally:
        torchs.removeHandler(listening)
    if not split.record.real:
        pytest.skip("torch takes these tensors as fake ones too")
    assert logged == []
    assert not torchs.disabled


def test_autocast_is_seen_by_the_dry_run() -> None:
    """A dry run on the bare meta device takes no part in autocast: it would record float32."""
    model = models.AutocastGpt()
    split = split_model(model, make_inputs(), 2)
    outputs = [c.output for c in split.record.calls if c.module == "blocks.0.up"]
    assert outputs[0].dtype is torch.bfloat16


def test_balance_follows_the_cost_of_segments() -> None:
    split = split_model(Gpt(blocks=6), make_inputs(), 2)
    assert len(split.costs) == 8
    assert split.costs[1] == pytest.approx(split.costs[5])
    assert split.costs[1] > split.costs[0]
    given = split_model(Gpt(blocks=6), make_inputs(), 2, costs=[9, 0, 0, 0, 0, 0, 0, 9])
    assert given.stages[0] == range(0, 1)


class Averaging(Gpt):
    """Buffers changed unseen by torch's versions: through `.data`, a view, a batch norm's own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("by_data", "by_view", "mean", "var", "read"):
            self.register_buffer(name, torch.ones(models.WIDTH))

    def run_block(self, number: int, x: Tensor) -> Tensor:
        x = super().run_block(number, x)
        if number == 0:
            self.by_data.data.mul_(0.9)
        elif number == 1:
            self.by_view[:2] += 1
        elif number == 2:
            x = nn.functional.batch_norm(
                x.transpose(1, 2), self.mean, self.var, training=self.training
            ).transpose(1, 2)
        return x * self.read


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_change_are_found_however_they_are_changed(training: bool) -> None:
    """Also those of a model given in eval mode, for it may be trained."""
    split = split_model(Averaging().train(training), make_inputs(), 2, "1-3")
    changes = {name: set(found) for name, found in split.record.changes.items()}
    assert changes == {"by_data": {1}, "by_view": {2}, "mean": {3}, "var": {3}}
    stages = make_stages(split)
    assert [stage.list_changing() for stage in stages] == [["by_data"], ["by_view", "mean", "var"]]


def test_a_part_used_only_in_training_lies_where_it_is_used() -> None:
    class Aided(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.aid = nn.Linear(models.WIDTH, models.WIDTH)

        def run_block(self, number: int, x: Tensor) -> Tensor:
            x = super().run_block(number, x)
            return self.aid(x) if self.training and number == 1 else x

    model, inputs = Aided().eval(), make_inputs()
    split = split_model(model, inputs, 3, "0-4-0")
    assert split.owners("aid.weight") == (1,)
    stages = make_stages(split)
    model.train()
    for stage in stages:
        stage.train()
    assert torch.equal(chain(stages, inputs)[0], model(**inputs))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_what_frozen_parameters_make_may_go_around_a_cut(num_stages: int) -> None:
    """Each stage makes it anew, of the parameters' true values."""

    class Fourier(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.randn(models.WIDTH), requires_grad=False)

        def forward(self, ids: Tensor, labels: Tensor | None = None, **ignored: Any) -> Any:
            shift, x = torch.sin(self.waves * 2), self.embed(ids)
            for number in range(len(self.blocks)):
                x = self.run_block(number, self.cuts[number](x) + shift)
            return self.compute_loss(self.cuts[-1](x), labels)

    model, inputs = Fourier(), make_inputs()
    split = split_model(model, inputs, num_stages)
    assert split.owners("waves") == tuple(range(num_stages))
    stages = make_stages(split)
    loss, gradients = run_plain(model, inputs)
    out, log = chain(stages, inputs)
    chain_backward(log, out)
    assert torch.equal(loss, out)
    assert_equal_gradients(gradients, sum_gradients(split, stages))


def test_a_stages_lists_of_modules_are_lists_as_before() -> None:
    module: Any = split_model(Gpt(), make_inputs(), 1).make_stage(0).module
    blocks = module.blocks
    assert isinstance(blocks, nn.ModuleList) and module.get_submodule("blocks") is blocks
    assert [blocks[i] for i in range(-4, 4)] == [*blocks, *blocks]
    assert blocks[torch.tensor(1)] is blocks[1] and len(blocks[1:3]) == 2
    with pytest.raises(IndexError):
        blocks[4]
    blocks[1] = nn.Identity()
    blocks.append(blocks[1])
    assert blocks[4] is blocks[1] is module.blocks[1] and len(list(blocks)) == 5
    module.blocks = blocks[:2]
    assert len(module.blocks) == 2


def test_what_cannot_be_copied_is_shared_by_the_copies() -> None:
    model: Any = Gpt()
    model.blocks[0].lock, model.library = threading.Lock(), torch
    module: Any = split_model(model, make_inputs(), 1).make_stage(0).module
    assert module.blocks[0].lock is model.blocks[0].lock and module.library is torch
    with pytest.raises(TypeError):
        copy.deepcopy(model)
