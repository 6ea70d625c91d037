"""Our `dataclass` makes the classes that the standard library's makes."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from functools import partial
from typing import Any, ClassVar

import pytest

from varuna_core.facts.dataclasses import dataclass, field

KINDS = (dataclass, dataclasses.dataclass)


def make_classes(kind: Any) -> dict[str, Any]:
    """Classes with everything that ours have, made by one of the two decorators."""

    @kind
    class Plain:
        number: int
        text: str = "x"

    @kind(frozen=True)
    class Frozen:
        constant: ClassVar[int] = 3
        number: int
        parts: list[int] = field(default_factory=list)
        hidden: int = field(default=0, repr=False)
        loose: int = field(default=0, compare=False)

    @kind(frozen=True)
    class One:
        number: float

    @kind(frozen=True, kw_only=True)
    class Child(One):
        text: str
        half: float = field(init=False, compare=False)
        more: tuple[int, ...] = field(init=False, default_factory=tuple)

        def __post_init__(self) -> None:
            object.__setattr__(self, "half", self.number / 2)

    @kind(frozen=True, eq=False)
    class ByIdentity:
        pass

    @kind(frozen=True)
    class Own:
        number: int

        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            return "own"

        def __init__(self, number: int) -> None:
            object.__setattr__(self, "number", -number)

    class Grandchild(Child):
        pass

    return {name: value for name, value in locals().items() if name != "kind"}


def describe(work: Any) -> str:
    try:
        return repr(work()).replace("<factory>", "?").replace(repr(dataclasses.MISSING), "?")
    except (TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "text",
    [
        "Plain(1)", "Plain(1, text='y')", "Plain()", "Plain(1, 2, 3)", "Plain(1) == Plain(1)",
        "Plain(1) == Frozen(1)", "hash(Plain(1))", "vars(Plain(1))", "Plain.text",
        "Frozen(1)", "Frozen(1, [2])", "Frozen(1).parts is Frozen(1).parts", "Frozen.hidden",
        "Frozen(1, hidden=4) == Frozen(1)", "Frozen(1, loose=4) == Frozen(1)", "hash(Frozen(1))",
        "setattr(Frozen(1), 'number', 2)", "delattr(Frozen(1), 'number')", "Frozen.__match_args__",
        "setattr(Frozen(1), 'other', 2)", "One(nan) == One(nan)", "hash(One(1)) == hash(One(1.0))",
        "{One(1): 'a'}[One(1)]", "Child(2, text='a')", "Child(2, 'a')", "Child(2, text='a').half",
        "setattr(Child(2, text='a'), 'number', 1)", "Grandchild(2, text='a')",
        "setattr(Grandchild(2, text='a'), 'text', 1)", "vars(setter(Grandchild(2, text='a')))",
        "Grandchild(2, text='a') == Child(2, text='a')", "One(2) == Child(2, text='a')",
        "ByIdentity() == ByIdentity()", "len({ByIdentity(), ByIdentity()})", "Own(2) == 3",
        "Own(2)", "Own(2).number", "hash(Own(2)) == hash(Own(2))", 
        "replace(Child(2, text='a'), number=4)",
        "asdict(Frozen(1, [2]))", "fields(Child)[1].name", "signature(Plain)", "signature(Child)",
        "Child.__init__.__qualname__", "is_dataclass(Grandchild)",
    ],
)  # fmt: skip
def test_a_class_does_what_the_librarys_does(text: str) -> None:
    def setter(one: Any) -> Any:
        one.other = 1
        return one

    there = {**vars(dataclasses), "signature": inspect.signature, "nan": float("nan")}
    there["setter"] = setter
    ours, theirs = (describe(partial(eval, text, there, make_classes(kind))) for kind in KINDS)
    assert ours == theirs


@dataclass(frozen=True)
class Knot:
    parts: list[Any]


def test_objects_can_be_pickled_and_may_hold_themselves() -> None:
    knot = Knot([1])
    assert pickle.loads(pickle.dumps(knot)) == knot
    knot.parts.append(knot)
    assert repr(knot) == "Knot(parts=[1, ...])"
