"""Which modules of a stage are compiled, how many graphs they make, and what becomes of others."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import Block, Gpt, make_inputs
from varuna_core import Varuna
from varuna_core.runtime.engine.compiled import CompiledForward

# torch's compiler looks at the `grad` of what enters a graph, and is made of deprecated parts:
# torch warns of both.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "varuna_core")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class BreakingBlock(Block):
    """torch.compile cannot make one graph of it."""

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Any = None) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, mask, memory)


class BreakingGpt(Gpt):
    """Its second and its third block are such."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[2] = BreakingBlock(), BreakingBlock()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.drop(x))


class DrawingGpt(Gpt):
    """Random numbers are drawn in a part of it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.more = Head()

    def compute_loss(self, x: Tensor, labels: Tensor | None) -> Tensor:
        return super().compute_loss(self.more(x), labels)


def make(model: type[nn.Module] = Gpt, size: int = 8, **options: Any) -> Varuna:
    torch.manual_seed(0)
    options = {"schedule": "gpipe", "compile": "aot_eager", **options}
    return Varuna(model(), "0;", make_inputs(2), size, 2, device="cpu", **options)


def train(varuna: Varuna, sizes: list[int], evaluates: bool = True) -> list[Tensor]:
    optimizer = torch.optim.SGD(varuna.parameters(), lr=0.1)
    varuna.set_optimizer(optimizer)
    losses = []
    for step, size in enumerate(sizes):
        losses.append(varuna.step(make_inputs(size, seed=step))[0])
        optimizer.step()
        varuna.zero_grad()
    if evaluates:
        varuna.eval()
        losses.append(varuna.evaluate(make_inputs(4)))
        varuna.train()
        losses.append(varuna.evaluate(make_inputs(4)))
    varuna.close()
    return losses


def list_compiled(varuna: Varuna) -> list[str]:
    return [
        name
        for stage in varuna.part.stages
        for name, module in stage.module.named_modules()
        if isinstance(vars(module).get("forward"), CompiledForward)
    ]


BLOCKS = [f"blocks.{k}" for k in range(4)]


def test_the_blocks_are_compiled_and_the_log_names_them(caplog: pytest.LogCaptureFixture) -> None:
    varuna = make(schedule="zero_bubble")
    assert list_compiled(varuna) == BLOCKS
    assert "compiles 4 modules (blocks.0, blocks.1, blocks.2, blocks.3)" in caplog.text
    assert "their weight gradients are not postponed" in caplog.text
    varuna.close()


def test_blocks_of_one_class_share_graphs_whose_number_steps_do_not_raise() -> None:
    """Sizes of two and of one, in training; without gradients in both modes of a module."""
    varuna = make()
    losses = train(varuna, [8, 8, 7, 8, 5, 7, 3])
    found = count_graphs()
    assert 0 < found <= 4
    plain = train(make(compile=False), [8, 8, 7, 8, 5, 7, 3])
    torch.testing.assert_close(losses, plain)


def test_other_sizes_of_micro_batches_make_no_graph_each() -> None:
    torch.manual_seed(0)
    varuna = Varuna(
        Gpt(), "0;", make_inputs(8), 8, 8, device="cpu", schedule="1f1b", compile="aot_eager"
    )
    train(varuna, [8, 7, 6, 5, 4, 3], evaluates=False)
    assert count_graphs() == 2


def test_recomputed_forwards_make_a_graph_of_their_own() -> None:
    losses = train(make(recompute="full"), [8, 7])
    assert count_graphs() <= 6
    torch.testing.assert_close(losses, train(make(compile=False, recompute="full"), [8, 7]))


def test_in_half_precision_it_trains_as_uncompiled() -> None:
    kept: dict[str, Any] = {"precision": "bf16", "keep_fp32": ["blocks.*.norm1"]}
    varuna = make(**kept)
    assert list_compiled(varuna) == BLOCKS
    losses, plain = train(varuna, [8, 7]), train(make(compile=False, **kept), [8, 7])
    assert count_graphs()
    torch.testing.assert_close(losses, plain, atol=2e-2, rtol=1e-2)


def test_modules_that_draw_are_left_and_their_parts_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    varuna = make(DrawingGpt)
    assert list_compiled(varuna) == [*BLOCKS, "more.norm"]
    assert "not compiled: more: the module uses random numbers" in caplog.text
    varuna.close()


def test_a_class_that_cannot_be_compiled_is_named_once_and_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    losses = train(make(BreakingGpt), [8, 7])
    messages = [r.getMessage() for r in caplog.records if "no longer" in r.getMessage()]
    assert len(messages) == 1
    assert "'blocks.1': each BreakingBlock is no longer compiled" in messages[0]
    torch.testing.assert_close(losses, train(make(BreakingGpt, compile=False), [8, 7]))


def test_with_slices_of_weights_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    varuna = make(zero=3)
    assert list_compiled(varuna) == []
    assert "torch.compile is not supported with zero=3" in caplog.text
    varuna.close()


def test_a_backend_that_torch_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="compile='nonsense': expected True, False or a torch"):
        make(compile="nonsense")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++)")
def test_torchs_own_compiler_gives_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    varuna = make(compile=True, size=4)
    losses = train(varuna, [4, 4], evaluates=False)
    assert count_graphs() == 1
    plain = train(make(compile=False, size=4), [4, 4], evaluates=False)
    torch.testing.assert_close(losses, plain)
