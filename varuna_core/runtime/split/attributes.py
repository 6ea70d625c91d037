"""Save and restore plain attributes of modules that a forward changes.

A module may have state besides parameters and buffers: `self.average = 0.9 * self.average + ...`, a
counter, a list, a random generator. Runs other than training steps (the dry run, the checks of a
stage, a recompute) must leave this state unchanged, like buffers.

Objects of other classes, and containers of more than `LONGEST` items, are saved by reference:
changes within them are not undone.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[str, str]
"""Name of a module in its model, and of its attribute."""

HOOKS = {name for name in vars(nn.Module()) if "hook" in name}
"""Names of a module's dicts of hooks. These are saved too, since a model that installs hooks may
record this in an attribute."""

TORCHS = {*vars(nn.Module()), "forward"} - HOOKS
"""Attributes that torch keeps in each module, and the forward, which stages replace."""

DEPTH = 4
"""Maximum nesting of containers that are inspected."""

LONGEST = 1000
"""Containers with more items than this are kept by reference."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ValueCopy:
    """A saved value, which can detect a change and restore the value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def has_changed(self, now: Any) -> bool:
        """Return True if `now`, the attribute's present value, differs from the saved one."""
        if now is self.value:
            return False
        return not (type(now) is type(self.value) and isinstance(now, PLAIN) and now == self.value)

    def restore(self) -> Any:
        return self.value


class _KeptTensor(ValueCopy):
    def __init__(self, value: Tensor) -> None:
        super().__init__(value.detach() if value.grad_fn is not None else value)
        self.original = value
        self.version = value._version
        self.copy = value.detach().clone()

    def has_changed(self, now: Any) -> bool:
        return now is not self.original or now._version != self.version

    def restore(self) -> Any:
        if self.original._version != self.version:
            with torch.no_grad():
                self.value.copy_(self.copy)
            self.version = self.original._version
        return self.value


class _KeptStream(ValueCopy):
    """A random generator, saved as its state."""

    def __init__(
        self, value: Any, get: Callable[[Any], Any], put: Callable[[Any, Any], None]
    ) -> None:
        super().__init__(value)
        self.get, self.put, self.state = get, put, get(value)

    def has_changed(self, now: Any) -> bool:
        return now is not self.value or pickle.dumps(self.get(now)) != pickle.dumps(self.state)

    def restore(self) -> Any:
        self.put(self.value, self.state)
        return self.value


class _KeptContainer(ValueCopy):
    """The saved content of a list, tuple, dict, set or deque, item by item."""

    def __init__(self, value: Any, depth: int) -> None:
        super().__init__(value)
        self.pairs = [(key, keep(item, depth + 1)) for key, item in _list_items(value)]

    def has_changed(self, now: Any) -> bool:
        if now is not self.value or len(now) != len(self.pairs):
            return True
        items = zip(self.pairs, _list_items(now), strict=True)
        return any(key != other or kept.has_changed(item) for (key, kept), (other, item) in items)

    def restore(self) -> Any:
        items = [(key, kept.restore()) for key, kept in self.pairs]
        if not isinstance(self.value, tuple):
            self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(items)
        elif isinstance(self.value, set):
            self.value.update(item for _, item in items)
        elif not isinstance(self.value, tuple):
            self.value.extend(item for _, item in items)
        return self.value


def _list_items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def keep(value: Any, depth: int = 0) -> ValueCopy:
    """Save a value as it is now."""
    if isinstance(value, PLAIN):
        return ValueCopy(value)
    if isinstance(value, Tensor):
        is_kept_elsewhere = isinstance(value, nn.Parameter) or value.is_inference()
        return ValueCopy(value) if is_kept_elsewhere else _KeptTensor(value)
    if type(value) in (list, tuple, dict, OrderedDict, set, deque):
        if depth < DEPTH and len(value) <= LONGEST:
            return _KeptContainer(value, depth)
        return ValueCopy(value)
    stream = find_stream(value)
    return ValueCopy(value) if stream is None else _KeptStream(value, *stream)


def find_stream(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]] | None:
    """Return functions that get and set a generator's state; None for other values."""
    if isinstance(value, torch.Generator):
        return (
            lambda stream: stream.get_state().tolist(),
            lambda stream, state: stream.set_state(torch.tensor(state, dtype=torch.uint8)),
        )
    if isinstance(value, random.Random):
        return random.Random.getstate, random.Random.setstate
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        return (
            lambda stream: stream.bit_generator.state,
            lambda stream, state: setattr(stream.bit_generator, "state", state),
        )
    if isinstance(value, numpy.RandomState):
        return numpy.RandomState.get_state, numpy.RandomState.set_state
    return None


class KeptAttributes:
    """The saved attributes of a model's modules."""

    def __init__(self, model: nn.Module, places: Collection[Place] | None = None) -> None:
        """Save all attributes, or only those in `places`."""
        self._places = places
        modules = model.named_modules() if places is None else ()
        self._modules = dict(modules) or {p: model.get_submodule(p) for p, _ in places or ()}
        self._kept = {path: self._keep(path) for path in self._modules}

    def _keep(self, path: str) -> dict[str, ValueCopy]:
        return {name: keep(value) for name, value in self._list_own(path).items()}

    def _list_own(self, path: str) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self._modules[path]).items()
            if name not in TORCHS
            and (name not in HOOKS or value)  # most are empty
            and (self._places is None or (path, name) in self._places)
        }

    def list_changed(self) -> list[Place]:
        """Return the places whose values have been changed, added or removed since."""
        found = []
        for path, kept in self._kept.items():
            now = self._list_own(path)
            found += [
                (path, name)
                for name in {**kept, **now}
                if name not in kept or name not in now or kept[name].has_changed(now[name])
            ]
        return found

    def restore(self) -> None:
        """Restore all values, and remove new attributes."""
        for path, kept in self._kept.items():
            own = self._modules[path].__dict__
            for name in self._list_own(path):
                if name not in kept and name in HOOKS:
                    own[name].clear()
                elif name not in kept:
                    del own[name]
            for name, value in kept.items():
                own[name] = value.restore()


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Save the model's attributes, and restore them at the end of the context."""
    kept = KeptAttributes(model)
    try:
        yield
    finally:
        kept.restore()
