"""What ranks tell each other: it comes back the same, and a stranger's word makes nothing."""

from __future__ import annotations

import enum
import json
import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna_core.runtime.comm.words import HOLE, read, spell
from varuna_core.runtime.split.loss import TokenMean

Pair = namedtuple("Pair", "left right")


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Told:
    name: str
    shape: tuple[int, ...]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3]), Colour.RED, HOLE])
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.text(), st.integers())


def hold(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(values)
        | st.lists(values).map(tuple)
        | st.dictionaries(KEYS, values)
        | st.tuples(values, values).map(lambda both: Pair(*both))
        | st.dictionaries(st.text(), values).map(OrderedDict)
        | st.dictionaries(st.text(), values).map(lambda held: defaultdict(list, held))
        | st.lists(values).map(deque)
        | st.tuples(st.text(), st.lists(st.integers()).map(tuple)).map(lambda both: Told(*both))
    )


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [types_of(item) for item in value]
    return type(value)


@given(st.recursive(LEAVES, hold, max_leaves=12))
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = read(spell(value))
    assert again == value and types_of(again) == types_of(value)
    assert repr(again) == repr(value)  # signs of zeros, the order of dicts, what a default makes


def test_numbers_that_json_lacks_come_back() -> None:
    again = read(spell([float("nan"), float("inf"), -float("inf"), 2**80, -0.0]))
    assert str(again) == str([float("nan"), float("inf"), -float("inf"), 2**80, -0.0])


def test_a_small_tensor_comes_back() -> None:
    for value in (torch.tensor([[1.5, float("nan")]]).double(), torch.tensor(2**60)):
        again = read(spell(value))
        assert again.dtype == value.dtype and torch.equal(again.nan_to_num(), value.nan_to_num())


def test_a_container_that_torch_knows_comes_back() -> None:
    again = read(spell(TokenMean(1.5, 3)))  # type: ignore[arg-type]
    assert isinstance(again, TokenMean) and again.terms == ((1.5, 3),)


@pytest.mark.parametrize(
    "told",
    [
        ["made", "subprocess:Popen", [["args", "true"]]],
        ["node", "os:system", ["true"], None],
        ["named", "builtins:tuple", [1]],
        ["enum", "os:environ", "PATH"],
        ["made", "not.imported:Thing", []],
        ["dtype", "load"],
        ["type", "eval"],
        ["call", "os:system"],
        [],
    ],
)
def test_a_strangers_word_makes_nothing(told: Any) -> None:
    with pytest.raises(ValueError):
        read(json.dumps(told).encode())


def test_a_pickle_is_not_read() -> None:
    with pytest.raises(ValueError):
        read(pickle.dumps([1]))


def test_what_cannot_be_told_is_named() -> None:
    class Inner(enum.Enum):
        ONE = 1

    with pytest.raises(TypeError, match="a set cannot be sent"):
        spell({1, 2})
    with pytest.raises(TypeError, match="at the top of its file"):
        spell(Inner.ONE)
