"""Models of other libraries, cut by patterns and trained in two stages as the plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests import ROOT
from tests.models.architectures import ARCHITECTURES, Architecture, Inputs, ResNet
from varuna_core import Varuna
from varuna_core.runtime.split.cut import SplitError, cut_before
from varuna_core.runtime.split.wrappers import with_loss

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries themselves warn of
CHUNK, CHUNKS, STEPS, RATE = 2, 2, 2, 0.1


def build(kind: Architecture) -> nn.Module:
    if not kind.is_installed:
        pytest.skip(f"{kind.library} is not installed")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return kind.build().train()


def find_plain_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"]
    return loss


def train_plainly(model: nn.Module, batches: list[list[Inputs]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        each = [find_plain_loss(model(**part)) / len(batch) for part in batch]
        torch.stack(each).sum().backward()
        losses.append(float(torch.stack(each).sum()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def join(parts: list[Inputs]) -> Inputs:
    first = parts[0]
    return {n: v if n == "mask" else torch.cat([p[n] for p in parts]) for n, v in first.items()}


@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda kind: kind.title)
def test_a_model_of_others_is_trained_in_two_stages_as_the_plain_one(kind: Architecture) -> None:
    model = build(kind)
    plain = copy.deepcopy(model)
    assert cut_before(model, *kind.patterns, carry=kind.carry) is model
    batches = [[kind.inputs(CHUNK, 10 * s + c) for c in range(CHUNKS)] for s in range(STEPS)]
    if kind.refusal:
        with pytest.raises(SplitError, match=kind.refusal):
            Varuna(model, "0;", batches[0][0], CHUNK * CHUNKS, CHUNK, device="cpu",
                   schedule="interleaved", stages_per_rank=2)  # fmt: skip
        return
    varuna = Varuna(model, "0;", batches[0][0], CHUNK * CHUNKS, CHUNK, device="cpu",
                    schedule="interleaved", stages_per_rank=2)  # fmt: skip
    assert len(varuna.part.stages) == 2 and all(stage.segments for stage in varuna.part.stages)
    optimizer = torch.optim.SGD(varuna.parameters(), lr=RATE)
    varuna.set_optimizer(optimizer)
    losses = []
    for batch in batches:
        losses.append(float(varuna.step(join(batch))[0]))
        optimizer.step()
        varuna.zero_grad()
    assert losses == pytest.approx(train_plainly(plain, batches), rel=1e-5)
    expected = {**plain.state_dict()}
    for name, tensor in varuna.state_dict().items():
        torch.testing.assert_close(tensor, expected.pop(name), atol=2e-6, rtol=2e-5, msg=name)
    assert not expected, expected.keys()
    varuna.close()


def render_table() -> list[str]:
    """Rows of the page: models by the pattern that cuts them, refused ones with their remedy."""
    trained: dict[str, list[str]] = {}
    refused = []
    for kind in ARCHITECTURES:
        patterns = ", ".join(f"`{pattern}`" for pattern in kind.patterns)
        patterns += f"; carry {', '.join(f'`{name}`' for name in kind.carry)}" if kind.carry else ""
        if kind.remedy:
            refused.append(f"| {patterns} | {kind.title}: {kind.remedy} |")
        else:
            trained.setdefault(patterns, []).append(kind.title)
    rows = [f"| {patterns} | {', '.join(titles)} |" for patterns, titles in trained.items()]
    return rows + refused


def test_a_pattern_without_any_module_is_refused_with_those_that_there_are() -> None:
    model = ResNet()
    with pytest.raises(
        SplitError, match=r"matches 'layers\.\*': there are 'layer1\.\*' \(2 of Resid"
    ):
        cut_before(model, "layers.*")
    with pytest.raises(SplitError, match=r"matches 'conv\.\*': there are 'layer1\.\*'"):
        cut_before(model, "conv.*")
    with pytest.raises(SplitError, match="Linear matches '0': there are none"):
        cut_before(nn.Linear(2, 2), "0")
    with pytest.raises(SplitError, match=r"carry has 'memory', but the modules' inputs are x$"):
        cut_before(model, "layer1.*", carry="memory")
    with pytest.raises(TypeError, match="a model and then patterns"):
        cut_before("layer1.*", model)  # type: ignore[call-overload]


def test_a_star_does_not_reach_over_a_dot() -> None:
    model = cut_before(ResNet(), "layer?.*", "f*")
    marked = [name for name, module in model.named_modules() if hasattr(module, "cut_before_this")]
    assert marked == ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]


def test_a_criterion_outside_the_model_becomes_part_of_it() -> None:
    model = ResNet()
    names = model.state_dict().keys()
    x, target = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    plain = model(x)
    with_loss(model, nn.CrossEntropyLoss())
    assert isinstance(model, ResNet) and model.state_dict().keys() == names
    assert torch.equal(model(x), plain)
    found = model(x, target)
    assert torch.equal(found["output"], plain) and torch.equal(found["output"], plain)
    assert torch.equal(found["loss"], nn.functional.cross_entropy(plain, target))
    assert torch.equal(model(x, target=target)["loss"], model(x=x, target=target)["loss"])
    with pytest.raises(SplitError, match="choose another name"):
        with_loss(model, nn.CrossEntropyLoss())


def test_the_documents_list_the_models() -> None:
    page = (ROOT / "docs/training.md").read_text()
    assert "\n" + "\n".join(render_table()) + "\n" in page, "\n".join(render_table())
