"""What a model returns for micro-batches is made one, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.small import LogitsFirstGpt, ToldGpt, make_inputs
from varuna_core import TokenMean, Varuna
from varuna_core.runtime.batch.outputs import StepOutputs, join_outputs
from varuna_core.runtime.split.cut import SplitError


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 9))
def test_samples_are_joined_where_the_inputs_have_theirs(
    sizes: list[int], dim: int, seed: int
) -> None:
    """Also where another dimension happens to be as long."""
    draw = torch.Generator().manual_seed(seed)
    shape = torch.randint(1, 4, (3,), generator=draw).tolist()
    shape[dim] = sum(sizes)
    whole = torch.randn(shape, generator=draw)
    assert torch.equal(join_outputs(whole.split(sizes, dim), sizes, [dim]), whole)


def test_structures_losses_and_the_rest() -> None:
    def make(size: int, loss: float, extra: Any) -> Any:
        rows = torch.full((size, 3), loss)
        return {"loss": torch.tensor(loss), "pair": (rows, None), "note": "a", "extra": extra}

    joined = join_outputs([make(2, 1.0, 1), make(1, 4.0, 2)], [2, 1], [0])
    assert joined["loss"] == 2.0 and joined["loss"].dtype == torch.float32
    assert joined["pair"][0].tolist() == [[1.0] * 3, [1.0] * 3, [4.0] * 3]
    assert joined["pair"][1] is None and joined["note"] == "a" and joined["extra"] == [1, 2]


def test_tensors_without_samples_are_stacked_or_listed() -> None:
    counts = join_outputs([torch.tensor(3), torch.tensor(5)], [2, 2], [0])
    assert counts.tolist() == [3, 5]
    assert join_outputs([torch.ones(7), torch.zeros(7)], [2, 1], [0]).shape == (2, 7)
    ragged = join_outputs([torch.ones(2, 7), torch.zeros(2, 6)], [2, 2], [0])
    assert [tuple(one.shape) for one in ragged] == [(2, 7), (2, 6)]


def test_another_dimension_is_found_where_the_inputs_do_not_tell() -> None:
    parts = [torch.ones(5, 2), torch.zeros(5, 1)]
    assert join_outputs(parts, [2, 1], [0]).shape == (5, 3)


def test_nothing_comes_of_nothing_and_other_structures_are_refused() -> None:
    assert join_outputs([], [], [0]) is None
    with pytest.raises(SplitError, match="other structure"):
        join_outputs([(torch.ones(1),), torch.ones(1)], [1, 1], [0])


def join_step(outputs: list[Any], sizes: list[int], names: list[str | int]) -> dict[Any, Any]:
    asked = StepOutputs(names)
    for number in reversed(range(len(outputs))):  # kept in any order
        asked.keep(number, outputs[number])
    return asked.join(sizes, [0], torch.device("cpu"), None)


def test_single_numbers_of_a_step_are_averaged_summed_or_counted() -> None:
    def make(size: int, fraction: float, count: int, flag: bool) -> Any:
        mean = TokenMean(torch.tensor(count), torch.tensor(4))
        rows = torch.full((size, 3), fraction, requires_grad=True)
        numbers = {"count": torch.tensor(count), "flag": torch.tensor(flag), "mean": mean}
        return {**numbers, "fraction": torch.tensor(fraction), "rows": rows, "word": "a", "n": 3}

    names: list[str | int] = ["rows", "fraction", "count", "flag", "mean", "word", "n"]
    told = join_step([make(2, 1.0, 3, True), make(1, 4.0, 2, False)], [2, 1], names)
    assert [*told] == names
    assert told["fraction"] == 2.0 and told["count"] == 5 and told["flag"] == 1
    assert told["mean"] == 5 / 8 and told["mean"].dtype == torch.float32
    assert told["rows"].tolist() == [[1.0] * 3, [1.0] * 3, [4.0] * 3]
    assert not told["rows"].requires_grad and told["word"] == "a" and told["n"] == 3


def test_outputs_are_named_by_key_attribute_or_place() -> None:
    class Output:
        height = torch.tensor(2.0)

    one = torch.tensor(1.0)
    assert join_step([(one, 2.0 * one)], [1], [1, -2]) == {1: 2.0, -2: 1.0}
    assert join_step([Output()], [1], ["height"]) == {"height": 2.0}
    assert join_step([], [], ["height"]) == {"height": None}
    for output, name, listed in (
        ({"a": one, "b": one}, "c", "a dict with 'a', 'b'"),
        ((one, one), 2, "2 values"),
        (one, "mean of it", "a Tensor"),
    ):
        with pytest.raises(SplitError, match=f"requests {name!r}.* returns {listed}"):
            join_step([output], [1], [name])


def test_a_name_that_the_model_does_not_return_is_refused_before_the_step() -> None:
    varuna = Varuna(ToldGpt(), "0;", make_inputs(), 4, 2, device="cpu")
    ran: list[int] = []
    varuna.part.stages[0].module.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(SplitError, match=r"'acuracy'.*'loss', 'height', 'hits', 'accuracy'"):
        varuna.step(make_inputs(), outputs=("acuracy",))
    with pytest.raises(TypeError, match="expected a sequence of names"):
        varuna.step(make_inputs(), outputs="accuracy")
    assert not ran and len(varuna.step(make_inputs())) == 2
    varuna.close()


def test_the_logits_of_a_step_keep_no_graph() -> None:
    varuna = Varuna(LogitsFirstGpt(), "0;", make_inputs(), 4, 2, device="cpu")
    _, _, told = varuna.step(make_inputs(), outputs=(0, 2))
    assert told[0].shape[0] == 4 and told[0].grad_fn is None and told[2].dim() == 0
    varuna.close()
