"""Models that change their inputs in place train as the plain model does, or are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna_core import CutPoint, Varuna
from varuna_core.runtime.split.cut import LeakError, SplitError
from varuna_core.runtime.split.split import split_model

WIDTH, SIZE = 8, 6


class Net(nn.Module):
    """Three segments, with a place in each to write into inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.cuts = nn.ModuleList([CutPoint(), CutPoint()])

    def begin(self, inputs: Any) -> None:
        pass

    def middle(self, inputs: Any) -> None:
        pass

    def end(self, inputs: Any) -> None:
        pass

    def forward(self, **inputs: Any) -> Tensor:
        self.begin(inputs)
        x = torch.tanh(self.first(inputs["x"]))
        x = self.cuts[0](x)
        self.middle(inputs)
        x = torch.tanh(self.second(x) + inputs["more"]["shift"])
        x = self.cuts[1](x)
        self.end(inputs)
        return F.mse_loss(self.last(x), inputs["y"])


class First(Net):
    def begin(self, inputs: Any) -> None:
        inputs["y"].add_(1)


class Middle(Net):
    def middle(self, inputs: Any) -> None:
        inputs["more"]["shift"] *= 1.5
        inputs["y"].add_(inputs["more"]["shift"])


class Last(Net):
    def end(self, inputs: Any) -> None:
        inputs["y"].add_(1)


class OfAView(Net):
    def begin(self, inputs: Any) -> None:
        inputs["y"].view(-1, WIDTH)[:, ::3].mul_(-1)
        inputs["more"]["shift"].t()[2:4].zero_()


class Table(Net):
    """What goes whole to each micro-batch."""

    def begin(self, inputs: Any) -> None:
        inputs["table"] += 1
        inputs["y"].mul_(inputs["table"])


class Popped(Net):
    """A container among the inputs is changed."""

    def middle(self, inputs: Any) -> None:
        more = inputs["more"]
        more["shift"] = more["shift"] + more.pop("extra", 0)


class Looking(Net):
    """The dry run is one of true values."""

    def begin(self, inputs: Any) -> None:
        if inputs["x"].sum().item() < 1e9:
            inputs["y"].add_(1)


KINDS = [First, Middle, Last, OfAView, Table, Popped, Looking]


def make_batch(seed: int = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(SIZE, WIDTH, generator=draw),
        "y": torch.randn(SIZE, WIDTH, generator=draw),
        "table": torch.randn(WIDTH, generator=draw),
        "more": {
            "shift": torch.randn(SIZE, WIDTH, generator=draw),
            "extra": torch.randn(SIZE, WIDTH, generator=draw),
        },
    }


def train_both(
    kind: type[nn.Module], make: Any = make_batch, **options: Any
) -> tuple[Varuna, nn.Module]:
    """Two steps and evaluations of each, compared."""
    torch.manual_seed(0)
    plain = kind()
    varuna = Varuna(copy.deepcopy(plain), "0;", make(), SIZE, 2, device="cpu", **options)
    for step in range(2):
        batch = make(step)
        loss, _ = varuna.step(batch)
        expected = plain(**make(step))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), msg=lambda m: f"loss: {m}")
        for name, master in varuna.masters().items():
            wanted = plain.get_parameter(name).grad
            assert wanted is not None
            torch.testing.assert_close(master.grad, wanted, msg=lambda m, n=name: f"{n}: {m}")
        again = [varuna.evaluate(batch) for _ in range(2)]
        torch.testing.assert_close(again, [expected.detach()] * 2)
        unchanged = torch.utils._pytree.tree_map(torch.equal, batch, make(step))
        assert all(torch.utils._pytree.tree_leaves(unchanged))
        varuna.zero_grad()
        plain.zero_grad()
    return varuna, plain


WAYS: list[dict[str, Any]] = [
    {"recompute": "none"},
    {"recompute": "full"},
    {"schedule": "interleaved", "stages_per_rank": 3, "recompute": "full"},
    {"schedule": "zbv", "stages_per_rank": 2, "partition": "1-2"},
]


@pytest.mark.parametrize("way", WAYS, ids=["none", "full", "three stages", "zbv"])
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_the_model_changes_are_new_in_each_forward(
    kind: type[nn.Module], way: dict[str, Any]
) -> None:
    train_both(kind, **way)


@pytest.mark.parametrize("shared", ["whole", "part"])
def test_inputs_of_one_memory_change_together(shared: str) -> None:
    class Both(Net):
        def begin(self, inputs: Any) -> None:
            inputs["x"].add_(1)

    def make(seed: int = 0) -> dict[str, Any]:
        batch = make_batch(seed)
        wide = torch.randn(SIZE, 2 * WIDTH, generator=torch.Generator().manual_seed(seed))
        batch["x"] = wide[:, :WIDTH]
        batch["y"] = batch["x"] if shared == "whole" else wide[:, 3 : WIDTH + 3]
        return batch

    for way in WAYS:
        train_both(Both, make, **way)


def test_an_input_changed_in_a_module_that_a_later_stage_does_not_run_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x.clone())
            x.mul_(2)
            return out

    class Net2(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = Writes(WIDTH, WIDTH)

        def end(self, inputs: Any) -> None:
            inputs["y"] = inputs["y"] + inputs["x"].detach()

    class Unread(Net2):
        def end(self, inputs: Any) -> None:
            pass

    with pytest.raises(SplitError, match=r"input 'x' is changed .* by module 'first'.* in stage 1"):
        split_model(Net2(), make_batch(), 2, "2-1")
    train_both(Net2, recompute="full")
    train_both(Unread, **WAYS[2])


def test_a_leak_through_an_input_blames_its_maker() -> None:
    class Leaky(Net):
        def forward(self, **inputs: Any) -> Tensor:
            h = self.first(inputs["x"])
            inputs["y"].add_(h.detach())
            x = self.cuts[1](self.second(self.cuts[0](h)))
            return F.mse_loss(self.last(x), inputs["y"])

    split = split_model(Leaky(), make_batch(), 3)
    with pytest.raises(LeakError, match="by module 'first' is used after it, in stage 2"):
        split.make_stage(2)


def test_only_inputs_that_change_are_copied() -> None:
    seen: list[dict[str, Any]] = []

    class Watched(Last):
        def begin(self, inputs: Any) -> None:
            seen.append(inputs)

    torch.manual_seed(0)
    stage = split_model(Watched(), make_batch(), 1).make_stage(0)
    batch = make_batch()
    stage.forward(batch)
    assert seen[-1]["x"] is batch["x"] and seen[-1]["table"] is batch["table"]
    assert seen[-1]["y"] is not batch["y"]


# What crosses a cut.


class Crossing(Net):
    """A mask crosses each cut, and is changed after it."""

    def forward(self, **inputs: Any) -> Tensor:
        x = torch.tanh(self.first(inputs["x"]))
        mask = inputs["y"] > 0
        scale = mask.float()
        x, mask, scale = self.cuts[0](x, mask, scale)
        mask.logical_not_()
        scale.add_(1)
        x = torch.tanh(self.second(x) * mask * scale.clone())
        x, mask, scale = self.cuts[1](x, mask, scale)
        scale.mul_(2)
        return F.mse_loss(self.last(x) * scale, inputs["y"])


class PassedOn(Net):
    """An input crosses the cuts and is changed after them."""

    def forward(self, **inputs: Any) -> Tensor:
        y = inputs["y"]
        x, y = self.cuts[0](torch.tanh(self.first(inputs["x"])), y)
        y.add_(1)
        x, y = self.cuts[1](torch.tanh(self.second(x)), y)
        y.add_(1)
        return F.mse_loss(self.last(x), y)


class TrainingOnly(Net):
    def forward(self, **inputs: Any) -> Tensor:
        scale = inputs["y"].abs()
        x, scale = self.cuts[0](torch.tanh(self.first(inputs["x"])), scale)
        if self.training:
            scale.add_(1)
            inputs["y"].mul_(2)
        x, scale = self.cuts[1](torch.tanh(self.second(x) * scale), scale)
        return F.mse_loss(self.last(x), inputs["y"])


@pytest.mark.parametrize("way", WAYS, ids=["none", "full", "three stages", "zbv"])
@pytest.mark.parametrize("kind", [Crossing, PassedOn])
def test_received_tensors_that_the_model_changes_are_new_in_each_forward(
    kind: type[nn.Module], way: dict[str, Any]
) -> None:
    train_both(kind, **way)


def test_a_change_in_training_mode_alone_is_seen_of_a_model_given_in_eval_mode() -> None:
    torch.manual_seed(0)
    plain = TrainingOnly()
    varuna = Varuna(
        copy.deepcopy(plain).eval(), "0;", make_batch(), SIZE, 2, device="cpu",
        schedule="interleaved", stages_per_rank=3, recompute="full",
    )  # fmt: skip
    varuna.train()
    varuna.step(make_batch())
    plain(**make_batch()).backward()
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)


def test_two_tensors_of_one_memory_through_a_cut_of_which_one_is_changed_are_refused() -> None:
    class Twin(Net):
        def forward(self, **inputs: Any) -> Tensor:
            scale = inputs["y"].abs()
            x = torch.tanh(self.first(inputs["x"]))
            x, scale, part = self.cuts[0](x, scale, scale[:, :1])
            scale.add_(1)
            x, part = self.cuts[1](torch.tanh(self.second(x) * scale), part)
            return F.mse_loss(self.last(x) * part, inputs["y"])

    class Apart(Net):
        def forward(self, **inputs: Any) -> Tensor:
            left, right = inputs["y"].abs().chunk(2, -1)
            x = torch.tanh(self.first(inputs["x"]))
            x, left, right = self.cuts[0](x, left, right)
            left.add_(1)
            x, left, right = self.cuts[1](torch.tanh(self.second(x)), left, right)
            return F.mse_loss(self.last(x) * torch.cat([left, right], -1), inputs["y"])

    with pytest.raises(SplitError, match=r"cut 0 \(cuts\.0\).*share memory.*clone"):
        split_model(Twin(), make_batch(), 3)
    split_model(Twin(), make_batch(), 2, "2-1")  # no boundary there
    train_both(Apart, **WAYS[2])


# What no dry run can see.


def test_a_change_that_the_dry_run_has_not_seen_ends_the_step() -> None:
    class Seldom(Net):
        def begin(self, inputs: Any) -> None:
            if inputs["x"].max() > 100:
                inputs["y"].add_(1)

    varuna = Varuna(Seldom(), "0;", make_batch(), SIZE, 2, device="cpu", recompute="full")
    varuna.step(make_batch())
    batch = make_batch()
    batch["x"] *= 1000
    with pytest.raises(RuntimeError, match=r"input 'y' was changed .* dummy_inputs"):
        varuna.step(batch)


def test_a_received_tensor_changed_unforeseen_ends_the_step() -> None:
    class Seldom(Net):
        def forward(self, **inputs: Any) -> Tensor:
            x, scale = self.cuts[0](torch.tanh(self.first(inputs["x"])), inputs["y"] * 1)
            if scale.max() > 100:
                scale.add_(1)
            x, scale = self.cuts[1](torch.tanh(self.second(x)), scale)
            return F.mse_loss(self.last(x), scale)

    options: dict[str, Any] = {"schedule": "interleaved", "stages_per_rank": 3}
    varuna = Varuna(
        Seldom(), "0;", make_batch(), SIZE, 2, device="cpu", recompute="full", **options
    )
    batch = make_batch()
    batch["y"] *= 1000
    with pytest.raises(RuntimeError, match=r"crosses cut 0 \(cuts\.0\) was changed"):
        varuna.step(batch)
