"""The user's model as a rank sees it: its methods, with the rank's masters for parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import small
from tests.models.foreign import build_gpt2, load_transformers, make_text
from varuna_core import Varuna


class Gpt(small.TiedGpt):
    """With methods as nanoGPT and minGPT have them."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.config = 0.5, {"width": small.WIDTH}

    def configure_optimizers(self, decay: float) -> torch.optim.Optimizer:
        held = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in held.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in held.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    def list_weights_of_layers(self) -> list[str]:
        """By module, as minGPT sorts them."""
        return [
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, nn.Linear)
            for name, _ in module.named_parameters()
        ]

    def set_rate(self, rate: float) -> None:
        self.rate = rate

    def compute_loss(self, x: Tensor, labels: Any) -> Tensor:
        return super().compute_loss(x, labels) * self.rate

    @torch.no_grad()
    def generate(self, ids: Tensor) -> Tensor:
        return self(ids)  # type: ignore[no-any-return]


def make(**options: Any) -> Varuna:
    torch.manual_seed(0)
    options = {"schedule": "interleaved", "stages_per_rank": 2, **options}
    return Varuna(Gpt(), "0;", small.make_inputs(2), 4, 2, device="cpu", **options)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"offload": "optimizer"}])
def test_a_method_of_the_model_makes_an_optimizer_of_the_masters(options: dict[str, Any]) -> None:
    model, plain = make(**options), Gpt()
    optimizer = model.set_optimizer(model.module.configure_optimizers(decay=0.1))
    masters = {id(parameter) for parameter in model.parameters()}
    found = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(found) == sorted(masters)
    groups, expected = optimizer.param_groups, plain.configure_optimizers(0.1).param_groups
    assert [len(group["params"]) for group in groups] == [len(g["params"]) for g in expected]
    assert all(p.dtype == torch.float32 for group in groups for p in group["params"])
    before = model.step(small.make_inputs(4))[0]
    optimizer.step()
    assert model.evaluate(small.make_inputs(4)) < before
    model.close()


def test_names_and_classes_are_those_of_the_users_model() -> None:
    model, plain = make(), Gpt()
    assert isinstance(model.module, Gpt)
    assert [name for name, _ in model.module.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert model.module.list_weights_of_layers() == plain.list_weights_of_layers()
    assert model.module.head.weight is model.module.wte.weight is model.masters()["wte.weight"]
    assert model.module.blocks[1].norm1.weight is model.masters()["blocks.1.norm1.weight"]
    assert model.module.config == {"width": small.WIDTH} and model.module.rate == 0.5
    assert model.module.state_dict().keys() == plain.state_dict().keys()
    model.close()


def test_what_a_method_sets_is_set_where_the_forward_reads_it() -> None:
    model = make()
    before = model.evaluate(small.make_inputs(4))
    model.module.set_rate(1.0)
    torch.testing.assert_close(model.evaluate(small.make_inputs(4)), 2 * before)
    model.module.eval()
    assert not any(m.training for s in model.part.stages for m in s.module.modules())
    model.close()


def test_a_rank_has_the_parameters_of_its_stages_alone() -> None:
    model = make()
    view: Any = make_view_of_first_stage(model)
    assert {name for name, _ in view.named_parameters()} < {n for n, _ in Gpt().named_parameters()}
    with pytest.raises(AttributeError, match=r"'norm\.weight' is not on this rank: it belongs to"):
        view.norm.weight.dim()
    model.close()


def make_view_of_first_stage(model: Varuna) -> Any:
    from varuna_core.runtime.rank_view import view_model

    stage = model.part.stages[0]
    nothing = nn.Parameter(torch.empty(0))
    return view_model([stage.module], stage.parameters(), [stage.buffers()], nothing)


def test_what_would_run_move_or_copy_the_whole_model_is_refused() -> None:
    model = make()
    module, ids = model.module, small.make_inputs(2)["ids"]
    for call, words in [
        (lambda: module(ids), "runs the whole model.*call step"),
        (lambda: module.generate(ids), "gather_state_dict"),
        (lambda: module.head(ids), "runs the whole model"),
        (lambda: module.half(), "device= and precision="),
        (lambda: module.load_state_dict({}), "state_dict="),
        (lambda: copy.deepcopy(module), "gather_state_dict"),
        (lambda: module.register_forward_hook(print), "before you create Varuna"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call()
    with pytest.raises(AttributeError, match="before you create Varuna"):
        module.head = nn.Linear(2, 2)
    model.close()


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_hugging_faces_keeps_its_methods_and_is_saved_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    library = load_transformers()
    model = Varuna(build_gpt2(), "0;", make_text(2), 2, 2, device="cpu")
    module = model.module
    assert module.config.n_layer == 4 and module.num_parameters() == build_gpt2().num_parameters()
    assert module.get_input_embeddings().weight is model.masters()["transformer.wte.weight"]
    with pytest.raises(RuntimeError, match="generate runs the whole model many times"):
        module.generate(make_text(1)["input_ids"])
    with pytest.raises(RuntimeError, match=r"model\.gather_state_dict"):
        module.save_pretrained(tmp_path)
    module.save_pretrained(tmp_path, state_dict=model.gather_state_dict())
    read = library.GPT2LMHeadModel.from_pretrained(tmp_path)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    model.close()


def test_a_rank_without_anything_to_train_has_an_empty_parameter_for_optimizers() -> None:
    torch.manual_seed(0)
    frozen = Gpt().requires_grad_(False)
    model = Varuna(frozen, "0;", small.make_inputs(2), 4, 2, device="cpu")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert [parameter.numel() for parameter in trained] == [0]
    model.set_optimizer(torch.optim.AdamW(trained))
    model.set_optimizer(model.module.configure_optimizers(0.1))
    assert model.state_dict().keys() == frozen.state_dict().keys()
