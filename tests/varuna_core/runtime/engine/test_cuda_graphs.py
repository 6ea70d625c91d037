"""What is recorded, and what is not; the cases "recorded" of test_varuna.py show that both train
alike. There is no GPU here: recorded work is run again (tests/ranks/rerun.py)."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import ConvNet, Gpt, make_images, make_inputs
from tests.ranks.rerun import Rerun, instead_of_cuda_graphs
from varuna_core import Varuna
from varuna_core.runtime.engine.cuda_graphs import NUM_SHAPES, why_none_recorded


@pytest.fixture(autouse=True)
def stand_in(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "varuna_core")
    with instead_of_cuda_graphs():
        yield


def build(model: nn.Module | None = None, batch: Any = None, **options: Any) -> Varuna:
    torch.manual_seed(0)
    batch = make_inputs(2) if batch is None else batch
    return Varuna(model or Gpt(), "0;", batch, 6, 2, device="cpu", cuda_graphs=True, **options)


def count(varuna: Varuna) -> int:
    assert varuna.engine.passes.graphs is not None
    return varuna.engine.passes.graphs.num_made


def take(varuna: Varuna, *steps: dict[str, Any]) -> list[int]:
    """How many recordings there are after each step."""
    made = []
    for batch in steps:
        varuna.step(batch)
        varuna.zero_grad()
        made.append(count(varuna))
    return made


def test_as_many_are_made_as_are_under_way() -> None:
    batch = make_inputs(6)
    assert take(build(schedule="1f1b"), *[batch] * 4) == [0, 1, 1, 1]
    assert take(build(schedule="gpipe"), *[batch] * 4) == [0, 3, 3, 3]


def test_four_shapes_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    lengths = range(2, 2 + NUM_SHAPES + 2)
    batches = [make_inputs(6, length) for length in lengths for _ in range(2)]
    made = take(build(schedule="1f1b"), *batches, *batches)
    assert made[-1] == NUM_SHAPES and made == sorted(made)
    assert caplog.text.count(f"at most {NUM_SHAPES} shapes of batches") == 1


def test_weights_that_lie_elsewhere_are_recorded_anew() -> None:
    varuna, batch = build(schedule="1f1b"), make_inputs(6)
    assert take(varuna, batch, batch, batch)[-1] == 1
    parameter = next(iter(varuna.parameters()))
    parameter.data = parameter.data.clone()
    assert take(varuna, batch, batch) == [2, 2]


def test_evaluations_and_steps_that_are_asked_for_outputs_run_as_ever() -> None:
    class Told(Gpt):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            loss = super().forward(ids, labels)
            return {"loss": loss, "twice": loss.detach() * 2}

    varuna, batch = build(Told(), schedule="1f1b"), make_inputs(6)
    for _ in range(3):
        loss, _, told = varuna.step(batch, outputs=["twice"])
        assert torch.allclose(told["twice"], 2 * loss)
        varuna.evaluate(batch)
        varuna.zero_grad()
    assert count(varuna) == 0
    assert take(varuna, batch, batch)[-1] == 1


def test_gradients_that_are_kept_are_added_to_and_those_of_no_use_are_none() -> None:
    class Idle(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(3, 3)

    varuna, batch = build(Idle(), schedule="1f1b", precision="bf16"), make_inputs(6)
    take(varuna, batch, batch)
    varuna.step(batch)
    once = {name: p.grad.clone() for name, p in varuna.named_parameters() if p.grad is not None}
    varuna.step(batch)
    for name, parameter in varuna.named_parameters():
        if name.startswith("idle"):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, 2 * once[name])
    assert count(varuna) == 1


@pytest.mark.parametrize("reason", ["random numbers", "hooks"])
def test_what_cannot_be_recorded_is_told(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Gpt(dropout=0.5) if reason == "random numbers" else Gpt()
    if reason == "hooks":
        model.blocks[1].register_forward_hook(lambda *given: None)
    varuna, batch = build(model), make_inputs(6)
    assert take(varuna, batch, batch, batch) == [0, 0, 0]
    assert "stage 0: no CUDA graphs: " in caplog.text and reason in caplog.text


def test_a_recording_that_fails_leaves_the_step_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    for fails in (False, True):
        if fails:

            def record(self: Rerun, work: Any) -> Any:
                raise RuntimeError("operation not permitted when stream is capturing\nand so on")

            monkeypatch.setattr(Rerun, "record", record)
        varuna, batch = build(schedule="1f1b"), make_inputs(6)
        losses.append([varuna.step(batch)[0] for _ in range(3)])
        losses[-1] += [p.grad for p in varuna.parameters()]
    assert count(varuna) == 0
    torch.testing.assert_close(losses[0], losses[1])
    assert caplog.text.count("stage 0: no CUDA graphs: RuntimeError: operation not permitted") == 1


def test_a_stage_that_is_given_up_keeps_no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    record, left = Rerun.record, [5]

    def fail_later(self: Rerun, work: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of memory")
        return record(self, work)

    monkeypatch.setattr(Rerun, "record", fail_later)
    varuna, batch = build(schedule="gpipe"), make_inputs(6)
    take(varuna, batch, batch, batch)
    assert varuna.engine.passes.graphs is not None
    assert count(varuna) == 2 and not varuna.engine.passes.graphs._free


def test_a_split_backward_is_not_recorded() -> None:
    batch = make_inputs(6)
    varuna = build(schedule="zero_bubble")
    split = {action.microbatch for action in varuna._plan(3)[0] if action.kind == "I"}
    assert take(varuna, batch, batch, batch)[-1] <= 3 - len(split)


def test_shapes_that_come_no_more_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna_core.runtime.engine.cuda_graphs.IDLE_STEPS", 3)
    varuna = build(schedule="1f1b")
    shapes = [make_inputs(6, length) for length in range(2, 2 + NUM_SHAPES)]
    take(varuna, *[batch for batch in shapes for _ in range(2)])
    other = make_inputs(6, 8)
    made = take(varuna, *[other] * 8)
    assert made[-1] > made[0], "the new shape is recorded in the place of old ones"
    assert (
        varuna.engine.passes.graphs is not None
        and len(varuna.engine.passes.graphs._known) <= NUM_SHAPES
    )


def test_a_mask_that_was_made_for_a_shape_stays_as_long_as_its_recording() -> None:
    class Masked(Gpt):
        mask: Tensor | None = None

        def embed(self, ids: Tensor) -> Tensor:
            if self.mask is None or len(self.mask) != ids.shape[1]:
                self.mask = torch.ones(ids.shape[1], 1)
            return super().embed(ids) * self.mask

    varuna, batch = build(Masked(), schedule="1f1b"), make_inputs(6)
    take(varuna, batch, batch)
    mask = weakref.ref(varuna.part.stages[0].module.mask)
    varuna.evaluate(make_inputs(6, 4))
    assert varuna.part.stages[0].module.mask is not mask() is not None


def test_a_buffer_that_is_given_another_tensor_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Averaging(Gpt):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(()))

        def embed(self, ids: Tensor) -> Tensor:
            x = super().embed(ids)
            self.average = 0.9 * self.average + x.detach().mean()
            return x

    averages = []
    for graphs in (False, True):
        varuna, batch = build(Averaging(), schedule="1f1b"), make_inputs(6)
        if not graphs:
            varuna.engine.passes.graphs = None
        for _ in range(3):
            varuna.step(batch)
        averages.append(dict(varuna.named_buffers())["average"])
    assert count(varuna) == 0 and "replaces a buffer by another tensor" in caplog.text
    torch.testing.assert_close(averages[0], averages[1])


def test_a_user_may_give_a_gradient_other_memory() -> None:
    varuna, batch = build(schedule="1f1b"), make_inputs(6)
    take(varuna, batch, batch)
    varuna.step(batch)
    expected = [p.grad.clone() for p in varuna.parameters() if p.grad is not None]
    for parameter in varuna.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 0.5
    varuna.zero_grad()
    varuna.step(batch)
    torch.testing.assert_close([p.grad for p in varuna.parameters()], expected)
    assert count(varuna) == 1


def test_statistics_are_counted_once_a_micro_batch() -> None:
    batch = make_images(6)
    varuna = build(ConvNet(), make_images(2), schedule="1f1b")
    take(varuna, *[batch] * 4)
    counts = {int(value) for name, value in varuna.named_buffers() if name.endswith("tracked")}
    assert counts == {12} and count(varuna) == 1


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ((1, 0, "cpu"), "a device other than a GPU"),
        ((2, 0, "cuda"), "tensor above 1"),
        ((1, 2, "cuda"), "zero=2"),
        ((1, 1, "cuda"), ""),
    ],
)
def test_a_layout_that_cannot_have_them_is_told(layout: tuple[int, int, str], reason: str) -> None:
    tensor, zero, device = layout
    said = why_none_recorded(tensor, zero, torch.device(device))
    assert said.startswith(reason) if reason else not said
