"""Hooks of the user's, on parameters and on modules, do what they do in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.small import Gpt, TiedGpt, make_inputs
from varuna_core import Varuna

SIZE = 8
LIMIT = 2e-3


def cut_off(gradient: Tensor) -> Tensor:
    """Not linear: of the sum of micro-batches it gives something else than of each of them."""
    return gradient.clamp(-LIMIT, LIMIT)


def build(model: nn.Module, **options: Any) -> Varuna:
    options = {"schedule": "interleaved", "stages_per_rank": 2, **options}
    return Varuna(model, "0;", make_inputs(SIZE), SIZE, 2, device="cpu", **options)


def make_plain(kind: Callable[[], nn.Module] = Gpt) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def hook_all(parameters: Any, calls: list[Any]) -> list[Any]:
    def note(gradient: Tensor) -> Tensor:
        calls.append(gradient.shape)
        return cut_off(gradient)

    return [parameter.register_hook(note) for parameter in parameters]


PRECISIONS = ["fp32", "bf16"]


@pytest.mark.parametrize("kind", [Gpt, TiedGpt])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_hook_on_a_parameter_sees_the_batchs_gradient_once(
    precision: str, when: str, kind: type[nn.Module], schedule: str
) -> None:
    plain, calls, expected = make_plain(kind), [], []
    model = copy.deepcopy(plain)
    hook_all(plain.parameters(), expected)
    if when == "before":
        handles = hook_all(model.parameters(), calls)
    varuna = build(model, precision=precision, schedule=schedule)
    if when == "after":
        handles = hook_all(varuna.parameters(), calls)
    for _ in range(2):  # gradients add up
        varuna.step(make_inputs(SIZE))
        plain(**make_inputs(SIZE)).backward()
    assert sorted(calls) == sorted(expected)
    for name, master in varuna.masters().items():
        wanted = plain.get_parameter(name).grad
        if precision == "fp32":
            torch.testing.assert_close(master.grad, wanted)
        else:
            assert float((master.grad - wanted).abs().mean()) < LIMIT / 20, name
    for handle in handles:
        handle.remove()
    varuna.zero_grad()
    varuna.step(make_inputs(SIZE))
    assert len(calls) == len(expected)
    assert max(float(p.grad.abs().max()) for p in varuna.parameters()) > LIMIT


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hook_after_the_gradient_is_there_may_take_it(precision: str, when: str) -> None:
    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    plain = make_plain()
    model = copy.deepcopy(plain)
    if when == "before":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    varuna = build(model, precision=precision)
    for parameter in [*plain.parameters(), *(varuna.parameters() if when == "after" else [])]:
        parameter.register_post_accumulate_grad_hook(descend)
    for _ in range(2):
        varuna.step(make_inputs(SIZE))
        plain(**make_inputs(SIZE)).backward()
    rounding = {} if precision == "fp32" else {"atol": 0.02, "rtol": 0}
    for name, master in varuna.masters().items():
        assert master.grad is None
        torch.testing.assert_close(master, plain.get_parameter(name), **rounding)


def test_norm_and_clipping_follow_the_hooks() -> None:
    plain = make_plain()
    varuna = build(copy.deepcopy(plain))
    hook_all([*plain.parameters(), *varuna.parameters()], [])
    varuna.step(make_inputs(SIZE), clip_grad_max_norm=0.01)
    plain(**make_inputs(SIZE)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(varuna.last_grad_norm, norm)
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)


def test_a_failed_step_leaves_hooks_where_they_are() -> None:
    varuna, calls = build(make_plain()), []
    first = next(varuna.parameters())
    handle = first.register_hook(calls.append)
    varuna.engine.run = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        varuna.step(make_inputs(SIZE))
    (first * 2).sum().backward()
    assert len(calls) == 1
    handle.remove()
    (first * 2).sum().backward()
    assert len(calls) == 1


def fail(*args: Any, **options: Any) -> None:
    raise KeyError("no such block")


def test_a_hook_after_the_gradient_is_refused_with_offload() -> None:
    """The gradient is not where the parameter is yet."""
    model = make_plain()
    model.get_parameter("wpe.weight").register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match=r"'wpe\.weight'.*post_accumulate.*offload"):
        build(model, offload="optimizer")
    varuna = build(make_plain(), offload="optimizer")
    dict(varuna.named_parameters())["norm.bias"].register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"'norm\.bias'.*post_accumulate.*offload"):
        varuna.step(make_inputs(SIZE))


def test_a_hook_on_the_gradient_sees_it_with_offload() -> None:
    plain = make_plain()
    varuna = build(copy.deepcopy(plain), offload="optimizer")
    hook_all([*plain.parameters(), *varuna.parameters()], [])
    varuna.step(make_inputs(SIZE))
    plain(**make_inputs(SIZE)).backward()
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)


# On modules.


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if type(output) is Tensor:  # not of the dry run
            self.seen.append(output.detach().clone())


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def halve(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in incoming)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_hooks_on_modules_act_in_the_stages(recompute: str) -> None:
    plain = make_plain()
    for number in (1, 3):
        plain.blocks[number].up.register_forward_hook(double)
        plain.blocks[number].down.register_full_backward_hook(halve)
        plain.blocks[number].norm1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    varuna = build(copy.deepcopy(plain), recompute=recompute)
    varuna.step(make_inputs(SIZE))
    plain(**make_inputs(SIZE)).backward()
    for name, master in varuna.masters().items():
        torch.testing.assert_close(master.grad, plain.get_parameter(name).grad)


def test_a_hook_that_is_a_method_of_the_users_object_tells_that_object() -> None:
    recorder, plain = Recorder(), make_plain()
    for block in plain.blocks:
        block.register_forward_hook(recorder.note)
    model = copy.copy(plain)
    varuna = build(model)
    recorder.seen.clear()  # of the checks before training
    varuna.evaluate(make_inputs(SIZE))
    ours = torch.stack(recorder.seen)
    recorder.seen.clear()
    for begin in range(0, SIZE, 2):
        inputs = make_inputs(SIZE)
        plain(**{name: value[begin : begin + 2] for name, value in inputs.items()})
    expected = torch.stack(recorder.seen)
    assert len(ours) == len(expected) == 4 * len(plain.blocks)
    for tensor in expected:
        assert any(torch.allclose(tensor, other, atol=1e-6) for other in ours)
