"""The library's dataclasses, without what takes half a millisecond of each class at its import.

The standard library compiles the text of six methods for every class; a command imports more than a
hundred classes and makes objects of some. Here the methods are closures, and `__init__` alone is
compiled, when it is first looked up. Classes with slots or an order are left to the library.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field, asdict, astuple, field, fields, is_dataclass, replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Callable, Dict, List

__all__ = ["MISSING", "Field", "asdict", "astuple", "dataclass", "field", "fields"]
__all__ += ["is_dataclass", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, **options):
        """Do what `dataclasses.dataclass` does; the options are those of `_complete`."""
        return _complete(cls) if cls is not None else lambda found: _complete(found, **options)


class _Init:
    """`__init__` of a class, which takes the place of this object when it is first looked up."""

    def __init__(self, owner: type, is_frozen: bool) -> None:
        self.owner, self.is_frozen = owner, is_frozen

    def __get__(self, one: Any, owner: Any = None) -> Any:
        made = _compile_init(self.owner, self.is_frozen)
        setattr(self.owner, "__init__", made)  # noqa: B010 - mypy refuses to assign a method
        return made.__get__(one, owner)


def _complete(cls: Any, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    own = dict(vars(cls))
    options = {"kw_only": True} if kw_only else {}  # Python 3.8 does not know the word
    dataclasses.dataclass(init=False, repr=False, eq=False, **options)(cls)
    methods: Dict[str, Any] = {"__init__": _Init(cls, frozen), "__repr__": _repr}
    if eq:
        methods.update(_make_comparing(cls, frozen))
    methods = {name: value for name, value in methods.items() if own.get(name) is None}
    if frozen:
        methods.update(_make_frozen(cls))
    for name, value in methods.items():
        setattr(cls, name, value)
    return cls


def _make_comparing(cls: Any, is_frozen: bool) -> Dict[str, Any]:
    names = [each.name for each in fields(cls) if each.compare]
    get: Callable[[Any], Any] = attrgetter(*names, *names[:1]) if names else type

    def __eq__(self: Any, other: Any) -> Any:
        return get(self) == get(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(get(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if is_frozen else None}


def _make_frozen(cls: Any) -> Dict[str, Any]:
    names = {each.name for each in fields(cls)}

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [each.name for each in fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(f'{x}={getattr(self, x)!r}' for x in shown)})"


def _compile_init(cls: Any, is_frozen: bool) -> Any:
    """Compile the text of `__init__`; a frozen object's fields are set past its own refusal."""
    scope: Dict[str, Any] = {"_set": object.__setattr__, "_unset": MISSING}
    first: List[str] = []
    by_name: List[str] = []
    lines: List[str] = []
    for each in fields(cls):
        name, value = each.name, each.name
        has_factory = each.default_factory is not MISSING
        has_default = each.default is not MISSING
        scope[f"_of_{name}"] = each.default_factory if has_factory else each.default
        if has_factory:
            value = (
                f"_of_{name}() if {name} is _unset else {name}" if each.init else f"_of_{name}()"
            )
        default = "=_unset" if has_factory else f"=_of_{name}" if has_default else ""
        if each.init:
            (by_name if getattr(each, "kw_only", False) else first).append(name + default)
        if each.init or has_factory:
            lines.append(
                f"_set(self, {name!r}, {value})" if is_frozen else f"self.{name} = {value}"
            )
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    words = ", ".join(["self", *first, *(["*", *by_name] if by_name else [])])
    exec(f"def __init__({words}):\n " + "\n ".join(lines or ["pass"]), scope)
    made = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {each.name: each.type for each in fields(cls) if each.init}
    made.__annotations__["return"] = None
    return made
