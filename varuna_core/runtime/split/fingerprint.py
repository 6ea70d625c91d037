"""A digest of all that a model's forward depends on: its modules, their values and their code.

Code is followed from classes, hooks and functions through the globals that they name, as far as
Python, torch and ourselves, which count by version. What cannot be described raises Unknown: then
there is no digest, and nothing may be kept under one.

Not seen: what code looks up by a name made at run time, environment variables, files.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import pathlib
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MAX_OBJECTS = 100_000
MAX_TENSOR_BYTES = 2**20
VERSIONED = {"torch", "torchgen", "numpy", "varuna_core", *sys.stdlib_module_names} - {"__main__"}
BY_REPR = (
    type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range,
    slice, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern,
    pathlib.PurePath,
)  # fmt: skip
BY_NAME = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, logging.Logger, type(threading.Lock()),
    type(threading.RLock()),
)  # fmt: skip
SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
"""Of exactly these types; what inherits from them is an object with content."""

UNTOLD = {
    "__dict__", "__weakref__", "__doc__", "__annotations__", "__firstlineno__", "_abc_impl",
    "__static_attributes__", "__annotate_func__", "__annotations_cache__",
}  # fmt: skip


class Unknown(Exception):
    """The model holds something that cannot be described."""


def take_fingerprint(model: nn.Module, *more: Any) -> str:
    """Hex digits that are the same for the same model and `more` in another process."""
    walk = _Walk(model)
    kinds = ("cpu", "cuda")
    try:
        walk.add([torch.__version__, sys.version, torch.get_default_dtype()])
        walk.add([torch.is_grad_enabled(), *map(torch.is_autocast_enabled, kinds)])
        walk.add([torch.get_autocast_dtype(kind) for kind in kinds])
        walk.add([model, *more])
    except RecursionError:
        raise Unknown("nested too deep") from None
    return walk.digest.hexdigest()


def is_versioned(name: str | None) -> bool:
    return str(name).partition(".")[0] in VERSIONED


class _Walk:
    """Each object once; a second time its number, so that what is shared counts as shared."""

    def __init__(self, model: nn.Module) -> None:
        self.digest = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id goes to another object meanwhile
        self.registered = {id(t) for t in (*model.parameters(), *model.buffers())}

    def write(self, *words: Any) -> None:
        for word in words:
            text = str(word).encode("utf-8", "surrogatepass")
            self.digest.update(b"%d:" % len(text) + text)

    def add(self, thing: Any) -> None:
        kind = type(thing)
        if isinstance(thing, BY_REPR) and not isinstance(thing, enum.Enum):
            self.write(kind.__name__, repr(thing))
            return
        if id(thing) in self.numbers:
            self.write("again", self.numbers[id(thing)])
            return
        self.numbers[id(thing)] = len(self.kept)
        self.kept.append(thing)
        if len(self.kept) > MAX_OBJECTS:
            raise Unknown(f"more than {MAX_OBJECTS} objects")
        self.write("new", kind.__module__, kind.__qualname__)
        if isinstance(thing, enum.Enum):
            self.write(thing.name)
        elif isinstance(thing, BY_NAME):
            self.write(getattr(thing, "__qualname__", None) or getattr(thing, "name", ""))
        elif isinstance(thing, type):
            self._add_class(thing)
        elif isinstance(thing, types.FunctionType):
            self._add_function(thing)
        elif isinstance(thing, types.ModuleType):
            self.write(thing.__name__)  # its attributes where code names them
        elif isinstance(thing, Tensor):
            self._add_tensor(thing)
        elif isinstance(thing, nn.Module):
            self._add_module(thing)
        elif kind in SEQUENCES:
            self._add_all(thing)
        elif kind in MAPPINGS:
            self._add_items(thing)
        elif kind in (set, frozenset):
            self._add_set(thing)
        else:
            self._add_all(self._parts_of(thing))

    def _parts_of(self, thing: Any) -> list[Any]:
        """What an object consists of."""
        if isinstance(thing, types.MethodType):
            return [thing.__func__, thing.__self__]
        if isinstance(thing, functools.partial):
            return [thing.func, thing.args, thing.keywords]
        if isinstance(thing, property):
            return [thing.fget, thing.fset]
        if isinstance(thing, (staticmethod, classmethod)):
            return [thing.__func__]
        if isinstance(thing, functools.cached_property):
            return [thing.func]
        if isinstance(thing, weakref.ref):
            return [thing()]
        if hasattr(thing, "cache_info") and hasattr(thing, "__wrapped__"):
            return [thing.__wrapped__]
        kind = type(thing)
        if kind.__module__ == "typing" or isinstance(thing, (types.UnionType, types.GenericAlias)):
            return [repr(thing)]
        slots = [name for base in kind.__mro__ for name in _slots_of(base)]
        if not (hasattr(thing, "__dict__") or slots):
            raise Unknown(f"an object of type {kind.__module__}.{kind.__qualname__}")
        parts: list[Any] = [kind, dict(getattr(thing, "__dict__", {}))]
        parts += [getattr(thing, name, None) for name in slots]
        if isinstance(thing, (dict, list, tuple, set, frozenset)):
            base = next(
                base for base in (dict, list, tuple, set, frozenset) if isinstance(thing, base)
            )
            parts.append(base(thing))
        return parts

    def _add_all(self, things: Iterable[Any]) -> None:
        for thing in list(things):
            self.add(thing)
        self.write("end")

    def _add_items(self, things: Any) -> None:
        self._add_all(part for item in list(things.items()) for part in item)

    def _add_set(self, things: Any) -> None:
        if not all(isinstance(item, BY_REPR) for item in things):
            raise Unknown("a set of objects")
        self._add_all(sorted(things, key=repr))

    def _add_tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            raise Unknown(f"a tensor of type {type(tensor).__name__}")
        self.write(tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type)
        self.write(tensor.requires_grad)
        if id(tensor) not in self.registered:  # the forward may look at its values
            if tensor.is_meta or tensor.numel() * tensor.itemsize > MAX_TENSOR_BYTES:
                raise Unknown("a large tensor that is neither parameter nor buffer")
            self.write(tensor.tolist())

    def _add_module(self, module: nn.Module) -> None:
        self.add(type(module))
        if is_versioned(type(module).__module__):  # its forward may have been replaced
            self.add(type(module).forward)
        keys: dict[int, int] = {}  # those of hooks count all hooks of the process
        for name, value in list(vars(module).items()):
            if value is None or (type(value) in MAPPINGS and not value):  # most of a module
                continue
            self.write(name)
            if "_hooks" in name and isinstance(value, dict):
                value = {keys.setdefault(key, len(keys)): hook for key, hook in value.items()}
            self.add(value)

    def _add_class(self, kind: type) -> None:
        self.write(kind.__module__, kind.__qualname__)
        if is_versioned(kind.__module__):
            return
        self._add_all(kind.__bases__)
        for name, value in list(vars(kind).items()):
            if name not in UNTOLD:
                self.write(name)
                self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        """Its code, with what it is closed over and the globals that it names."""
        self.write(function.__module__, function.__qualname__)
        names = self._add_code(function.__code__)
        if is_versioned(function.__module__):
            return
        self._add_all([function.__defaults__, function.__kwdefaults__, vars(function)])
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not bound yet
                self.write("empty")
        self._add_named(function.__globals__, names)

    def _add_code(self, code: types.CodeType) -> set[str]:
        """The names that it looks up."""
        names = set(code.co_names)
        self.write(code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars)
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                names |= self._add_code(const)
            else:
                self.write(sorted(const, key=repr) if isinstance(const, frozenset) else repr(const))
        return names

    def _add_named(self, scope: dict[str, Any], names: set[str]) -> None:
        """Of a module those attributes alone that the code names."""
        for name in sorted(names & scope.keys()):
            value = scope[name]
            self.write(name)
            if isinstance(value, types.ModuleType):
                self._add_attributes(value, names)
            else:
                self.add(value)

    def _add_attributes(self, module: types.ModuleType, names: set[str]) -> None:
        if not is_versioned(module.__name__):
            self.add(module)
            # Without this module's own name: packages hold themselves through their parts.
            self._add_named(vars(module), names - {module.__name__.rpartition(".")[2]})
            return
        self.write(module.__name__)
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, types.FunctionType):
                self.add(value)  # it may have been replaced
            elif isinstance(value, types.ModuleType) and value.__name__ == "torch.nn.functional":
                self._add_attributes(value, names)


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in named if name not in UNTOLD]
