"""CutPoint: the mark in a model where it may be cut, and the watchers of a running forward.

A CutPoint knows neither its number nor its stage. Whoever runs the model (a dry run, a stage)
watches the calls, and the k-th call of a forward is cut k; so CutPoints in a plain list, and those
captured by a hook or a closure, work like registered ones. Unwatched, a CutPoint is the identity.

    segment 0 | cut 0 | segment 1 | cut 1 | ... | cut n-1 | segment n
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn


class SplitError(ValueError):
    """The model cannot be split this way; the message says why and what to do."""


class LeakError(SplitError):
    """A value reaches a stage around its cut."""


class StageEnd(BaseException):
    """Leaves the user's forward at a stage's last cut; no `except Exception` swallows it."""


class Watcher(Protocol):
    """Sees every CutPoint that a forward passes."""

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        """Return what the CutPoint returns."""


_running = threading.local()


def watch(watcher: Watcher | None) -> Watcher | None:
    """Let `watcher` see the CutPoints that this thread passes; returns who saw them before."""
    before: Watcher | None = getattr(_running, "watcher", None)
    _running.watcher = watcher
    return before


def unpack(values: tuple[Any, ...]) -> Any:
    """The value that a CutPoint called with these values returns."""
    return values[0] if len(values) == 1 else values


class CutPoint(nn.Module):
    """Marks a possible cut: `x = cut(x)` or `x, mask = cut(x, mask)`.

    What goes through may be tensors of any type, None, numbers and strings, and tuples, lists and
    dicts of these. Each CutPoint is passed once a forward.
    """

    def forward(self, *values: Any) -> Any:
        watcher: Watcher | None = getattr(_running, "watcher", None)
        if watcher is None:
            return unpack(values)
        return watcher.pass_cut(self, values)

    def __call__(self, *values: Any) -> Any:
        # A passive cut is passed for each layer before a stage: no hooks, no module call.
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*values)
        return self.forward(*values)


def cut_before(*modules: nn.Module) -> None:
    """Put a CutPoint before each of these modules, without a change of the model's code.

    What passes it is the module's first argument; what else goes to the module must come from the
    inputs alone. Of an `nn.ModuleList` each element is meant: `cut_before(model.blocks,
    model.norm)`.
    """
    for module in modules:
        if isinstance(module, nn.ModuleList):
            cut_before(*module)
            continue
        if not isinstance(module, nn.Module):
            raise TypeError(f"cut_before takes modules of the model, not {module!r:.80}")
        if hasattr(module, _CUT):
            raise SplitError(f"there is a cut before this {type(module).__name__} already")
        setattr(module, _CUT, CutPoint())
        module.register_forward_pre_hook(_enter, with_kwargs=True)


_CUT = "cut_before_this"


def _enter(
    module: nn.Module, args: tuple[Any, ...], by_name: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hook: the first argument, by place or by name, passes the module's cut."""
    cut: CutPoint = getattr(module, _CUT)
    if args:
        return (cut(args[0]), *args[1:]), by_name
    if not by_name:
        raise SplitError(f"a {type(module).__name__} after a cut is called without arguments")
    first = next(iter(by_name))
    return args, {**by_name, first: cut(by_name[first])}


class _Announcer:
    def __init__(self, on_segment: Callable[[int], None]) -> None:
        self.on_segment, self.segment = on_segment, 0

    def pass_cut(self, point: CutPoint, values: tuple[Any, ...]) -> Any:
        self.segment += 1
        self.on_segment(self.segment)
        return unpack(values)


@contextmanager
def announce_segments(on_segment: Callable[[int], None]) -> Iterator[None]:
    """Call `on_segment(k)` as one forward of a whole model enters segment k: to seed or time it."""
    before = watch(_Announcer(on_segment))
    try:
        on_segment(0)
        yield
    finally:
        watch(before)
