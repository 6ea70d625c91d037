"""The library's dataclasses, without what takes half a millisecond of each class at its import.

The standard library compiles the text of six methods for every class; a command imports more than a
hundred classes and makes objects of some. Here the methods are closures, and what takes long is
done when it is first looked up: the fields, and the text of `__init__`. Classes with slots or an
order are left to the library.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import MISSING, Field, asdict, astuple, field, fields, is_dataclass, replace
from functools import partial
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


_lock = threading.RLock()


class _Fields:
    """`__dataclass_fields__` of a class, which the library finds when it is first looked up."""

    def __init__(self, owner: type, options: Dict[str, bool]) -> None:
        self.owner, self.options = owner, options

    def __get__(self, one: Any, owner: Any = None) -> Any:
        with _lock:
            if vars(self.owner)["__dataclass_fields__"] is self:
                make = dataclasses.dataclass(init=False, repr=False, eq=False, **self.options)
                make(self.owner)
        return vars(self.owner)["__dataclass_fields__"]


class _Method:
    """A method of a class, which is made when it is first looked up, and takes this place."""

    def __init__(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        self.owner, self.name, self.make = owner, name, make

    def __get__(self, one: Any, owner: Any = None) -> Any:
        made = self.make(self.owner)
        setattr(self.owner, self.name, made)
        return made.__get__(one, owner)


def _complete(cls: Any, *, frozen: bool = False, eq: bool = True, kw_only: bool = False) -> Any:
    own = dict(vars(cls))
    # Python 3.8 does not know the word kw_only.
    cls.__dataclass_fields__ = _Fields(cls, {"kw_only": True} if kw_only else {})
    makers: Dict[str, Any] = {"__init__": partial(_make_init, is_frozen=frozen)}
    if eq:
        makers.update(__eq__=_make_eq, __hash__=_make_hash)
    makers = {name: make for name, make in makers.items() if own.get(name) is None}
    if frozen:
        makers.update(__setattr__=_make_setattr, __delattr__=_make_delattr)
    for name, make in makers.items():
        setattr(cls, name, _Method(cls, name, make))
    if eq and not frozen and own.get("__hash__") is None:
        cls.__hash__ = None
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if any(isinstance(value, Field) for value in own.values()):
        fields(cls)  # which puts the defaults in the places of these attributes
    return cls


def _make_get(cls: Any) -> Callable[[Any], Any]:
    names = [each.name for each in fields(cls) if each.compare]
    return attrgetter(*names, *names[:1]) if names else type


def _make_eq(cls: Any) -> Any:
    get = _make_get(cls)

    def __eq__(self: Any, other: Any) -> Any:
        return get(self) == get(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _make_hash(cls: Any) -> Any:
    get = _make_get(cls)

    def __hash__(self: Any) -> int:
        return hash(get(self))

    return __hash__


def _make_setattr(cls: Any) -> Any:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    return __setattr__


def _make_delattr(cls: Any) -> Any:
    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __delattr__


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [each.name for each in fields(self) if each.repr]
    return f"{type(self).__qualname__}({', '.join(f'{x}={getattr(self, x)!r}' for x in shown)})"


def _make_init(cls: Any, is_frozen: bool) -> Any:
    """Compile the text of `__init__`, which puts a frozen object's fields past its own refusal."""
    scope: Dict[str, Any] = {"_unset": MISSING}
    first: List[str] = []
    by_name: List[str] = []
    lines = ["_own = self.__dict__"] if is_frozen else ["pass"]
    for each in fields(cls):
        name = value = each.name
        place = f"_own[{name!r}]" if is_frozen else f"self.{name}"
        default = f"=_of_{name}"
        scope[f"_of_{name}"] = each.default
        if each.default_factory is not MISSING:
            scope[f"_of_{name}"], default = each.default_factory, "=_unset"
            value = f"_of_{name}()"
            value = f"{value} if {name} is _unset else {name}" if each.init else value
        elif each.default is MISSING:
            default = ""
        if each.init:
            (by_name if getattr(each, "kw_only", False) else first).append(name + default)
        if each.init or each.default_factory is not MISSING:
            lines.append(f"{place} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    words = ", ".join(["self", *first, *(["*", *by_name] if by_name else [])])
    exec(f"def __init__({words}):\n " + "\n ".join(lines), scope)
    made = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {each.name: each.type for each in fields(cls) if each.init}
    made.__annotations__["return"] = None
    return made
