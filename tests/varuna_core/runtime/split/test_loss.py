"""The loss is found in what a model returns, or what stands in its way is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from varuna_core import CutPoint, TokenMean, Varuna
from varuna_core.runtime.split.cut import SplitError
from varuna_core.runtime.split.loss import pick_loss

INPUTS = {"x": torch.arange(12.0).view(6, 2) / 6, "y": torch.arange(6) % 2}


class Fields(NamedTuple):
    logits: Tensor
    cost: Tensor


@dataclass
class Data:
    logits: Tensor
    cost: Tensor


class WithLoss:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


class Net(nn.Module):
    def __init__(self, give: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.give = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), give
        self.cut = CutPoint()
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / (place + 2))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.layers[1](self.cut(self.layers[0](x)))
        if y is None:
            return logits
        loss = nn.functional.cross_entropy(logits, y)
        return self.give(logits, loss, (logits.argmax(-1) == y).float().mean())


def compute_plainly() -> tuple[Tensor, Tensor]:
    net = Net(lambda logits, loss, accuracy: loss)
    loss = net(**INPUTS)
    loss.backward()
    return loss.detach(), net.layers[0].weight.grad


def mean_of(loss: Tensor, logits: Tensor) -> TokenMean:
    return TokenMean(loss * len(logits), torch.tensor(len(logits)))


FOUND: dict[str, Callable[..., Any]] = {
    "alone": lambda logits, loss, accuracy: loss,
    "first": lambda logits, loss, accuracy: (loss, accuracy),
    "last": lambda logits, loss, accuracy: (logits, loss),
    "in the middle": lambda logits, loss, accuracy: [logits, loss, accuracy],
    "in a tuple of a tuple": lambda logits, loss, accuracy: (logits, (accuracy, loss)),
    "before a count": lambda logits, loss, accuracy: (loss, torch.tensor(7)),
    "in a dict": lambda logits, loss, accuracy: {"accuracy": accuracy, "cost": loss},
    "by name": lambda logits, loss, accuracy: {"other": loss * 3, "loss": loss},
    "in a named tuple": lambda logits, loss, accuracy: Fields(logits, loss),
    "in a dataclass": lambda logits, loss, accuracy: Data(logits, loss),
    "an attribute": lambda logits, loss, accuracy: WithLoss(loss),
    "of one element": lambda logits, loss, accuracy: (logits, loss.view(1)),
    "a pair by name": lambda logits, loss, accuracy: {"loss": (loss * len(logits), len(logits))},
    "a pair as an attribute": lambda logits, loss, accuracy: WithLoss(
        (loss * len(logits), len(logits))
    ),
    "a mean": lambda logits, loss, accuracy: mean_of(loss, logits),
    "a mean among others": lambda logits, loss, accuracy: (
        mean_of(accuracy, logits),
        mean_of(loss, logits),
    ),
}


@pytest.mark.parametrize("schedule", ["1f1b", "varuna"])
@pytest.mark.parametrize("name", FOUND)
def test_the_loss_is_found_wherever_it_stands(name: str, schedule: str) -> None:
    """With `varuna` the forward has no gradients, by which a loss is told from other numbers."""
    loss, gradient = compute_plainly()
    varuna = Varuna(Net(FOUND[name]), "0;", INPUTS, 6, 2, device="cpu", schedule=schedule)
    found, _ = varuna.step(INPUTS)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(varuna.masters()["layers.0.weight"].grad, gradient)
    torch.testing.assert_close(varuna.evaluate(INPUTS), loss)
    varuna.close()


@pytest.mark.parametrize(
    ("give", "listed"),
    [
        (lambda logits, loss, accuracy: (loss, loss * 2), r"output\[0\] .*, output\[1\] "),
        (
            lambda logits, loss, accuracy: {"a": loss, "b": (accuracy, loss * 2)},
            r"output\['a'\] \(float32\[\]\), output\['b'\]\[1\] \(float32\[\]\)",
        ),
    ],
)
def test_several_numbers_are_listed_before_the_first_step(give: Any, listed: str) -> None:
    varuna = Varuna(Net(give), "0;", INPUTS, 6, 2, device="cpu")
    for call in (varuna.step, varuna.evaluate):
        with pytest.raises(SplitError, match=rf"2 numbers.*{listed}.*detach\(\) the others"):
            call(INPUTS)
    varuna.evaluate(INPUTS, outputs=True)  # what the model returns, whatever it is
    varuna.close()


def test_two_means_want_their_counts_before_the_step() -> None:
    def give(logits: Tensor, loss: Tensor, accuracy: Tensor) -> TokenMean:
        return TokenMean(loss, 1) + TokenMean(loss * 2, 2)

    varuna = Varuna(Net(give), "0;", INPUTS, 6, 2, device="cpu")
    with pytest.raises(SplitError, match=r"2 TokenMeans.*loss_counts\(\*\*inputs\)"):
        varuna.step(INPUTS)
    varuna.close()


def test_counts_that_differ_from_the_forwards_are_refused() -> None:
    class Wrong(Net):
        def loss_counts(self, y: Tensor, **others: Tensor) -> int:
            return len(y) + 1

    varuna = Varuna(Wrong(FOUND["a mean"]), "0;", INPUTS, 6, 2, device="cpu")
    with pytest.raises(SplitError, match=r"loss_counts returns 9 for this .* TokenMeans are 6"):
        varuna.step(INPUTS)


def test_a_plain_mean_may_have_a_method_of_that_name() -> None:
    class Counting(Net):
        def loss_counts(self) -> int:
            raise AssertionError("nobody asks")

    varuna = Varuna(Counting(FOUND["alone"]), "0;", INPUTS, 6, 2, device="cpu")
    torch.testing.assert_close(varuna.step(INPUTS)[0], compute_plainly()[0])
    varuna.close()


def test_a_loss_that_the_dry_run_did_not_see_is_a_mean_over_the_samples() -> None:
    loss, gradient = compute_plainly()
    dummies = {"x": INPUTS["x"]}
    varuna = Varuna(Net(FOUND["last"]), "0;", dummies, 6, 2, device="cpu")
    torch.testing.assert_close(varuna.step(INPUTS)[0], loss)
    torch.testing.assert_close(varuna.masters()["layers.0.weight"].grad, gradient)
    varuna.close()
    varuna = Varuna(Net(FOUND["a mean"]), "0;", dummies, 6, 2, device="cpu")
    with pytest.raises(SplitError, match="1 TokenMeans, but it had 0 in the dry run: give dummy"):
        varuna.step(INPUTS)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "stages_per_rank": 2},
        {"schedule": "zbv"},
        {"schedule": "zero_bubble"},
    ],
)
def test_a_micro_batch_without_tokens_may_return_a_zero_of_its_own(options: Any) -> None:
    """No gradient comes of it, to any stage."""

    class Skipping(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            assert y is not None
            logits = self.layers[1](self.cut(self.layers[0](x)))
            held = y >= 0
            if not held.any():
                return TokenMean(torch.zeros(()), 0)
            loss = nn.functional.cross_entropy(logits[held], y[held], reduction="sum")
            return TokenMean(loss, held.sum())

    batch = {**INPUTS, "y": torch.tensor([-1, -1, 1, -1, 0, 1])}
    plain = Skipping(FOUND["alone"])
    loss = plain(**batch).mean()
    loss.backward()
    dummies = {**batch, "y": batch["y"].clamp(min=0)}
    made = Skipping(FOUND["alone"])
    varuna = Varuna(made, "0;", dummies, 6, 2, device="cpu", **options)
    torch.testing.assert_close(varuna.step(batch)[0], loss.detach())
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)
    varuna.close()


def test_a_step_in_which_nothing_counts_has_no_loss_and_no_gradient() -> None:
    def give(logits: Tensor, loss: Tensor, accuracy: Tensor) -> Any:
        return {"loss": (logits.sum() * 0, 0)}

    varuna = Varuna(Net(give), "0;", INPUTS, 6, 2, device="cpu")
    assert varuna.step(INPUTS)[0] == 0 and varuna.last_grad_norm == 0
    varuna.close()


@pytest.mark.parametrize("output", [torch.ones(2, 3), {"loss": torch.ones(3)}, ("a", 1), None])
def test_what_is_no_loss_is_refused(output: Any) -> None:
    with pytest.raises(SplitError, match="not its loss: return one number"):
        pick_loss(output)


def test_a_mean_by_itself_is_a_plain_loss() -> None:
    both = TokenMean(torch.tensor(6.0), 3) + 0.5 * TokenMean(torch.tensor(8.0), torch.tensor(2))
    assert both.mean() == 4.0
